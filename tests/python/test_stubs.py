"""Type checkers see every name that the compiled modules have."""

import ast
import importlib
import pathlib

import kvant
import pytest


@pytest.mark.parametrize("name", ["kvant._core", "kvant._core.cuda"])
def test_every_public_name_is_declared(name):
    if name.endswith("cuda"):
        pytest.importorskip("kvant.cuda", reason="this build of kvant has no CUDA library")
    parent, _, last = name.rpartition(".")
    module = getattr(importlib.import_module(parent), last)
    folder = pathlib.Path(kvant.__file__).parent / "_core"
    stub = ast.parse((folder / ("cuda.pyi" if last == "cuda" else "__init__.pyi")).read_text())
    assert not [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module.startswith("_core")]
    declared = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    declared |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    public = {attribute for attribute in vars(module) if not attribute.startswith("_")}
    assert public - {"cuda"} <= declared
