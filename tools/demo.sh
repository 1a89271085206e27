#!/usr/bin/env bash
# make demo: a real model answers one question with llama.cpp's own f16 cache and with kvant's, then the table of
# `kvant compare`. Everything is set up first; the second time that takes a few seconds.
source "$(dirname "$0")/common.sh"

RECIPE=${RECIPE:-balanced}
ROWS=${ROWS:-"balanced; small; stock:q4_0"}

"$ROOT/tools/setup.sh" packages host models text
"$ROOT/tools/build.sh" release -DKVANT_BUILD_TESTS=OFF

kvant=$BUILD/release/cli/kvant
model=$BUILD/models/smollm2.gguf
prompt=$ROOT/tools/demo_prompt.txt
KVANT_LLAMA_DIR=$(site_packages)
export KVANT_LLAMA_DIR

# The prompt is about 700 tokens, so that most of what the answer is read from lies in sealed pages.
answer() {
  local name=$1
  shift
  printf '\n-- %s answers:\n' "$name"
  "$@" -m "$model" -f "$prompt" -cnv -st --no-display-prompt -n 64 --temp 0 -c 2048 -fa on </dev/null \
    2>"$LOGS/demo-answer.log" || { tail -n 5 "$LOGS/demo-answer.log" >&2; die "the model did not answer"; }
}

start=$SECONDS
printf '\nThe report is in tools/demo_prompt.txt. %s\n' "$(tail -n 1 "$prompt")"
answer "stock f16 cache" env "LD_LIBRARY_PATH=$KVANT_LLAMA_DIR/lib" "$KVANT_LLAMA_DIR/bin/llama-completion"
answer "kvant $RECIPE" "$kvant" run --recipe "$RECIPE" --status "$LOGS/demo-status.json" -- llama-completion

printf '\n'
"$kvant" compare -m "$model" -f "$BUILD/text/eval.txt" --recipes "$ROWS" -c 1024 --chunks 2 --ubatch 128 \
  --depths 0,1024 --repeat 1 --threads "$(nproc)"
printf '\nThe demo itself took %d s. More: kvant info -m MODEL, kvant compare --help, docs/results.md\n' $((SECONDS - start))
