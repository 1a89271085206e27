#!/usr/bin/env python3
"""Kitty, KVQuant and ZipCache: kvant beside the package veloxquant-mlx, in one process, on one thread.

Both get the same arrays and take turns. Nothing is printed unless both return the same bits and counters. Seconds are
CPU time of the whole process (mlx computes in a thread of its own), so that what other programs do on the machine
counts less. ``make bench-reference`` installs what it needs and runs it; bench/README.md explains the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before the libraries read it
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import kvant
import mlx.core as mx
import numpy as np
from veloxquant_mlx.cache.base import KVCacheConfig as PackageConfig
from veloxquant_mlx.cache.base import KVCacheFactory

HEADS, DIM = 8, 128
# Issue 4: times the package's speed in prefill, and bits per value held for keys and values (None: no limit).
GOALS = {"kitty": (5, 3.6, None), "kvquant": (20, 3.6, 4.5), "zipcache": (5, 3.6, 5.1)}
COUNTERS = ("compressed_key_bytes", "fp16_key_bytes")


def settle_allocator() -> None:
    """Frees one large array. From then on glibc keeps freed memory instead of handing its pages back, as it does in any
    program that has run a model; without it page faults would be most of the time of both sides."""
    large = mx.zeros((31 << 20,), mx.uint8)
    mx.eval(large)


def random_rows(tokens: int, seed: int) -> mx.array:
    rows = np.random.default_rng(seed).standard_normal((1, HEADS, tokens, DIM)).astype(np.float16)
    array = mx.array(rows)
    mx.eval(array)
    return array


def ours(method: str):
    cache = kvant.make_cache(kvant.KVCacheConfig(method=method, head_dim=DIM))
    cache.threads = 1
    return cache


def package(method: str):
    return KVCacheFactory.create(PackageConfig(method=method, head_dim=DIM))


SIDES = {"package": package, "kvant": ours}


def call(cache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    rows = cache.update_and_fetch(keys, values)
    mx.eval(*rows)
    return rows


def check(method: str, tokens: int) -> None:
    """Exits unless both return the same bits and counters for a prefill, single tokens and a second block."""
    caches = [package(method), ours(method)]
    for step, count in enumerate((tokens, 1, 1, 70, 1)):
        keys, values = random_rows(count, 10 + step), random_rows(count, 50 + step)
        want, got = (call(cache, keys, values) for cache in caches)
        same = all(np.array_equal(np.array(a).view(np.uint16), np.array(b).view(np.uint16)) for a, b in zip(want, got))
        same = same and all(getattr(caches[0], name) == getattr(caches[1], name) for name in COUNTERS)
        if not same:
            sys.exit(f"{method}: kvant and the package differ after call {step} ({count} tokens); no figures")


def interleaved(steps: dict, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds of each step, the steps taking turns; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn:
                times[name].append(1e3 * (time.process_time() - start))
    return times


def middle(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and the median of the ratios of neighbours."""
    ratios = [a / b for a, b in zip(times["package"], times["kvant"])]
    return {**{name: statistics.median(t) for name, t in times.items()}, "ratio": statistics.median(ratios)}


def prefill(method: str, tokens: int, rounds: int) -> dict[str, float]:
    keys, values = random_rows(tokens, 1), random_rows(tokens, 2)
    gc.disable()
    times = interleaved({n: lambda make=m: call(make(method), keys, values) for n, m in SIDES.items()}, rounds)
    gc.enable()
    return middle(times)


def one_token(method: str, depth: int, rounds: int) -> dict[str, float]:
    keys, values = random_rows(depth, 3), random_rows(depth, 4)
    token = random_rows(1, 5), random_rows(1, 6)
    caches = {name: make(method) for name, make in SIDES.items()}
    for cache in caches.values():
        call(cache, keys, values)
    gc.disable()
    times = interleaved({name: lambda c=cache: call(c, *token) for name, cache in caches.items()}, rounds)
    gc.enable()
    return middle(times)


def decode_step(method: str, depth: int, rounds: int) -> dict[str, float]:
    """One token and its attention with 4 query heads per KV head: rows and mlx's kernel, or kvant's packed codes."""
    queries = mx.array(np.random.default_rng(9).standard_normal((1, 4 * HEADS, 1, DIM)).astype(np.float16))
    token = random_rows(1, 5), random_rows(1, 6)
    mx.eval(queries)
    scale = DIM**-0.5
    theirs, mine = package(method), ours(method)
    for cache in (theirs, mine):
        call(cache, random_rows(depth, 3), random_rows(depth, 4))

    def with_rows() -> mx.array:
        out = mx.fast.scaled_dot_product_attention(queries, *theirs.update_and_fetch(*token), scale=scale)
        mx.eval(out)
        return out

    def from_codes() -> mx.array:
        mine.update(*token)
        return mine.attend(queries, scale=scale, threads=1)

    want, got = (np.array(step().astype(mx.float32)) for step in (with_rows, from_codes))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    if not error < 2e-3:
        sys.exit(f"{method}: attention differs by {error:.2g} at {depth} tokens; no figures")
    return middle(interleaved({"package": with_rows, "kvant": from_codes}, rounds))


