#!/usr/bin/env bash
# Configures and builds a preset (release, debug, sanitize, clang). usage: tools/build.sh PRESET [CMAKE_ARGUMENT...]
source "$(dirname "$0")/common.sh"

preset=$1
shift
cd "$ROOT"
compiler=${CXX:-g++}
[[ $preset == clang ]] && compiler=clang++
command -v "$compiler" >/dev/null || die "no C++ compiler: '$compiler' was not found (tools/setup.sh packages installs one)"
# The CUDA library takes many minutes and nothing here but its tests and its benchmark needs it: they ask for it.
long_step "configure $preset" "configure-$preset.log" cmake --preset "$preset" -DKVANT_CUDA=OFF "$@"
long_step "build $preset" "build-$preset.log" cmake --build --preset "$preset" -j "$JOBS"
