#!/usr/bin/env bash
# make test: everything. Each stage is one line in the summary at the end.
# usage: tools/test.sh [STAGE...]   stages: release sanitize static plugin cli install readme python
source "$(dirname "$0")/common.sh"

stages=("$@")
((${#stages[@]})) || stages=(static release sanitize cli plugin install readme python)
summary=()
failed=0
# Two programs run at once, each with threads for every processor: threads that spin while they wait would keep those of
# the other program from what they wait for.
export OMP_WAIT_POLICY=passive
cd "$ROOT"

# Where nvcc is, a kernel of each kind is compiled as well. Those who have a GPU build more: src/cuda/README.md.
release_build() {
  "$ROOT/tools/build.sh" release -DKVANT_BUILD_TESTS=ON -DKVANT_CUDA=AUTO -DKVANT_CUDA_SHAPES=sample \
    -DCMAKE_CUDA_ARCHITECTURES=90a-real
}

stage_static() { "$ROOT/tools/check.sh" quick; }

stage_release() {
  release_build
  ctest --preset release -j "$JOBS" --no-tests=error
}

# The unit tests. The plug-in runs inside a host that is not sanitized; what the command parses is fuzzed with sanitizers
# in its own stage. The reference modules' tests take eight minutes more to compile: cmake --build --preset sanitize.
stage_sanitize() {
  local tests=(kvant_bytes_tests kvant_unit_tests) shards=$((4 * JOBS))
  long_step "configure sanitize" configure-sanitize.log cmake --preset sanitize -DKVANT_CUDA=OFF \
    -DKVANT_BUILD_PLUGIN=OFF -DKVANT_BUILD_CLI=OFF -DKVANT_BUILD_TESTS=ON
  long_step "build sanitize" build-sanitize.log cmake --build --preset sanitize -j "$JOBS" --target "${tests[@]}"
  # More shards than processors, so that none waits long for the last one.
  for test in "${tests[@]}"; do
    for ((i = 0; i < shards; i++)); do echo "$test $i"; done
  done | GTEST_TOTAL_SHARDS=$shards xargs -P "$JOBS" -n 2 \
    sh -c 'cd "$0" && GTEST_SHARD_INDEX=$2 exec "./$1" --gtest_brief=1' "$BUILD/sanitize/tests"
}

run_pytest() {
  release_build
  KVANT_BUILD_DIR=$BUILD/release KVANT_LLAMA_DIR=$(site_packages) "$VENV/bin/python" -m pytest -q -x --durations=5 "$@"
}

# Hosts wait on one thread for part of their time: two at once use the processors better.
parallel=(-n 2 --dist loadgroup)

stage_cli() { run_pytest "${parallel[@]}" "$ROOT/tests/cli"; }

stage_plugin() { run_pytest "${parallel[@]}" "$ROOT/tests/plugin"; }

stage_install() { run_pytest "$ROOT/tests/install/test_install.py"; }

stage_readme() { run_pytest "$ROOT/tests/install/test_readme.py"; }

# The C++ golden tests run in the release stage. A missing reference package fails here: nothing is skipped in silence,
# and -rs names what is (torch is no part of the requirements). The library is not compiled again for the package.
stage_python() {
  "$ROOT/tools/setup.sh" python
  release_build
  long_step "install to build/prefix" install-prefix.log cmake --install "$BUILD/release" --prefix "$BUILD/prefix"
  "$ROOT/tools/install_python.sh" "-Ccmake.define.KVANT_PREFIX=$BUILD/prefix"
  "$VENV/bin/python" -c 'import mlx_lm, veloxquant_mlx'
  KVANT_EXAMPLES=${KVANT_EXAMPLES:-60} "$VENV/bin/python" -m pytest -q -rs --durations=5 "${parallel[@]}" "$ROOT/tests/python"
}

# llama.cpp takes minutes to build: only for the stages that run it.
parts=(packages)
for stage in "${stages[@]}"; do
  case $stage in
    cli | plugin | install | readme) parts=(packages host all-models text tests) ;;
  esac
done
"$ROOT/tools/setup.sh" "${parts[@]}"
for stage in "${stages[@]}"; do
  declare -F "stage_$stage" >/dev/null || die "tools/test.sh: unknown stage '$stage'"
  start=$SECONDS
  say "stage $stage"
  # A subshell with its own -e: one failed stage does not hide the others.
  set +e
  (set -e; "stage_$stage")
  code=$?
  set -e
  ((code == 0)) || failed=$((failed + 1))
  summary+=("$(printf '%-9s %s in %d s' "$stage" "$( ((code == 0)) && echo passed || echo FAILED)" $((SECONDS - start)))")
done
printf '\n'
printf '%s\n' "${summary[@]}"
printf '%d passed, %d failed\n' $((${#stages[@]} - failed)) "$failed"
((failed == 0))
