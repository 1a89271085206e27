#!/usr/bin/env bash
# make bench-reference: Kitty, KVQuant and ZipCache beside the reference package. Arguments go to the benchmark.
source "$(dirname "$0")/common.sh"

"$ROOT/tools/setup.sh" packages python
"$ROOT/tools/install_python.sh"
"$VENV/bin/python" "$ROOT/bench/reference_bench.py" "$@"
