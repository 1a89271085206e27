"""Tiny models with random weights as GGUF files: a recurrent one, and a transformer whose keys can be made huge."""

import struct

import numpy as np

EMBEDDING, VOCABULARY, LAYERS = 32, 64, 2
INNER, STATE, KERNEL, RANK = 64, 16, 4, 4
HEADS, FEED_FORWARD = 2, 64
ALIGNMENT = 32
U32, F32, TEXT = 4, 6, 8


def _string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _metadata(architecture, numbers):
    yield "general.architecture", TEXT, _string(architecture)
    common = {"context_length": 512, "embedding_length": EMBEDDING, "block_count": LAYERS, "vocab_size": VOCABULARY}
    for key, value in {**common, **numbers}.items():
        yield f"{architecture}.{key}", U32, struct.pack("<I", value)
    yield f"{architecture}.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)
    yield "tokenizer.ggml.model", TEXT, _string("no_vocab")


def _random_source(seed=1):
    rng = np.random.default_rng(seed)
    return lambda *shape: (0.3 * rng.standard_normal(shape)).astype("<f4")


def _mamba_block(block, normal):
    yield block + "ssm_in.weight", normal(2 * INNER, EMBEDDING)
    yield block + "ssm_conv1d.weight", normal(INNER, KERNEL)
    yield block + "ssm_conv1d.bias", normal(INNER)
    yield block + "ssm_x.weight", normal(RANK + 2 * STATE, INNER)
    yield block + "ssm_dt.weight", normal(INNER, RANK)
    yield block + "ssm_dt.bias", normal(INNER)
    yield block + "ssm_a", -np.abs(normal(INNER, STATE))
    yield block + "ssm_d", normal(INNER)
    yield block + "ssm_out.weight", normal(EMBEDDING, INNER)


def _llama_block(block, normal, key_factor):
    yield block + "attn_q.weight", normal(EMBEDDING, EMBEDDING)
    yield block + "attn_k.weight", normal(EMBEDDING, EMBEDDING) * np.float32(key_factor)
    yield block + "attn_v.weight", normal(EMBEDDING, EMBEDDING)
    yield block + "attn_output.weight", normal(EMBEDDING, EMBEDDING)
    yield block + "ffn_norm.weight", np.ones(EMBEDDING, "<f4")
    yield block + "ffn_gate.weight", normal(FEED_FORWARD, EMBEDDING)
    yield block + "ffn_up.weight", normal(FEED_FORWARD, EMBEDDING)
    yield block + "ffn_down.weight", normal(EMBEDDING, FEED_FORWARD)


def _write(path, metadata, block):
    normal = _random_source()
    tensors = [("token_embd.weight", normal(VOCABULARY, EMBEDDING)), ("output_norm.weight", np.ones(EMBEDDING, "<f4"))]
    for layer in range(LAYERS):
        tensors.append((f"blk.{layer}.attn_norm.weight", np.ones(EMBEDDING, "<f4")))
        tensors.extend(block(f"blk.{layer}.", normal))
    metadata = list(metadata)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, kind, value in metadata:
        head += _string(key) + struct.pack("<I", kind) + value
    body = b""
    for name, array in tensors:
        head += _string(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *reversed(array.shape)) + struct.pack("<IQ", 0, len(body))
        body += array.tobytes()
        body += b"\0" * (-len(body) % ALIGNMENT)
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + body)


def write_mamba(path):
    numbers = {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": KERNEL,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": RANK,
    }
    _write(path, _metadata("mamba", numbers), _mamba_block)


def write_llama(path, key_factor):
    numbers = {"feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS}
    _write(path, _metadata("llama", numbers), lambda block, normal: _llama_block(block, normal, key_factor))
