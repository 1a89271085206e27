"""Reader of the recorded reference results: index.json and its safetensors files (see the index's "format" entry)."""

import atexit
import functools
import json
import os
import pathlib
import shutil
import tarfile
import tempfile

import ml_dtypes
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "I32": np.int32,
    "BOOL": np.bool_,
}


@functools.cache
def folder():
    """Where the files are: KVANT_GOLDEN_DIR, ../shared/golden, else this repository's copy, unpacked for this run."""
    for place in (os.environ.get("KVANT_GOLDEN_DIR"), ROOT.parent / "shared/golden"):
        if place and (pathlib.Path(place) / "index.json").exists():
            return pathlib.Path(place)
    unpacked = tempfile.mkdtemp(prefix="kvant-golden-")
    atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
    with tarfile.open(ROOT / "tests/data/golden.tar.xz") as archive:
        archive.extractall(unpacked)
    return pathlib.Path(unpacked)


@functools.cache
def cases():
    """Every recorded case."""
    return json.loads((folder() / "index.json").read_text())["cases"]


@functools.cache
def tensors(file):
    """Tensors of one file by name. (The library's own reader does not know NumPy's bf16 in every version.)"""
    raw = (folder() / file).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    result = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        result[name] = np.frombuffer(raw[start + first : start + last], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return result


def number(value):
    """A JSON value with its NaNs and infinities."""
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    return value


def group_of(case):
    return case.get("group", "must")
