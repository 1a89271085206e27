"""Random arrays and settings for the side-by-side tests (Hypothesis strategies)."""

import ml_dtypes
import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
MLX = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES))
# Fractions that round, truncate and tie in every way, and any other.
fractions = st.one_of(
    st.sampled_from([0.0, 0.01, 0.07, 0.1, 0.125, 0.14, 0.2, 0.25, 0.28, 0.29, 0.3, 0.5, 0.55, 0.57, 0.58, 0.7, 0.9, 1.0]),
    st.floats(0, 1, allow_nan=False),
)
group_sizes = st.one_of(st.sampled_from([1, 2, 16, 31, 32, 33, 64]), st.integers(1, 80))
bits = st.integers(1, 8)

# How values lie: plain, with outliers, on a grid (ties), constant columns, far from zero, tiny, zeros of both signs.
SHAPES = ["normal", "laplace", "spikes", "grid", "constant", "offset", "tiny", "zeros", "huge"]
value_kinds = st.sampled_from(SHAPES)


def make(seed, shape, dtype, kind):
    """A NumPy array of the given element type, a pure function of its arguments."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "laplace":
        x = rng.laplace(size=shape).astype(np.float32)
    elif kind == "spikes":
        x = np.where(rng.random(shape) < 0.05, x * 40, x)
    elif kind == "grid":
        x = np.round(x * 8) / 8
    elif kind == "constant":
        x = np.broadcast_to(np.round(x[..., :1, :] * 4) / 4, shape).copy()
    elif kind == "offset":
        x = x + 100
    elif kind == "tiny":
        x = x * 2.0**-20
    elif kind == "zeros":
        x = np.where(rng.random(shape) < 0.5, np.float32(-0.0), np.where(rng.random(shape) < 0.5, np.float32(0), x))
    elif kind == "huge":
        x = x * 8000  # within f16
    return np.ascontiguousarray(x.astype(np.float32).clip(-60000, 60000)).astype(DTYPES[dtype])


def to_mlx(array):
    """The same bits in mlx."""
    if array.dtype.name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


arrays = {
    2: lambda rows, columns: st.builds(lambda seed, n, d, t, k: make(seed, (n, d), t, k), seeds, rows, columns, dtypes, value_kinds),
    3: lambda batch, rows, columns: st.builds(
        lambda seed, b, n, d, t, k: make(seed, (b, n, d), t, k), seeds, batch, rows, columns, dtypes, value_kinds
    ),
}
matrices = arrays[2](st.integers(1, 90), st.integers(1, 40))
batches = arrays[3](st.integers(1, 4), st.integers(1, 90), st.integers(1, 24))
