"""Arrays of every framework, element type and stride, read where they lie and answered in kind."""

import array

import kvant
import ml_dtypes
import numpy as np
import pytest
from bits import assert_bits, to_numpy
from random_arrays_numpy import DTYPES, make

try:
    import mlx.core as mx
except ImportError:
    mx = None
try:
    import torch
except ImportError:
    torch = None

needs_mlx = pytest.mark.skipif(mx is None, reason="pip install mlx-cpu mlx")
needs_torch = pytest.mark.skipif(torch is None, reason="pip install torch")
X = make(1, (70, 12), "f32", "laplace")


def as_mlx(x):
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(np.ascontiguousarray(x).view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.ascontiguousarray(x))


def as_torch(x):
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


FRAMEWORKS = {"numpy": lambda x: x, "mlx": as_mlx, "torch": as_torch}
frameworks = pytest.mark.parametrize(
    "framework", ["numpy", pytest.param("mlx", marks=needs_mlx), pytest.param("torch", marks=needs_torch)]
)
# Each makes a 2-D array with unusual strides from a 2-D array; the same expressions work in every framework.
STRIDES = {
    "transposed": lambda x: x.T,
    "every second row": lambda x: x[::2],
    "every third channel": lambda x: x[:, ::3],
    "a window": lambda x: x[3:50, 2:9],
    "one row": lambda x: x[:1],
    "no rows": lambda x: x[:0],
}


def kind(x):
    return type(x).__module__.split(".")[0]


@frameworks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", STRIDES)
def test_functions(framework, dtype, strides):
    x = X.astype(DTYPES[dtype])
    view = STRIDES[strides](FRAMEWORKS[framework](x))
    dense = np.ascontiguousarray(STRIDES[strides](x))
    got = kvant.group_quant.group_quant_dequant(view, 3, 16)
    assert kind(got) == framework
    assert_bits(got, kvant.group_quant.group_quant_dequant(dense, 3, 16))
    for part, want in zip(kvant.zipcache.channel_quant(view, 3, 16), kvant.zipcache.channel_quant(dense, 3, 16)):
        assert kind(part) == framework
        assert_bits(part, want)
    if len(dense):
        state, want = kvant.zipcache.zipcache_compress(view), kvant.zipcache.zipcache_compress(dense)
        for name, part in state._asdict().items():
            if not isinstance(part, int):
                assert kind(part) == framework
                assert_bits(part, getattr(want, name), name)
        assert_bits(kvant.zipcache.zipcache_reconstruct(state), kvant.zipcache.zipcache_reconstruct(want))
        split, want = kvant.kvquant.split_dense_sparse(view, 0.1), kvant.kvquant.split_dense_sparse(dense, 0.1)
        for part, other in zip(split, want):
            assert kind(part) == framework
            assert_bits(part, other)
        levels = kvant.kvquant.fit_nuq_levels(view, 2)
        codes = kvant.kvquant.quantize_nuq(view, levels)
        assert kind(levels) == kind(codes) == framework
        assert_bits(codes, kvant.kvquant.quantize_nuq(dense, to_numpy(levels)))
        assert_bits(kvant.kvquant.dequant_nuq(codes, levels), kvant.kvquant.nuq_quant_dequant(view, 2))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
        np.asfortranarray,
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_strides(view, dtype):
    """Negative strides, strides of zero and column-major order."""
    x = view(X.astype(DTYPES[dtype]))
    assert_bits(
        kvant.kitty.quantize_mixed_channels(x, [0, 2], [1]),
        kvant.kitty.quantize_mixed_channels(x.copy("C"), [0, 2], [1]),
    )


@frameworks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", [kvant.KittyKVCache, kvant.KVQuantKVCache, kvant.ZipCacheKVCache])
def test_caches(framework, dtype, cls):
    """[B, T, H, D] arrays seen as [B, H, T, D], as models make them."""
    keys = make(2, (2, 40, 3, 8), dtype, "laplace")
    values = make(3, (2, 40, 3, 8), dtype, "normal")
    plain, other = cls(kvant.KVCacheConfig()), cls(kvant.KVCacheConfig())
    for first, last in ((0, 33), (33, 34), (34, 40)):
        dense = [np.ascontiguousarray(x[:, first:last].swapaxes(1, 2)) for x in (keys, values)]
        views = [FRAMEWORKS[framework](x)[:, first:last].swapaxes(1, 2) for x in (keys, values)]
        for got, want in zip(other.update_and_fetch(*views), plain.update_and_fetch(*dense)):
            assert kind(got) == framework
            assert_bits(got, want)
    queries = make(4, (2, 6, 2, 8), dtype, "normal")
    got = other.attend(FRAMEWORKS[framework](queries))
    assert kind(got) == framework
    assert_bits(got, plain.attend(queries))


def test_read_only_and_unaligned():
    x = X.copy()
    want = kvant.zipcache.token_key_norms(x)
    x.flags.writeable = False
    assert_bits(kvant.zipcache.token_key_norms(x), want)
    record = np.zeros(X.shape, dtype=[("tag", "i1"), ("value", "f4")])
    record["value"] = X
    assert_bits(kvant.zipcache.token_key_norms(record["value"]), want)


def test_buffer_protocol():
    assert_bits(kvant.zipcache.token_key_norms(memoryview(X)), kvant.zipcache.token_key_norms(X))
    flat = array.array("f", [3.0, 4.0, 5.0])
    assert_bits(kvant.zipcache.saliency_mask(flat, 0.4), np.array([False, True, True]))


def test_any_dlpack_object():
    class Foreign:
        def __dlpack__(self, **options):
            return X.__dlpack__(**options)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    assert_bits(kvant.zipcache.token_key_norms(Foreign()), kvant.zipcache.token_key_norms(X))


@needs_torch
def test_torch_gradients_are_left_alone():
    x = torch.from_numpy(X.copy()).requires_grad_()
    got = kvant.zipcache.token_key_norms(x * 1)
    assert not got.requires_grad
    assert_bits(got, kvant.zipcache.token_key_norms(X))


def test_arguments_are_not_changed():
    x = X.copy()
    kvant.zipcache.zipcache_quant_dequant(x)
    kvant.kvquant.nuq_quant_dequant(x, 2, 0.1)
    kvant.kitty.quantize_mixed_channels(x, [0], [1])
    assert_bits(x, X)


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ([[1.0, 2.0]], TypeError, "list"),
        (None, TypeError, "NoneType"),
        (np.zeros(3, np.float32), kvant.Error, "axes"),
        (np.zeros((2, 3, 4), np.float32), kvant.Error, "axes"),
        (np.zeros((3, 3)), kvant.Error, "float64"),
        (np.zeros((3, 3), np.int32), kvant.Error, "int32"),
        (np.zeros((3, 3), ">f4"), kvant.Error, "byte order"),
        (np.zeros((3, 3), np.complex64), kvant.Error, "complex64"),
    ],
)
def test_refused(bad, error, text):
    with pytest.raises(error, match=text):
        kvant.zipcache.token_key_norms(bad)
