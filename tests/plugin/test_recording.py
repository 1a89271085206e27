"""KVANT_RECORD: what is recorded is what the host itself keeps in its f16 cache."""

import struct

import numpy as np
from conftest import HERE, kvant_lines, run_python
from test_loading import run_code


def read_records(path):
    """{(layer, side): bytes of all rows}, and the cell numbers of all records."""
    data = path.read_bytes()
    assert data[:16] == b"KVANTROW" + struct.pack("<II", 1, 1)
    at, rows, cells = 16, {}, {}
    while at < len(data):
        layer, side, heads, dim, count = struct.unpack_from("<4iq", data, at)
        at += 24
        cells.setdefault((layer, side), []).extend(struct.unpack_from(f"<{count}q", data, at))
        at += 8 * count
        size = 2 * count * heads * dim
        rows[layer, side] = rows.get((layer, side), b"") + data[at : at + size]
        at += size
    assert at == len(data)
    return rows, cells


def test_rows_are_those_of_the_hosts_cache(plugin, smollm2, text, tmp_path):
    record, stock, ours = tmp_path / "rows", tmp_path / "stock", tmp_path / "ours"
    run_python("recording_scenario.py", plugin, smollm2, text, stock, ours, KVANT_RECORD=str(record))
    rows, cells = read_records(record)
    assert set(rows) == {(layer, side) for layer in range(30) for side in (0, 1)}
    assert all(numbers == list(range(70)) for numbers in cells.values())
    state = ours.read_bytes()
    assert all(len(part) == 70 * 192 * 2 and part in state for part in rows.values())
    # The first layer's rows do not depend on how attention was computed.
    state = stock.read_bytes()
    assert rows[0, 0] in state and rows[0, 1] in state


def rotated(keys, first, base=100000.0):
    """RoPE of SmolLM2 (pairs 2 i and 2 i + 1) for [rows][heads][64] at positions first, first + 1, ..."""
    positions = first + np.arange(len(keys))
    angles = positions[:, None, None] * base ** (-np.arange(32) / 32.0)
    x, y = keys[..., 0::2], keys[..., 1::2]
    out = np.empty_like(keys)
    out[..., 0::2] = x * np.cos(angles) - y * np.sin(angles)
    out[..., 1::2] = x * np.sin(angles) + y * np.cos(angles)
    return out


def test_keys_are_recorded_before_rope_as_well(plugin, smollm2, text, tmp_path):
    recorded = {}
    for rope in ("after", "before"):
        record, outputs = tmp_path / rope, (tmp_path / "stock", tmp_path / "ours")
        run_python("recording_scenario.py", plugin, smollm2, text, *outputs, KVANT_RECORD=str(record),
                   KVANT_RECORD_ROPE=rope)  # fmt: skip
        recorded[rope] = read_records(record)[0]
    for layer in (0, 17):
        assert recorded["after"][layer, 1] == recorded["before"][layer, 1]
        after, before = (
            np.frombuffer(recorded[rope][layer, 0], "<f2").reshape(70, 3, 64).astype(np.float64)
            for rope in ("after", "before")
        )
        assert np.abs(rotated(before, 0) - after).max() < 2e-3 * np.abs(after).max()
        assert np.abs(before - after).max() > 0.1 * np.abs(after).max()
        # What the form is for: most of a channel is constant before the rotation.
        spread = [rows.std(0).mean() / np.abs(rows).mean() for rows in (before[1:], after[1:])]
        assert spread[0] < spread[1]


def test_only_unchanged_rows_are_recorded(plugin, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[2]); from capi import load_plugin; print(load_plugin(sys.argv[1]))"
    done = run_code(code, plugin, HERE, KVANT_RECORD=str(tmp_path / "rows"), KVANT_RECIPE="kivi")
    assert done.stdout.split()[-1] == "False", done.stderr
    lines = kvant_lines(done.stderr)
    assert len(lines) == 1 and "KVANT_RECORD" in lines[0] and "f16" in lines[0]
