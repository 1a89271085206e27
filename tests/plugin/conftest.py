"""What the tests of the llama.cpp plug-in share: where things are, and how a host is run with and without it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = pathlib.Path(os.environ.get("KVANT_BUILD_DIR", ROOT / "build/release"))
PLUGIN = BUILD / "plugin/llama.cpp/libkvant-llama.so"
HOST = pathlib.Path(os.environ.get("KVANT_LLAMA_DIR", next(ROOT.glob("build/venv/lib/python3*/site-packages"), "")))

# Variables of the caller that would change what is tested.
FOREIGN = ("KVANT_", "GGML_", "LLAMA_", "LD_LIBRARY_PATH")


def host_environment(recipe=None, **extra):
    """The environment of a host; with a recipe, also the one that makes it use the plug-in."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    env["LD_LIBRARY_PATH"] = str(HOST / "lib")
    # Threads that sleep while they wait leave the machine to others, and several hosts run at once here.
    env["OMP_WAIT_POLICY"] = "passive"
    if recipe is not None:
        env.update(GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_DEVICE="KVANT0", KVANT_RECIPE=recipe)
    return {**env, **extra}


def run_host(program, *arguments, recipe=None, check=True, timeout=900, **extra):
    """Runs one of the host's programs; returns its exit code and everything it printed."""
    done = subprocess.run(
        [str(HOST / "bin" / program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout,
        env=host_environment(recipe, **extra),
    )
    if check:
        assert done.returncode == 0, done.stdout[-3000:]
    return done.returncode, done.stdout


def run_python(script, *arguments, recipe=None, check=True, timeout=900, **extra):
    """Runs a script of this folder, which loads the plug-in by itself, in a process of its own."""
    env = host_environment(**extra)
    # The binding brings its own copy of the host's libraries.
    del env["LD_LIBRARY_PATH"]
    if recipe is not None:
        env["KVANT_RECIPE"] = recipe
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout,
        env=env,
    )
    if check:
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done


def kvant_lines(output):
    return [line for line in output.splitlines() if line.startswith("kvant: ")]


def read_status(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def mean_kld(output):
    return float(re.search(r"Mean\s+KLD:\s+(-?[0-9.]+)", output).group(1))


def _require(path, hint):
    assert path.exists(), f"{path} is missing: {hint}"
    return path


@pytest.fixture(scope="session", name="plugin")
def plugin_file():
    return _require(PLUGIN, "build the target kvant_llama")


@pytest.fixture(scope="session", name="smollm2")
def small_model():
    return _require(ROOT / "build/models/smollm2.gguf", "run tools/setup.sh models")


@pytest.fixture(scope="session", name="smollm2_f16")
def small_model_with_exact_weights():
    return _require(ROOT / "build/models/smollm2-f16.gguf", "run tools/setup.sh host all-models")


@pytest.fixture(scope="session", name="gemma")
def window_model():
    return _require(ROOT / "build/models/gemma3-270m.gguf", "run tools/setup.sh all-models")


@pytest.fixture(scope="session", name="text")
def evaluation_text():
    return _require(ROOT / "build/text/eval.txt", "run tools/setup.sh text")
