#!/usr/bin/env python3
"""Time of every decoded token over depth: is it a straight line, and what does the token cost that seals a page?

Decodes a text token by token through the binding of build/venv, --rounds times; a token's time is its smallest. Tokens that
seal a page are left out of the line that is fitted to the medians of whole pages."""

import argparse
import json
import pathlib
import time

import one_cache

PAGE = 128  # of every recipe's default


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one_cache.add_arguments(parser)
    parser.add_argument("--caches", default="stock:f16; balanced; small", help="separated by ';'")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="file for every token's milliseconds")
    return parser.parse_args()


def run_cache(options):
    """Prints the milliseconds of every token as one JSON array."""
    capi, model = one_cache.open_model(options)
    tokens = model.tokens(options.text.read_text(encoding="utf-8"), options.tokens)
    best = [float("inf")] * len(tokens)
    for _ in range(options.rounds):
        context = capi.Context(model, n_ctx=options.tokens, cache_type=one_cache.cache_type(options))
        for i, token in enumerate(tokens):
            start = time.perf_counter()
            context.extend([token], i, only_last=True)
            best[i] = min(best[i], 1000 * (time.perf_counter() - start))
        context.close()
    print(json.dumps(best))


def describe(cache, times):
    """One line: the fitted line, how far pages are from it, and what sealing tokens cost more than their neighbours."""
    import numpy as np

    times = np.asarray(times)
    token = np.arange(len(times))
    seals = (token % PAGE == PAGE - 1) & (token >= 2 * PAGE - 1)  # the window is one page behind
    pages = [np.median(times[i : i + PAGE - 1]) for i in range(0, len(times) - PAGE + 1, PAGE)]
    middle = PAGE * (np.arange(len(pages)) + 0.5)
    slope, start = np.polyfit(middle, pages, 1)
    off = np.abs(np.asarray(pages) - (start + slope * middle)).max()
    extra = np.median(times[seals] - (start + slope * token[seals]))
    return f"{cache:<16} {start:7.2f} {1000 * slope:12.2f} {off:14.2f} {extra:14.2f}"


def main():
    options = parse_arguments()
    if options.one:
        return run_cache(options)
    results = {}
    print(f"{'cache':<16} {'ms at 0':>7} {'ms per 1000':>12} {'page off line':>14} {'sealing token':>14}")
    for cache in (part.strip() for part in options.caches.split(";") if part.strip()):
        results[cache] = json.loads(one_cache.run_process(cache).splitlines()[-1])
        print(describe(cache, results[cache]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")
    return None


if __name__ == "__main__":
    main()
