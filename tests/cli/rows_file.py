"""Files of recorded rows (docs/format.md) for tests."""

import struct

import numpy as np


def recorded_rows(streams, tokens, halves=True, value=lambda rows: rows):
    """One record of `tokens` rows for each (layer, side, heads, dim); values count up and go through `value`."""
    data = b"KVANTROW" + struct.pack("<II", 1, 1 if halves else 0)
    for stream in streams:
        rows = np.arange(tokens * stream[2] * stream[3], dtype=np.float32).reshape(tokens, -1)
        data += struct.pack("<4iq", *stream, tokens) + np.arange(tokens, dtype="<i8").tobytes()
        data += value(rows).astype("<f2" if halves else "<f4").tobytes()
    return data


def read_rows(path):
    """{(layer, side): rows [tokens][heads * dim] as float32}, the rows of cell 0 left out."""
    data = open(path, "rb").read()
    assert data[:8] == b"KVANTROW"
    version, kind = struct.unpack_from("<II", data, 8)
    assert (version, kind) == (1, 1)
    at, streams = 16, {}
    while at < len(data):
        layer, side, heads, dim, count = struct.unpack_from("<4iq", data, at)
        at += 24
        cells = np.frombuffer(data, "<i8", count, at)
        at += 8 * count
        rows = np.frombuffer(data, "<f2", count * heads * dim, at).reshape(count, -1)
        at += rows.nbytes
        streams.setdefault((layer, side), []).append(rows[cells > 0].astype(np.float32))
    return {key: np.concatenate(rows) for key, rows in streams.items()}


def as_weights(path, weight):
    """The file with `weight(rows)` in place of every record's rows, as binary32."""
    data = open(path, "rb").read()
    out, at = data[:12] + struct.pack("<I", 0), 16
    while at < len(data):
        layer, side, heads, dim, count = struct.unpack_from("<4iq", data, at)
        head = 24 + 8 * count
        rows = np.frombuffer(data, "<f2", count * heads * dim, at + head).reshape(count, -1)
        out += data[at : at + head] + weight(rows.astype(np.float32)).astype("<f4").tobytes()
        at += head + rows.nbytes
    return out


def read_calibration(path):
    """The layers of a calibration file: [{levels, ranges}], and its head."""
    data = open(path, "rb").read()
    assert data[:8] == b"KVANTCAL"
    (version,) = struct.unpack_from("<I", data, 8)
    at, texts = 12, []
    for _ in range(3):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    outliers, tokens, weighted, count = struct.unpack_from("<dqBI", data, at)
    at += 21
    layers = []
    for _ in range(count):
        layer, heads, key_dim, value_dim = struct.unpack_from("<4i", data, at)
        tables = np.frombuffer(data, np.uint8, 192, at + 16).reshape(2, 3, 2, 16)
        ranges = np.frombuffer(data, "<f4", 2 * heads * key_dim, at + 208).reshape(2, heads * key_dim)
        at += 208 + ranges.nbytes
        layers.append({"layer": layer, "shape": (heads, key_dim, value_dim), "tables": tables, "ranges": ranges})
    assert at + 8 == len(data)
    return {"version": version, "texts": texts, "outliers": outliers, "tokens": tokens, "weighted": weighted, "layers": layers}
