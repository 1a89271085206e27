"""Random arrays and settings for the side-by-side tests (Hypothesis strategies)."""

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from random_arrays_numpy import DTYPES, SHAPES, make

MLX = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(sorted(DTYPES))
# Fractions that round, truncate and tie in every way, and any other.
fractions = st.one_of(
    st.sampled_from(
        [0.0, 0.01, 0.07, 0.1, 0.125, 0.14, 0.2, 0.25, 0.28, 0.29, 0.3, 0.5, 0.55, 0.57, 0.58, 0.7, 0.9, 1.0]
    ),
    st.floats(0, 1, allow_nan=False),
)
group_sizes = st.one_of(st.sampled_from([1, 2, 16, 31, 32, 33, 64]), st.integers(1, 80))
bits = st.integers(1, 8)

value_kinds = st.sampled_from(SHAPES)


def to_mlx(array):
    """The same bits in mlx."""
    if array.dtype.name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


arrays = {
    2: lambda rows, columns: st.builds(
        lambda seed, n, d, t, k: make(seed, (n, d), t, k), seeds, rows, columns, dtypes, value_kinds
    ),
    3: lambda batch, rows, columns: st.builds(
        lambda seed, b, n, d, t, k: make(seed, (b, n, d), t, k), seeds, batch, rows, columns, dtypes, value_kinds
    ),
}
matrices = arrays[2](st.integers(1, 90), st.integers(1, 40))
batches = arrays[3](st.integers(1, 4), st.integers(1, 90), st.integers(1, 24))
