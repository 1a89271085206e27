"""KVANT_RECORD: what is recorded is what the host itself keeps in its f16 cache."""

import struct

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


def test_only_unchanged_rows_are_recorded(plugin, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[2]); from capi import load_plugin; print(load_plugin(sys.argv[1]))"
    done = run_code(code, plugin, HERE, KVANT_RECORD=str(tmp_path / "rows"), KVANT_RECIPE="kivi")
    assert done.stdout.split()[-1] == "False", done.stderr
    lines = kvant_lines(done.stderr)
    assert len(lines) == 1 and "KVANT_RECORD" in lines[0] and "f16" in lines[0]
