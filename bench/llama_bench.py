#!/usr/bin/env python3
"""Decode and prefill speed of stock llama-bench over cache types of the host and recipes of kvant, interleaved.

One round runs every cache once, so that a change of the machine's speed meets all of them; figures are medians over the
rounds, ratios are taken within a round against f16 and then the median. A cache is `stock:TYPE` or a recipe."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
MODELS = {"smollm2": BUILD / "models/smollm2.gguf", "gemma3": BUILD / "models/gemma3-270m.gguf"}
CACHES = "stock:f16; stock:q8_0; stock:q4_0; f16; kivi:k=4,v=4; balanced; small"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--models", default="smollm2,gemma3", help="names (smollm2, gemma3) or GGUF files")
    parser.add_argument("--caches", default=CACHES, help="separated by ';'; the first is what ratios refer to")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--depths", type=numbers, default=[0, 2048, 8192, 16384])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill; 0: none")
    parser.add_argument("--decode", type=int, default=32, help="tokens decoded; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plugin", type=pathlib.Path, help="libkvant-llama.so; by default the newest below build/")
    parser.add_argument("--llama-dir", type=pathlib.Path, help="folder with bin/llama-bench and lib/")
    parser.add_argument("--json", type=pathlib.Path, help="file for every sample")
    return parser.parse_args()


def find(explicit, pattern, what):
    found = [explicit] if explicit else sorted(BUILD.glob(pattern), key=lambda p: p.stat().st_mtime)
    if not found or not found[-1].exists():
        sys.exit(f"llama_bench.py: no {what} ({explicit or BUILD / pattern})")
    return found[-1].resolve()


def environment(cache, plugin, llama_dir):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVANT_", "GGML_BACKEND", "LLAMA_ARG"))}
    env["LD_LIBRARY_PATH"] = str(llama_dir / "lib")
    if not cache.startswith("stock:"):
        env |= {"GGML_BACKEND_PATH": str(plugin), "KVANT_RECIPE": cache}
    return env


def run(options, plugin, llama_dir, model, cache, threads):
    """Tokens per second: {("prefill" | "decode", depth): value}."""
    command = [str(llama_dir / "bin/llama-bench"), "-m", str(model), "-t", str(threads), "-r", "1", "-fa", "1", "-o", "json"]
    command += ["-p", str(options.prompt), "-n", str(options.decode), "-d", ",".join(map(str, options.depths))]
    if cache.startswith("stock:"):
        kind = cache.removeprefix("stock:")
        command += ["-ctk", kind, "-ctv", kind]
    done = subprocess.run(command, env=environment(cache, plugin, llama_dir), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"llama_bench.py: {cache}: llama-bench failed\n{done.stderr[-2000:]}")
    speeds = {}
    for row in json.loads(done.stdout):
        speeds["decode" if row["n_gen"] > 0 else "prefill", row["n_depth"]] = row["avg_ts"]
    return speeds


def table(title, caches, keys, samples):
    print(f"\n{title}")
    width = max(map(len, caches))
    print(" " * width + "".join(f"{what + ' @' + str(depth):>22}" for what, depth in keys))
    for cache in caches:
        cells = []
        for key in keys:
            own = [sample[key] for sample in samples[cache]]
            ratio = statistics.median(a / b[key] for a, b in zip(own, samples[caches[0]]))
            cells.append(f"{statistics.median(own):12.1f} {ratio:8.2f}x")
        print(f"{cache:<{width}}" + "".join(cells), flush=True)


def main():
    options = parse_arguments()
    caches = [part.strip() for part in options.caches.split(";") if part.strip()]
    plugin = find(options.plugin, "*/plugin/llama.cpp/libkvant-llama.so", "plug-in")
    llama_dir = options.llama_dir or find(None, "venv/lib/python3*/site-packages/bin", "llama.cpp").parent
    what = [name for name, tokens in (("prefill", options.prompt), ("decode", options.decode)) if tokens > 0]
    keys = [(name, depth) for name in what for depth in options.depths]
    results = []
    print(f"plug-in {plugin}; tokens/s and ratio to {caches[0]}, medians of {options.rounds} interleaved rounds")
    for name in options.models.split(","):
        model = MODELS.get(name, pathlib.Path(name))
        if not model.exists():
            sys.exit(f"llama_bench.py: no model {model}")
        for threads in options.threads:
            samples = {cache: [] for cache in caches}
            for number in range(options.rounds):
                for cache in caches:
                    samples[cache].append(run(options, plugin, llama_dir, model, cache, threads))
                    print(f"   round {number + 1}/{options.rounds} {name} {threads} threads {cache}", file=sys.stderr)
            table(f"{name}, {threads} thread{'s' if threads > 1 else ''}", caches, keys, samples)
            for cache in caches:
                for number, sample in enumerate(samples[cache]):
                    results += [{"model": name, "threads": threads, "cache": cache, "round": number, "what": w, "depth": d,
                                 "tokens_per_s": speed} for (w, d), speed in sample.items()]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
