"""Writes small GGUF files (metadata only) for tests."""

import struct

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
FORMATS = {U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}


def _text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_text(v) for v in value)
        kind = BOOL if value and isinstance(value[0], bool) else U32
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(struct.pack(FORMATS[kind], v) for v in value)
    kind = BOOL if isinstance(value, bool) else F32 if isinstance(value, float) else U32
    return struct.pack("<I", kind) + struct.pack(FORMATS[kind], value)


def gguf_bytes(metadata, version=3):
    body = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(metadata)) + body


def llama(**changes):
    """Metadata of a small model: 4 layers, 8 heads of 64 channels, 2 KV heads."""
    metadata = {
        "general.architecture": "llama",
        "general.name": "test",
        "llama.block_count": 4,
        "llama.context_length": 4096,
        "llama.embedding_length": 512,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.tokens": ["a", "b", "c"],
    }
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            metadata.pop(name)
        else:
            metadata[name] = value
    return metadata
