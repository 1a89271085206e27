#!/usr/bin/env bash
# Builds the Python package as `pip install .` does and installs it in build/venv; arguments go to pip. tools/setup.sh
# python comes first.
source "$(dirname "$0")/common.sh"

# Without isolation the paths are those of the last build, so that ccache and ninja find their results.
CMAKE_BUILD_PARALLEL_LEVEL=$JOBS long_step "kvant for Python" pip-kvant.log "$VENV/bin/pip" install --verbose \
  --no-build-isolation --no-deps --force-reinstall "$@" "$ROOT"
