# The one door. Every target installs what it needs first; the work is in tools/.
PREFIX ?= /usr/local

.PHONY: help demo test bench bench-llama bench-reference bench-gpu check install clean

help:
	@echo "make demo                 a real model with its KV cache in 2 to 4 bits, and a table of what that costs"
	@echo "make test                 every test (about half an hour the first time on 2 cores)"
	@echo "make bench                speed of the kernels and of the host, by cache depth"
	@echo "make bench-llama          stock llama-bench, cache types and recipes interleaved; ARGS=... goes to bench/llama_bench.py"
	@echo "make bench-reference      Kitty, KVQuant and ZipCache beside the Python package they are taken from"
	@echo "make bench-gpu            decode attention on an NVIDIA GPU (needs the CUDA toolkit and a GPU)"
	@echo "make check                format, layering, public headers, clang-tidy"
	@echo "make install PREFIX=DIR   library, llama.cpp plug-in and command"
	@echo "make clean                remove what was built here; build/venv and the models stay"

demo:
	@tools/demo.sh

test:
	@tools/test.sh

bench:
	@tools/bench.sh

bench-llama:
	@tools/bench_llama.sh $(ARGS)

bench-reference:
	@tools/bench_reference.sh

bench-gpu:
	@tools/bench_gpu.sh

check:
	@tools/setup.sh packages
	@tools/check.sh

install:
	@tools/install.sh "$(PREFIX)"

clean:
	rm -rf build/release build/debug build/sanitize build/clang build/fuzz build/logs
