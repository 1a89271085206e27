"""Packs the reference's golden cases for a clone that has no ../shared: tests/data/golden.tar.xz.

All cases are taken whose tensors are small; the few large ones (hundreds of tokens) stay in ../shared/golden only, and
a checkout that has that folder runs them all. usage: pack_golden.py GOLDEN_DIR OUTPUT [MAX_CASE_BYTES]
"""

import io
import json
import pathlib
import struct
import sys
import tarfile


def names_in(value: object, known: set[str]) -> set[str]:
    """Names of tensors anywhere in a case."""
    if isinstance(value, str):
        return {value} & known
    if isinstance(value, dict):
        return set().union(*(names_in(v, known) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(names_in(v, known) for v in value))
    return set()


def read_safetensors(path: pathlib.Path) -> dict[str, tuple[dict, bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    header.pop("__metadata__", None)
    return {name: (entry, body[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def safetensors(tensors: dict[str, tuple[dict, bytes]]) -> bytes:
    header, body = {}, b""
    for name, (entry, data) in tensors.items():
        header[name] = dict(entry, data_offsets=[len(body), len(body) + len(data)])
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + body


def main() -> None:
    folder, output = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else 90_000
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    files = {name: read_safetensors(folder / name) for name in index["files"]}
    used: dict[str, set[str]] = {name: set() for name in files}
    cases = []
    for case in index["cases"]:
        tensors = files.get(case.get("file", ""), {})
        names = names_in(case, set(tensors))
        if sum(len(tensors[n][1]) for n in names) <= limit:
            cases.append(case)
            if names:
                used[case["file"]] |= names
    total = len(index["cases"])
    index["cases"] = cases
    contents = {"index.json": json.dumps(index, separators=(",", ":")).encode()}
    for name, tensors in files.items():
        contents[name] = safetensors({n: t for n, t in tensors.items() if n in used[name]})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(output, "w:xz", preset=9) as archive:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    print(f"{len(cases)} of {total} cases, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
