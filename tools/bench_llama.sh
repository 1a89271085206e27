#!/usr/bin/env bash
# make bench-llama: stock llama-bench over the host's cache types and kvant's recipes, interleaved. Arguments go to
# bench/llama_bench.py (make bench-llama ARGS="--models smollm2 --depths 8192 --threads 2").
source "$(dirname "$0")/common.sh"

"$ROOT/tools/setup.sh" packages host models
"$ROOT/tools/build.sh" release
exec python3 "$ROOT/bench/llama_bench.py" --llama-dir "$(site_packages)" "$@"
