"""What the tests of the command share: where it is, how it is run, the model and the text."""

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVANT_BUILD_DIR", ROOT / "build/release"))
KVANT = BUILD / "cli/kvant"
os.environ.setdefault("KVANT_LLAMA_DIR", str(next(ROOT.glob("build/venv/lib/python3*/site-packages"), "")))
# Threads that sleep while they wait leave the machine to others; the figures of these tests are not speeds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(name="kvant")
def kvant_command():
    """Runs the command; the caller checks the exit code."""

    def run(*arguments, env=None):
        # The tests choose recipe and plug-in themselves.
        own = ("KVANT_RECIPE", "KVANT_PLUGIN", "KVANT_RECORD", "KVANT_STATUS")
        clean = {k: v for k, v in os.environ.items() if k not in own}
        return subprocess.run(
            [str(KVANT), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**clean, **(env or {})},
        )

    return run


@pytest.fixture(scope="session", name="model")
def smollm2_with_16_bit_weights():
    path = ROOT / "build/models/smollm2-f16.gguf"
    assert path.exists(), "run tools/setup.sh host all-models"
    return path


@pytest.fixture(scope="session", name="text")
def evaluation_text():
    path = ROOT / "build/text/eval.txt"
    assert path.exists(), "run tools/setup.sh text"
    return path
