"""The examples of README.md are extracted and run: shell blocks with a real model, the C++ program against a prefix."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("KVANT_BUILD_DIR", ROOT / "build/release"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- test: (\S+) -->\n```\S*\n(.*?)```", re.DOTALL)


def blocks(kind):
    return [text for name, text in BLOCK.findall(README) if name == kind]


@pytest.fixture(scope="module", name="prefix")
def installed_prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("prefix")
    subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, capture_output=True)
    return prefix


@pytest.fixture(name="shell")
def prepared_shell(prefix, tmp_path):
    """A folder with model.gguf and text.txt, and a PATH with the installed command."""
    (tmp_path / "model.gguf").symlink_to((ROOT / "build/models/smollm2-f16.gguf").resolve())
    (tmp_path / "text.txt").symlink_to((ROOT / "build/text/eval.txt").resolve())
    site = next(ROOT.glob("build/venv/lib/python3*/site-packages"), "")
    env = {**os.environ, "PATH": f"{prefix}/bin:{os.environ['PATH']}"}
    env.setdefault("KVANT_LLAMA_DIR", str(site))
    env.setdefault("OMP_WAIT_POLICY", "passive")

    def run(script):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


def test_readme_has_its_examples():
    assert len(blocks("shell")) == 3 and len(blocks("c++")) == 1 and len(blocks("cmake")) == 1


@pytest.mark.parametrize("script", blocks("shell"), ids=lambda script: script.split()[1])
def test_shell_example(shell, script):
    done = shell(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_cpp_example(prefix, tmp_path):
    lists = "cmake_minimum_required(VERSION 3.25)\nproject(example LANGUAGES CXX)\n" + blocks("cmake")[0]
    (tmp_path / "CMakeLists.txt").write_text(lists)
    (tmp_path / "main.cpp").write_text(blocks("c++")[0])
    options = ["-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"]
    for command in (["cmake", "-S", tmp_path, "-B", tmp_path / "b", *options], ["cmake", "--build", tmp_path / "b"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([tmp_path / "b/example"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Values are all 1, so their mean is 1 whatever the keys say.
    assert done.stdout.startswith("1.000 from ")


def test_linked_files_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_exit_code_and_variable_is_real():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cli").glob("*.[ch]pp"))
    for code in re.findall(r"^\| (\d) \|", README, re.MULTILINE):
        assert re.search(rf"= {code},", sources), code
    others = "".join(path.read_text(encoding="utf-8") for f in ("src", "plugin") for path in (ROOT / f).rglob("*.cpp")
                     if path.is_file())  # fmt: skip
    for name in re.findall(r"`(KVANT_[A-Z_]+)`", README):
        assert f'"{name}"' in sources + others, name
