"""KVQuant-NUQ: non-uniform levels per key channel and per value token, outliers and the first tokens kept exact.

The names, arguments, defaults and results of ``veloxquant_mlx.quantizers.kvquant`` and
``veloxquant_mlx.cache.kvquant_cache``. Arrays may be NumPy's, mlx's or torch's (f16, bf16, f32, any strides); results
are new arrays of the same framework. Every function raises :class:`kvant.Error` (a ``ValueError``) for a shape, an
element type or a number outside its range and for NaN and infinity, and works on the CPU without the GIL.

Columns are what is quantized: ``x`` is ``[N, D]``, N samples of D columns; the batched forms take ``[B, N, D]``. The
batched fit and coding, which the cache uses, are another algorithm than the plain ones and give other results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from ._arrays import read, read_floats
from .cache import TwoSidedCache
from .errors import Error


class DenseSparse(NamedTuple):
    """Values split into inliers and outliers; every field has the input's shape.

    Attributes:
        inliers: f32, the column's mean in the place of outliers.
        outlier_mask: bool, True for outliers.
        outlier_vals: f32, the outliers' values, 0 elsewhere.
    """

    inliers: Any
    outlier_mask: Any
    outlier_vals: Any


def _split(x: Any, outlier_fraction: float, rank: int) -> DenseSparse:
    a = read_floats(x, "x", rank)
    inliers, mask, values = (a.empty(a.shape, dtype) for dtype in ("f32", "bool", "f32"))
    _core.split_dense_sparse(a.view, outlier_fraction, inliers.target, mask.target, values.target, rank)
    return DenseSparse(inliers.array, mask.array, values.array)


def _fit(x: Any, bits: int, n_iters: int, rank: int) -> Any:
    a = read_floats(x, "x", rank)
    if not 1 <= bits <= 8:
        raise Error(f"bits is {bits}; it must be 1..8")
    levels = a.empty((*a.shape[:-2], 1 << bits, a.shape[-1]), "f32")
    _core.fit_nuq_levels(a.view, bits, n_iters, levels.target, rank)
    return levels.array


def _quantize(x: Any, levels: Any, rank: int) -> Any:
    a, table = read_floats(x, "x", rank), read_floats(levels, "levels", rank)
    codes = a.empty(a.shape, "int32")
    _core.quantize_nuq(a.view, table.view, codes.target, rank)
    return codes.array


def _dequant(codes: Any, levels: Any, rank: int) -> Any:
    c, table = read(codes, "codes", rank), read_floats(levels, "levels", rank)
    out = c.empty(c.shape, "f16")
    _core.dequant_nuq(c.view, table.view, out.target, rank)
    return out.array


def split_dense_sparse(x: Any, outlier_fraction: float) -> DenseSparse:
    """Takes the largest magnitudes of each column out.

    Args:
        x: ``[N, D]``.
        outlier_fraction: share of outliers: k = min(max(1, round(N * outlier_fraction)), N - 1) per column, ties to the
            lower row; none for outlier_fraction <= 0 or N < 2.

    Returns:
        :class:`DenseSparse`.

    Reference: ``split_dense_sparse``.
    """
    return _split(x, outlier_fraction, 2)


def fit_nuq_levels(x: Any, bits: int, n_iters: int = 8) -> Any:
    """Lloyd-Max levels per column, from quantiles.

    Args:
        x: ``[N, D]``, N >= 1.
        bits: 1..8; 2^bits levels.
        n_iters: sweeps; at least one is made.

    Returns:
        ``[2^bits, D]`` f32, ascending.

    Reference: ``fit_nuq_levels``.
    """
    return _fit(x, bits, n_iters, 2)


def quantize_nuq(x: Any, levels: Any) -> Any:
    """Index of the nearest level, ties to the lower one.

    Args:
        x: ``[N, D]``.
        levels: ``[L, D]``, L of 1..256.

    Returns:
        ``[N, D]`` int32.

    Reference: ``quantize_nuq``.
    """
    return _quantize(x, levels, 2)


def dequant_nuq(codes: Any, levels: Any) -> Any:
    """``levels[code]`` per column, ``[N, D]`` f16.

    Args:
        codes: ``[N, D]`` integers.
        levels: ``[L, D]``.

    Raises:
        kvant.OutOfRangeError: a code outside 0..L-1.

    Reference: ``dequant_nuq``.
    """
    return _dequant(codes, levels, 2)


def split_dense_sparse_batched(x: Any, outlier_fraction: float) -> DenseSparse:
    """:func:`split_dense_sparse` of every matrix of ``[B, N, D]``.

    Reference: ``split_dense_sparse_batched``.
    """
    return _split(x, outlier_fraction, 3)


def fit_nuq_levels_batched(x: Any, bits: int, n_iters: int = 8) -> Any:
    """Lloyd-Max levels of ``[B, N, D]`` as the cache fits them (centred samples, midpoints): ``[B, 2^bits, D]`` f32.

    Reference: ``fit_nuq_levels_batched``.
    """
    return _fit(x, bits, n_iters, 3)


def quantize_nuq_batched(x: Any, levels: Any) -> Any:
    """Number of midpoints of ``levels [B, L, D]`` strictly below ``x [B, N, D]``: ``[B, N, D]`` int32.

    Reference: ``quantize_nuq_batched``.
    """
    return _quantize(x, levels, 3)


def dequant_nuq_batched(codes: Any, levels: Any) -> Any:
    """:func:`dequant_nuq` of ``codes [B, N, D]`` with ``levels [B, L, D]``: ``[B, N, D]`` f16.

    Reference: ``dequant_nuq_batched``.
    """
    return _dequant(codes, levels, 3)


def nuq_quant_dequant(x: Any, bits: int, outlier_fraction: float = 0.0, lloyd_iters: int = 8) -> Any:
    """Split, fit, code and look up, outliers put back: ``[N, D]`` f16.

    Args:
        x: ``[N, D]``, N >= 1.
        bits: 1..8.
        outlier_fraction: as in :func:`split_dense_sparse`.
        lloyd_iters: sweeps of the fit.

    Reference: ``nuq_quant_dequant``.
    """
    a = read_floats(x, "x", 2)
    out = a.empty(a.shape, "f16")
    _core.nuq_quant_dequant(a.view, bits, outlier_fraction, lloyd_iters, out.target)
    return out.array


def nuq_distortion(x: Any, levels: Any) -> float:
    """Mean squared error of coding ``x [N, D]`` with ``levels [L, D]``.

    Reference: ``nuq_distortion``.
    """
    return _core.nuq_distortion(read_floats(x, "x", 2).view, read_floats(levels, "levels", 2).view)


class KVQuantKVCache(TwoSidedCache):
    """KVQuant's cache: codes, level tables, outliers and sinks, packed.

    Args:
        config: any object with (some of) ``kvquant_bits``, ``kvquant_outlier_fraction``, ``kvquant_group_size``,
            ``kvquant_lloyd_iters``, ``kvquant_refit_interval`` and ``kvquant_n_sink``, such as
            :class:`kvant.KVCacheConfig`.

    Raises:
        kvant.QuantizerConfigError: a field outside its range.

    Keys and values must have the same head size. Key levels are fit once there are enough samples and then kept (or
    fit again every ``kvquant_refit_interval`` tokens); value levels are each token's own. NaN and infinity are refused.
    The ``*_bytes`` properties are the reference's own arithmetic; ``nbytes`` is what is held.

    Reference: ``KVQuantKVCache``.
    """

    _core_class = _core.KVQuantKVCache

    @property
    def nuq_bits(self) -> int:
        """Configured bits of a code. (Not ``bits``, which sends mlx_lm to its own quantized attention.)"""
        return self._core.nuq_bits

    @property
    def outlier_fraction(self) -> float:
        """Configured share of outliers."""
        return self._core.outlier_fraction

    @property
    def outlier_count(self) -> int:
        """Outliers of all calls so far, keys and values."""
        return self._core.outlier_count

    @property
    def n_sink(self) -> int:
        """Configured number of first tokens kept exact."""
        return self._core.n_sink

    @property
    def sink_kept(self) -> int:
        """First tokens that are kept exact."""
        return self._core.sink_kept

    @property
    def key_outlier_thresh(self) -> Any:
        """``[1, D]`` f32: magnitude from which a key of a one-token call is an outlier; None without one."""
        return self._table("key_outlier_thresh")

    @property
    def key_levels(self) -> Any:
        """``[H, L, D]`` f32: the levels in use; None before the first fit."""
        return self._table("key_levels")

    @property
    def value_levels(self) -> Any:
        """A list of one ``[L, S]`` f32 array: the last call's levels of batch element 0, head 0; None at first."""
        table = self._table("value_levels")
        return None if table is None else [table]

    def _table(self, name: str) -> Any:
        with self._lock:
            shape = getattr(self._core, name + "_shape")()
            if shape is None or self._kinds is None:
                return None
            table, target = self._kinds[0].empty(shape, "f32")
            getattr(self._core, name)(target)
        return table

    @property
    def effective_bits(self) -> float:
        """``16 * compressed_key_bytes / fp16_key_bytes``; the configured bits before the first token."""
        return self._core.effective_bits


__all__ = [
    "DenseSparse",
    "KVQuantKVCache",
    "dequant_nuq",
    "dequant_nuq_batched",
    "fit_nuq_levels",
    "fit_nuq_levels_batched",
    "nuq_distortion",
    "nuq_quant_dequant",
    "quantize_nuq",
    "quantize_nuq_batched",
    "split_dense_sparse",
    "split_dense_sparse_batched",
]
