"""Reader of the recorded reference results: index.json and its safetensors files (see the index's "format" entry)."""

import functools
import json
import os
import pathlib

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


def folder():
    """Where the files are, or None."""
    places = [os.environ.get("KVANT_GOLDEN_DIR"), ROOT / "tests/data/golden", ROOT.parent / "shared/golden"]
    found = [pathlib.Path(p) for p in places if p and (pathlib.Path(p) / "index.json").exists()]
    return found[0] if found else None


@functools.cache
def cases():
    """Every recorded case, none when the files are not there."""
    return json.loads((folder() / "index.json").read_text())["cases"] if folder() else []


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
