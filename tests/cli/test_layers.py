"""tools/check_layers.py: the project passes, and each kind of wrong include is found."""

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = ROOT / "tools/check_layers.py"


def check(root):
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)


def test_the_project_passes():
    done = check(ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/base/a.hpp", '"tiles/b.hpp"'),
        ("src/tiles/a.cpp", '"cache/page.hpp"'),
        ("src/methods/kivi/a.cpp", '"cache/page.hpp"'),
        ("src/methods/kivi/a.cpp", '"methods/kitty/kitty.hpp"'),
        ("src/cache/a.cpp", '"plugin/x.hpp"'),
        ("cli/a.cpp", '"plugin/x.hpp"'),
        ("include/kvant/a.hpp", "<immintrin.h>"),
        ("include/kvant/a.hpp", '"base/half.hpp"'),
        ("include/kvant/a.hpp", "<hwy/highway.h>"),
    ],
)
def test_wrong_includes_are_found(tmp_path, path, include):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f"#include {include}\n")
    done = check(tmp_path)
    assert done.returncode == 1
    assert path in done.stderr


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("src/tiles/a.cpp", '"base/half.hpp"'),
        ("src/methods/kivi/a.cpp", '"methods/method.hpp"'),
        ("src/methods/kivi/a.cpp", '"methods/kivi/b.hpp"'),
        ("src/methods/list.cpp", '"methods/kivi/kivi.hpp"'),
        ("src/cache/a.cpp", '"methods/method.hpp"'),
        ("cli/a.cpp", '"kvant/kvant.hpp"'),
    ],
)
def test_right_includes_pass(tmp_path, path, include):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f"#include {include}\n")
    assert check(tmp_path).returncode == 0
