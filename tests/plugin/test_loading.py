"""Who may load the plug-in, and what everyone else is told: always one line, never a crash, never silence."""

import subprocess
import sys

import pytest
from conftest import HERE, host_environment, kvant_lines

CALL_SCORE = """
import ctypes, sys
host = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else None
plugin = ctypes.CDLL(sys.argv[1])
plugin.ggml_backend_init.restype = ctypes.c_void_p
print(plugin.ggml_backend_score(), plugin.ggml_backend_init())
"""

LOAD_TWICE = """
import ctypes, sys
sys.path.insert(0, sys.argv[2])
from capi import load_plugin
import llama_cpp
library = llama_cpp.llama_cpp._lib
count = library.ggml_backend_dev_count
count.restype = ctypes.c_size_t
before = count()
assert load_plugin(sys.argv[1])
load_plugin(sys.argv[1])
print(before, count())
"""


def run_code(code, *arguments, **extra):
    env = host_environment(**extra)
    del env["LD_LIBRARY_PATH"]
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=env,
    )


@pytest.fixture(name="fake_host")
def compiled_fake_host(tmp_path):
    """A library that looks like a ggml of some version, as far as the plug-in looks before it refuses."""

    def build(version, with_2d):
        source = tmp_path / "host.c"
        lines = [f'const char* ggml_version(void) {{ return "{version}"; }}']
        names = ["ggml_backend_init_by_type"]
        # Every function that is looked up before the layout is told by its marker.
        lookups = (HERE.parents[1] / "plugin/llama.cpp/host.cpp").read_text(encoding="utf-8")
        names += [part.split('"')[1] for part in lookups.split("resolve(handle, ")[1:]]
        names += ["ggml_backend_tensor_set_2d"] if with_2d else []
        lines += [f"long {name}(void) {{ return 0; }}" for name in dict.fromkeys(names)]
        source.write_text("\n".join(lines), encoding="utf-8")
        library = tmp_path / "libggml.so"
        subprocess.run(["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    return build


def assert_refused(done, *words):
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "None"]
    lines = kvant_lines(done.stderr)
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_plugin_has_no_undefined_ggml_symbol(plugin):
    symbols = subprocess.run(["nm", "-D", str(plugin)], capture_output=True, text=True, check=True).stdout
    undefined = [line.split()[-1] for line in symbols.splitlines() if " U " in line]
    defined = sorted(line.split()[-1] for line in symbols.splitlines() if " T " in line)
    assert not [name for name in undefined if name.startswith(("ggml", "llama", "gguf"))]
    assert defined == ["ggml_backend_init", "ggml_backend_score"]


def test_process_without_ggml(plugin):
    assert_refused(run_code(CALL_SCORE, plugin), "no ggml")


@pytest.mark.parametrize("version", ["0.99.0", "0.9.11", "1.0.0"])
def test_unknown_version(version, plugin, fake_host):
    assert_refused(run_code(CALL_SCORE, plugin, fake_host(version, True)), version)


def test_layout_before_april_2026(plugin, fake_host):
    assert_refused(run_code(CALL_SCORE, plugin, fake_host("0.20.0", False)), "layout")


def test_operations_with_other_names(plugin, fake_host):
    """The markers of a known layout alone do not make a host."""
    assert_refused(run_code(CALL_SCORE, plugin, fake_host("0.25.3", True)), "no operation")


def test_second_load_adds_no_device(plugin):
    done = run_code(LOAD_TWICE, plugin, HERE)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split()[-2:])
    assert after == before + 1


@pytest.mark.parametrize(
    ("variable", "value", "choice"),
    [
        ("KVANT_RECIPE", "kivi:k=99", "k"),
        ("KVANT_RECIPE", "nonsense", "kivi"),
        ("KVANT_DEVICE_TYPE", "tpu", "igpu"),
        ("KVANT_KERNEL", "nonsense", "scalar"),
    ],
)
def test_bad_environment_is_refused(variable, value, choice, plugin):
    code = "import sys; sys.path.insert(0, sys.argv[2]); from capi import load_plugin; print(load_plugin(sys.argv[1]))"
    done = run_code(code, plugin, HERE, **{variable: value})
    assert done.stdout.split()[-1] == "False", done.stderr
    lines = kvant_lines(done.stderr)
    assert len(lines) == 1
    assert value in lines[0] and choice in lines[0]
