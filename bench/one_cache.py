"""For programs that run one cache a process, `stock:TYPE` or a recipe, through the binding of build/venv (llama-cpp-python)."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
TYPES = {"f16": 1, "q4_0": 2, "q5_0": 6, "q8_0": 8, "bf16": 30}  # ggml_type


def add_arguments(parser):
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "build/models/smollm2.gguf")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "build/text/eval.txt")
    parser.add_argument("--plugin", type=pathlib.Path, default=ROOT / "build/release/plugin/llama.cpp/libkvant-llama.so")
    parser.add_argument("--one", metavar="CACHE", help="run this cache in this process and print what it gives as JSON")


def open_model(options):
    """The module capi, and the model with the cache of options.one in this process."""
    sys.path.insert(0, str(ROOT / "tests/plugin"))
    import capi

    stock = options.one.startswith("stock:")
    if not stock and not capi.load_plugin(options.plugin):
        sys.exit(f"the plug-in was not loaded ({options.plugin})")
    return capi, capi.Model(options.model, plugin=not stock)


def cache_type(options):
    return TYPES[options.one.removeprefix("stock:")] if options.one.startswith("stock:") else TYPES["f16"]


def run_process(cache):
    """Runs this program again for one cache; what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVANT_", "GGML_", "LD_LIBRARY_PATH"))}
    if not cache.startswith("stock:"):
        environment["KVANT_RECIPE"] = cache
    done = subprocess.run([sys.executable, *sys.argv, "--one", cache], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{cache}: {done.stderr[-2000:]}")
    return done.stdout