def memory(method: str, tokens: int) -> dict[str, float]:
    """Bytes over those of an fp16 cache, and bits per value of kvant's keys and values."""
    gc.collect()
    before = mx.get_active_memory()
    theirs = package(method)
    call(theirs, random_rows(tokens, 7), random_rows(tokens, 8))
    gc.collect()
    held = mx.get_active_memory() - before
    mine = ours(method)
    keys, values = random_rows(tokens, 7), random_rows(tokens, 8)
    fp16 = keys.nbytes + values.nbytes
    call(mine, keys, values)
    return {
        "package": held / fp16,
        "kvant": mine.nbytes / fp16,
        "key_bits": 8 * mine.key_nbytes / keys.size,
        "value_bits": 8 * mine.value_nbytes / values.size,
    }


def verdict(value: float, goal: float | None, more_is_better: bool) -> str:
    if goal is None:
        return "-"
    reached = value >= goal if more_is_better else value <= goal
    return f"{'>=' if more_is_better else '<='} {goal:g}: {'reached' if reached else 'MISSED'}"


def print_speed(title: str, rows: list[tuple[str, dict[str, float], float]]) -> None:
    print(f"\n{title}\n\n| | package, ms | kvant, ms | package / kvant | goal |\n|---|---|---|---|---|")
    for name, r, goal in rows:
        print(
            f"| {name} | {r['package']:.3g} | {r['kvant']:.3g} | {r['ratio']:.3g} | {verdict(r['ratio'], goal, True)} |"
        )


def print_memory(tokens: int, results: dict) -> None:
    print(f"\nMemory held after a prefill of {tokens} tokens\n")
    print("| | package, x fp16 | kvant, x fp16 | key bits | goal | value bits | goal |\n|---|---|---|---|---|---|---|")
    for method, r in results.items():
        _, key_goal, value_goal = GOALS[method]
        print(
            f"| {method} | {r['package']:.2f} | {r['kvant']:.3f} | {r['key_bits']:.3f} "
            f"| {verdict(r['key_bits'], key_goal, False)} | {r['value_bits']:.3f} "
            f"| {verdict(r['value_bits'], value_goal, False)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the prefill (default 1024)")
    parser.add_argument("--depths", default="128,1024,4096", help="tokens stored before the one-token calls")
    parser.add_argument("--rounds", type=int, default=9, help="prefills of each side (default 9; KVQuant a third)")
    parser.add_argument("--calls", type=int, default=101, help="one-token calls of each side (default 101)")
    parser.add_argument("--methods", default=",".join(GOALS), help="default: all three")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    methods = options.methods.split(",")
    depths = [int(depth) for depth in options.depths.split(",")]

    settle_allocator()
    for method in methods:
        check(method, options.tokens)
    figures: dict = {"prefill": {}, "one_token": {}, "decode_step": {}, "memory": {}}
    for method in methods:
        rounds = max(3, options.rounds // 3) if method == "kvquant" else options.rounds
        figures["memory"][method] = memory(method, options.tokens)
        figures["prefill"][method] = prefill(method, options.tokens, rounds)
        figures["one_token"][method] = {depth: one_token(method, depth, options.calls) for depth in depths}
        figures["decode_step"][method] = {
            depth: decode_step(method, depth, max(3, options.calls // 10)) for depth in depths
        }

    print(f"B=1, H={HEADS}, D={DIM}, fp16, one thread; kernels: {kvant.active_kernel()}; outputs equal to the bit")
    print_speed(
        f"Prefill of {options.tokens} tokens",
        [(method, figures["prefill"][method], GOALS[method][0]) for method in methods],
    )
    for title, name in (
        ("One-token calls of update_and_fetch, all rows returned", "one_token"),
        ("One token and its attention: update_and_fetch and mlx's attention, update and attend", "decode_step"),
    ):
        rows = [(f"{m}, {depth} tokens stored", r, 1) for m in methods for depth, r in figures[name][m].items()]
        print_speed(title, rows)
    print_memory(options.tokens, figures["memory"])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
