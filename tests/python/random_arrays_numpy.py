"""Random arrays without mlx."""

import ml_dtypes
import numpy as np

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}

# How values lie: plain, with outliers, on a grid (ties), constant columns, far from zero, tiny, zeros of both signs.
SHAPES = ["normal", "laplace", "spikes", "grid", "constant", "offset", "tiny", "zeros", "huge"]


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
