"""Comparison of arrays by their bits, whatever framework they come from."""

import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_numpy(array):
    """A NumPy array with the same bits; bf16 becomes ml_dtypes' bfloat16."""
    if isinstance(array, np.ndarray):
        return array
    module = type(array).__module__.split(".", 1)[0]
    if module == "mlx":
        import ml_dtypes
        import mlx.core as mx

        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(array)
    if module == "torch":
        import ml_dtypes
        import torch

        if array.dtype == torch.bfloat16:
            return array.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()
    return np.asarray(array)


def assert_bits(got, want, what="", signed_zero=True):
    """Same type, shape and bits; any NaN equals any NaN, and with signed_zero=False +0 equals -0."""
    got, want = to_numpy(got), to_numpy(want)
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    bits = UNSIGNED[got.dtype.itemsize]
    same = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
    if got.dtype.kind == "f" or got.dtype.name == "bfloat16":
        wide_got, wide_want = got.astype(np.float32), want.astype(np.float32)
        same |= np.isnan(wide_got) & np.isnan(wide_want)
        if not signed_zero:
            same |= (wide_got == 0) & (wide_want == 0)
    if not same.all():
        first = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {np.count_nonzero(~same)} of {same.size} differ, "
            f"first at {first}: {got[first]!r}, not {want[first]!r}"
        )
