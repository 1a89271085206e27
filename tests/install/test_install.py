"""The installed prefix works: find_package, pkg-config, the command and its plug-in."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONSUMER = pathlib.Path(__file__).parent / "consumer"
BUILD = pathlib.Path(os.environ.get("KVANT_BUILD_DIR", ROOT / "build/release"))


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module", name="prefix")
def installed_prefix(tmp_path_factory):
    """Installed, then moved: nothing in it may depend on where it was installed to."""
    first = tmp_path_factory.mktemp("installed") / "first"
    run("cmake", "--install", BUILD, "--prefix", first)
    second = first.with_name("moved")
    shutil.move(first, second)
    return second


def pkg_config_env(prefix):
    folder = next(prefix.rglob("kvant.pc")).parent
    return {**os.environ, "PKG_CONFIG_PATH": str(folder)}


def build_with_cmake(prefix, folder):
    run("cmake", "-S", CONSUMER, "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", folder)
    return folder / "consumer"


def test_find_package(prefix, tmp_path):
    assert "2 pages sealed" in run(build_with_cmake(prefix, tmp_path / "build"))


def has_cuda(prefix):
    return any(prefix.rglob("libkvant_cuda.a"))


def compile_with_pkg_config(prefix, package, source, program):
    flags = run("pkg-config", "--cflags", "--libs", package, env=pkg_config_env(prefix)).split()
    run("g++", "-std=c++20", CONSUMER / source, "-o", program, *flags)


@pytest.mark.parametrize("by", ["find_package", "pkg-config"])
def test_cuda(prefix, tmp_path, by):
    if not has_cuda(prefix):
        pytest.skip("this build has no CUDA library")
    if by == "find_package":
        build_with_cmake(prefix, tmp_path)
    else:
        compile_with_pkg_config(prefix, "kvant-cuda", "cuda.cpp", tmp_path / "consumer_cuda")
    # 2 bits a value, and a scale and a zero point of 16 bits for 128 values.
    assert run(tmp_path / "consumer_cuda") == f"{8 * 2 * 128 * 128 * 9 // 32} bytes a page\n"


def test_find_package_refuses_another_minor_version(prefix, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(CONSUMER, source)
    lists = source / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("kvant 0.1", "kvant 0.9"))
    done = subprocess.run(
        ["cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "0.9" in done.stderr


def test_pkg_config(prefix, tmp_path):
    compile_with_pkg_config(prefix, "kvant", "main.cpp", tmp_path / "consumer")
    assert "2 pages sealed" in run(tmp_path / "consumer")


def test_command_and_plugin_find_each_other(prefix):
    kvant = prefix / "bin/kvant"
    version = run("pkg-config", "--modversion", "kvant", env=pkg_config_env(prefix)).strip()
    assert run(kvant, "--version").strip() == f"kvant {version}"
    shown = run(kvant, "run", "--", "/usr/bin/env")
    plugin = next(line for line in shown.splitlines() if line.startswith("GGML_BACKEND_PATH=")).split("=", 1)[1]
    assert pathlib.Path(plugin) == next(prefix.rglob("libkvant-llama.so")).resolve()


def test_headers_are_all_there(prefix):
    without = set() if has_cuda(prefix) else {"cuda.h", "cuda.hpp"}
    names = {path.name for path in (ROOT / "include/kvant").iterdir()} - without
    assert {path.name for path in (prefix / "include/kvant").iterdir()} == names


def test_shared_library(tmp_path):
    """BUILD_SHARED_LIBS is honoured, and a program that links the shared library needs nothing else."""
    build, prefix = tmp_path / "build", tmp_path / "prefix"
    options = ["-DBUILD_SHARED_LIBS=ON", "-DKVANT_BUILD_PLUGIN=OFF", "-DKVANT_BUILD_CLI=OFF", "-DKVANT_BUILD_TESTS=OFF"]
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options)
    run("cmake", "--build", build)
    run("cmake", "--install", build, "--prefix", prefix)
    assert list(prefix.rglob("libkvant.so*"))
    assert "2 pages sealed" in run(build_with_cmake(prefix, tmp_path / "consumer"))
