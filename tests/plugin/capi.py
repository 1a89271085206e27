"""A thin layer over llama.cpp's C interface, as llama-cpp-python binds it: enough to drive a cache in every way."""

import ctypes
import math
import os

import llama_cpp
import numpy as np

ON_DEVICE = 2  # LLAMA_STATE_SEQ_FLAGS_ON_DEVICE: a checkpoint kept in buffers of the cache's own device

_silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


def load_plugin(path):
    """Loads the plug-in the way a user of the binding does; true if the host took it.

    The function is looked up through libllama: the wheel holds libggml under two file names, and the copy behind
    llama_cpp._ggml is not the one that libllama uses.
    """
    load = llama_cpp.llama_cpp._lib.ggml_backend_load
    load.restype = ctypes.c_void_p
    load.argtypes = [ctypes.c_char_p]
    if not os.environ.get("SHOW_HOST_LOG"):
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    return load(os.fsencode(path)) is not None


class Model:
    """A model with all layers on the plug-in's device, or with none."""

    def __init__(self, path, plugin):
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 999 if plugin else 0
        self.handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        assert self.handle, path
        self.vocab = llama_cpp.llama_model_get_vocab(self.handle)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def tokens(self, text, count):
        raw = text.encode()
        buffer = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), buffer, len(buffer), True, False)
        assert n >= count, "the text is too short"
        return list(buffer[:count])


class Context:
    """One context with its memory."""

    def __init__(self, model, n_ctx=512, n_seq=1, unified=True, flash=1, cache_type=1, ubatch=128):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ctx
        params.n_ubatch = ubatch
        params.n_seq_max = n_seq
        params.kv_unified = unified
        params.flash_attn_type = flash
        params.type_k = params.type_v = cache_type
        params.n_threads = params.n_threads_batch = 2
        self.model = model
        self.handle = llama_cpp.llama_init_from_model(model.handle, params)
        assert self.handle
        self.memory = llama_cpp.llama_get_memory(self.handle)

    def close(self):
        llama_cpp.llama_free(self.handle)

    def decode(self, tokens, positions, sequences, only_last=False):
        """Decodes one batch, all or the last of whose tokens give logits; returns them as an array."""
        n = len(tokens)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i] = tokens[i]
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequences[i]
            batch.logits[i] = not only_last or i == n - 1
        code = llama_cpp.llama_decode(self.handle, batch)
        llama_cpp.llama_batch_free(batch)
        assert code == 0, f"llama_decode gave {code}"
        flat = llama_cpp.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(flat, shape=(1 if only_last else n, self.model.n_vocab)).copy()

    def extend(self, tokens, first, sequence=0, only_last=False):
        return self.decode(tokens, range(first, first + len(tokens)), [sequence] * len(tokens), only_last)

    def fill(self, tokens, first, sequence=0):
        """Like extend, where nobody looks at the logits: they are a third of the work, and more in large vocabularies."""
        self.extend(tokens, first, sequence, only_last=True)

    def remove(self, sequence, first, behind):
        assert llama_cpp.llama_memory_seq_rm(self.memory, sequence, first, behind)

    def copy(self, source, target):
        llama_cpp.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def shift(self, sequence, first, behind, distance):
        llama_cpp.llama_memory_seq_add(self.memory, sequence, first, behind, distance)

    def clear(self):
        llama_cpp.llama_memory_clear(self.memory, True)

    def save(self, sequence=0, flags=0):
        size = llama_cpp.llama_state_seq_get_size_ext(self.handle, sequence, flags)
        data = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data_ext(self.handle, data, size, sequence, flags) == size
        return data

    def fails(self, tokens, first):
        """True if the host cannot evaluate these tokens."""
        try:
            self.fill(tokens, first)
        except AssertionError:
            return True
        return False

    def restore(self, data, sequence=0, flags=0):
        assert llama_cpp.llama_state_seq_set_data_ext(self.handle, data, len(data), sequence, flags) > 0


def divergence(truth, other):
    """Mean Kullback-Leibler divergence of rows of logits, in nats."""

    def log_softmax(x):
        x = x.astype(np.float64)
        x -= x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, q = log_softmax(truth), log_softmax(other)
    value = float((np.exp(p) * (p - q)).sum(axis=-1).mean())
    return value if not math.isnan(value) else math.inf
