#!/usr/bin/env bash
# make bench: the kernels' own benchmarks, then the host's speed and quality with every default recipe.
source "$(dirname "$0")/common.sh"

"$ROOT/tools/setup.sh" packages host models text
"$ROOT/tools/build.sh" release -DKVANT_BUILD_BENCH=ON
for program in "$BUILD"/release/bench/*; do
  [[ -f $program && -x $program ]] || continue
  say "${program##*/}"
  "$program"
done
KVANT_LLAMA_DIR=$(site_packages) "$BUILD/release/cli/kvant" compare -m "$BUILD/models/smollm2.gguf" \
  -f "$BUILD/text/eval.txt" --depths 0,2048,8192 "$@"
