#!/usr/bin/env bash
# make bench-gpu: decode and prefill attention on one GPU, and torch's best fp16 attention in the same run if torch is there.
# usage: tools/bench_gpu.sh [table|more|prefill|seal|all]   one JSON line per figure, then the table
source "$(dirname "$0")/common.sh"

"$ROOT/tools/build.sh" release -DKVANT_BUILD_BENCH=ON -DKVANT_CUDA=ON
mkdir -p "$BUILD/bench-gpu"
"$BUILD/release/bench/gpu/kvant_bench_gpu" "${1:-all}" | tee "$BUILD/bench-gpu/kvant.jsonl"
if python3 -c 'import torch' 2>/dev/null; then
  python3 "$ROOT/bench/gpu/sdpa.py" | tee "$BUILD/bench-gpu/sdpa.jsonl"
else
  say "no torch: the fp16 column stays empty"
  : > "$BUILD/bench-gpu/sdpa.jsonl"
fi
python3 "$ROOT/bench/gpu/table.py" "$BUILD/bench-gpu/kvant.jsonl" "$BUILD/bench-gpu/sdpa.jsonl"
