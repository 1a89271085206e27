"""Flags, exit codes and the environment that `kvant run` makes."""

import os
import stat

import pytest

OK, CHILD, USAGE, BAD_INPUT, IO, UNSUPPORTED = range(6)


@pytest.fixture(name="tools")
def fake_tools(tmp_path):
    """A folder like a llama.cpp installation whose program prints its arguments and environment."""
    folder = tmp_path / "host"
    for name, body in {"llama-show": 'echo "args: $*"; env', "llama-fails": "echo broken >&2; exit 7"}.items():
        program = folder / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "lib").mkdir()
    (folder / "lib/libllama.so").touch()
    return folder


@pytest.fixture(name="plugin")
def fake_plugin(tmp_path):
    path = tmp_path / "libkvant-llama.so"
    path.touch()
    return path


def environment_of(output):
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def test_version(kvant):
    done = kvant("--version")
    assert done.returncode == OK
    assert done.stdout.startswith("kvant 0.")


@pytest.mark.parametrize("command", [(), ("run",), ("compare",), ("info",)])
def test_help_goes_to_stdout(kvant, command):
    done = kvant(*command, "--help")
    assert done.returncode == OK
    assert "Usage" in done.stdout and not done.stderr


def test_help_documents_exit_codes(kvant):
    assert "Exit codes" in kvant("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("--nonsense",),
        ("info", "--nonsense"),
        ("info", "extra"),
        ("compare", "--nonsense"),
        ("compare",),
        ("compare", "-m", "x"),
        ("run", "--nonsense", "--", "true"),
        ("run", "llama-server"),
        ("run",),
        ("run", "--"),
        ("info", "-c", "10"),
        ("info", "-m", "x", "-c", "-1"),
        ("info", "-m", "x", "-c", "many"),
        ("compare", "-m", "x", "-f", "y", "--chunks", "0"),
        ("compare", "-m", "x", "-f", "y", "--repeat", "0"),
    ],
)
def test_usage_errors(kvant, arguments):
    done = kvant(*arguments)
    assert done.returncode == USAGE
    assert done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("kivy", ["kivy", "kivi", "kitty", "f16"]),
        ("kivi:bits=4", ["bits", "k", "v", "window"]),
        ("kivi:k=5x", ["k", "5x"]),
        ("kivi:k", ["k"]),
        ("stock:q9_0", ["q9_0", "q8_0", "q4_0"]),
        ("stock:", ["f16"]),
    ],
)
def test_bad_recipe_is_named_before_anything_runs(kvant, recipe, words):
    for arguments in (("run", "--recipe", recipe, "--", "true"), ("info", "-m", "/nowhere", "--recipes", recipe)):
        done = kvant(*arguments)
        if arguments[0] == "info":
            assert done.returncode in (USAGE, IO)
            continue
        assert done.returncode == USAGE
        assert all(word in done.stderr for word in words)
    done = kvant("compare", "-m", "/nowhere", "-f", "/nowhere", "--recipes", recipe)
    assert done.returncode == USAGE
    assert all(word in done.stderr for word in words)


def test_bad_recipe_in_the_environment(kvant):
    done = kvant("run", "--", "true", env={"KVANT_RECIPE": "kivi:k=99"})
    assert done.returncode == USAGE
    assert "99" in done.stderr


def test_run_sets_the_environment(kvant, tools, plugin, tmp_path):
    done = kvant(
        "run", "--recipe", "kivi:k=2", "--plugin", plugin, "--tools", tools, "--status", "s.json", "--",
        "llama-show", "-m", "model.gguf", "--", "x",
    )  # fmt: skip
    assert done.returncode == OK, done.stderr
    assert "args: -m model.gguf -- x" in done.stdout
    env = environment_of(done.stdout)
    assert env["GGML_BACKEND_PATH"] == str(plugin)
    assert env["KVANT_RECIPE"].startswith("kivi:k=2,")
    assert env["LLAMA_ARG_DEVICE"] == "KVANT0"
    assert env["KVANT_STATUS"] == os.path.join(os.getcwd(), "s.json")
    assert env["LD_LIBRARY_PATH"].split(":")[0] == str(tools / "lib")


def test_run_takes_recipe_plugin_and_tools_from_the_environment(kvant, tools, plugin):
    env = {"KVANT_RECIPE": "kitty", "KVANT_PLUGIN": str(plugin), "KVANT_LLAMA_DIR": str(tools / "bin")}
    done = kvant("run", "--", "llama-show", env=env)
    assert done.returncode == OK, done.stderr
    shown = environment_of(done.stdout)
    assert shown["KVANT_RECIPE"].startswith("kitty:")
    assert "KVANT_STATUS" not in shown


def test_run_passes_status_to_stderr_as_a_word(kvant, tools, plugin):
    done = kvant("run", "--plugin", plugin, "--tools", tools, "--status", "stderr", "--", "llama-show")
    assert environment_of(done.stdout)["KVANT_STATUS"] == "stderr"


def test_run_gives_the_exit_code_of_the_program(kvant, tools, plugin):
    done = kvant("run", "--plugin", plugin, "--tools", tools, "--", "llama-fails")
    assert done.returncode == 7
    assert done.stderr == "broken\n"


def test_run_refuses_a_stock_type(kvant, plugin):
    done = kvant("run", "--plugin", plugin, "--recipe", "stock:q4_0", "--", "true")
    assert done.returncode == USAGE


def test_missing_plugin_and_program(kvant, plugin):
    done = kvant("run", "--plugin", "/nowhere/x.so", "--", "true")
    assert done.returncode == IO
    assert "/nowhere/x.so" in done.stderr
    done = kvant("run", "--plugin", plugin, "--", "llama-that-is-not-there")
    assert done.returncode == IO
    assert "llama-that-is-not-there" in done.stderr
    done = kvant("run", "--plugin", plugin, "--", "/etc/passwd")
    assert done.returncode == IO


def test_plugin_of_the_build_tree_is_found(kvant, tools):
    done = kvant("run", "--tools", tools, "--", "llama-show")
    assert done.returncode == OK, done.stderr
    assert environment_of(done.stdout)["GGML_BACKEND_PATH"].endswith("/libkvant-llama.so")


def test_full_disk_is_an_io_error(kvant):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as full:
        import subprocess

        from conftest import KVANT

        done = subprocess.run([KVANT, "info"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == IO


def test_run_keeps_status_and_record_of_the_environment(kvant, tools, plugin):
    env = {"KVANT_STATUS": "stderr", "KVANT_RECORD": "/tmp/rows", "KVANT_RECORD_ROPE": "before"}
    done = kvant("run", "--recipe", "f16", "--plugin", plugin, "--tools", tools, "--", "llama-show", env=env)
    assert done.returncode == OK, done.stderr
    assert env.items() <= environment_of(done.stdout).items()
