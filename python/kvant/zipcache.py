"""ZipCache: tokens with a large key norm in one width, the others in a narrower one.

The names, arguments, defaults and results of ``veloxquant_mlx.quantizers.zipcache`` and
``veloxquant_mlx.cache.zipcache_cache``. Arrays may be NumPy's, mlx's or torch's (f16, bf16, f32, any strides); results
are new arrays of the same framework. Every function raises :class:`kvant.Error` (a ``ValueError``) for a shape, an
element type or a number outside its range, and works on the CPU without the GIL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from ._arrays import read, read_floats
from .cache import TwoSidedCache
from .group_quant import count_groups


class ZipCacheState(NamedTuple):
    """A compressed matrix of S tokens and D channels.

    Attributes:
        hi_codes: ``[n_hi, D]`` uint8, the salient tokens in their order.
        hi_scales: ``[hi groups, D]`` f32.
        hi_zeros: ``[hi groups, D]`` f32, the groups' minima.
        lo_codes: ``[n_lo, D]`` uint8, the other tokens in their order.
        lo_scales: ``[lo groups, D]`` f32.
        lo_zeros: ``[lo groups, D]`` f32.
        hi_mask: ``[S]`` bool, True for salient tokens.
        hi_bits: bits of salient tokens.
        lo_bits: bits of the others.
        seq_len: S.
        head_dim: D.
        group_size: rows of a group.
    """

    hi_codes: Any
    hi_scales: Any
    hi_zeros: Any
    lo_codes: Any
    lo_scales: Any
    lo_zeros: Any
    hi_mask: Any
    hi_bits: int
    lo_bits: int
    seq_len: int
    head_dim: int
    group_size: int


_STATE_ARRAYS = {
    "hi_codes": 2, "hi_scales": 2, "hi_zeros": 2, "lo_codes": 2, "lo_scales": 2, "lo_zeros": 2, "hi_mask": 1,
}  # fmt: skip


def _to_core(state: ZipCacheState) -> _core.ZipCacheState:
    arrays = {name: read(getattr(state, name), name, rank).view for name, rank in _STATE_ARRAYS.items()}
    numbers = {name: getattr(state, name) for name in ZipCacheState._fields if name not in arrays}
    return _core.ZipCacheState.make(**arrays, **numbers)


def token_key_norms(keys: Any) -> Any:
    """L2 norm of each row of ``keys [S, D]``: ``[S]`` f32.

    Reference: ``token_key_norms``.
    """
    k = read_floats(keys, "keys", 2)
    out = k.empty(k.shape[:1], "f32")
    _core.token_key_norms(k.view, out.target)
    return out.array


def saliency_mask(norms: Any, hi_fraction: float) -> Any:
    """The tokens with the largest norms.

    Args:
        norms: ``[S]``; NaN counts as the largest.
        hi_fraction: ``ceil(S * hi_fraction)`` tokens, at least 0 and at most S; ties to the later token.

    Returns:
        ``[S]`` bool, True for salient tokens.

    Reference: ``saliency_mask``.
    """
    n = read_floats(norms, "norms", 1)
    out = n.empty(n.shape, "bool")
    _core.saliency_mask(n.view, hi_fraction, out.target)
    return out.array


def channel_quant(x: Any, bits: int, group_size: int = 32) -> tuple[Any, Any, Any]:
    """Codes, step and minimum per group of rows and channel.

    Args:
        x: ``[N, D]``.
        bits: 1..8.
        group_size: rows of a group.

    Returns:
        ``(codes [N, D] uint8, scales [G, D] f32, zeros [G, D] f32)``, G = ceil(N / group_size).

    Reference: ``channel_quant``.
    """
    a = read_floats(x, "x", 2)
    groups = count_groups(a.shape[0], group_size)
    codes = a.empty(a.shape, "uint8")
    scales, zeros = (a.empty((groups, a.shape[1]), "f32") for _ in range(2))
    _core.channel_quant(a.view, bits, group_size, codes.target, scales.target, zeros.target)
    return codes.array, scales.array, zeros.array


def channel_dequant(codes: Any, scales: Any, zeros: Any, group_size: int = 32) -> Any:
    """``code * scale + zero``: ``[N, D]`` f32. Arguments as :func:`channel_quant` returns them.

    Reference: ``channel_dequant``.
    """
    c = read(codes, "codes", 2)
    s, z = read(scales, "scales", 2), read(zeros, "zeros", 2)
    out = c.empty(c.shape, "f32")
    _core.channel_dequant(c.view, s.view, z.view, group_size, out.target)
    return out.array


def zipcache_compress(
    x: Any, hi_bits: int = 4, lo_bits: int = 2, hi_fraction: float = 0.2, group_size: int = 32
) -> ZipCacheState:
    """Splits the rows by their norm and quantizes both parts.

    Args:
        x: ``[S, D]``.
        hi_bits: bits of salient tokens, 1..8.
        lo_bits: bits of the others, 1..8.
        hi_fraction: as in :func:`saliency_mask`.
        group_size: rows of a group, counted within each part.

    Returns:
        :class:`ZipCacheState`.

    Reference: ``zipcache_compress``.
    """
    a = read_floats(x, "x", 2)
    state = _core.zipcache_compress(a.view, hi_bits, lo_bits, hi_fraction, group_size)
    rows, columns = a.shape
    parts = []
    for count in (state.n_hi, rows - state.n_hi):
        groups = count_groups(count, group_size)
        parts += [a.empty((count, columns), "uint8")] + [a.empty((groups, columns), "f32") for _ in range(2)]
    parts.append(a.empty((rows,), "bool"))
    state.read(*(part.target for part in parts))
    numbers = (state.hi_bits, state.lo_bits, state.seq_len, state.head_dim, state.group_size)
    return ZipCacheState._make([*(part.array for part in parts), *numbers])


def zipcache_reconstruct(state: ZipCacheState) -> Any:
    """The matrix that ``state`` holds: ``[S, D]`` f16.

    Reference: ``zipcache_reconstruct``.
    """
    out = read(state.hi_codes, "hi_codes", 2).empty((state.seq_len, state.head_dim), "f16")
    _core.zipcache_reconstruct(_to_core(state), out.target)
    return out.array


def zipcache_bytes(state: ZipCacheState, group_size: int | None = None) -> int:
    """What the reference charges for ``state``: packed codes, 4 bytes per group and channel, a byte per token.

    Args:
        state: a compressed matrix.
        group_size: another grouping than the state's, to price it.

    Reference: ``zipcache_bytes``.
    """
    return _core.zipcache_bytes(_to_core(state), group_size)


def base_only_bytes(S: int, D: int, bits: int, group_size: int = 32) -> int:
    """What the reference charges for S tokens of D channels at one width, in bytes.

    Reference: ``base_only_bytes``.
    """
    return _core.base_only_bytes(S, D, bits, group_size)


def zipcache_quant_dequant(
    x: Any, hi_bits: int = 4, lo_bits: int = 2, hi_fraction: float = 0.2, group_size: int = 32
) -> Any:
    """``zipcache_reconstruct(zipcache_compress(x, ...))``: ``[S, D]`` f16.

    Reference: ``zipcache_quant_dequant``.
    """
    a = read_floats(x, "x", 2)
    out = a.empty(a.shape, "f16")
    _core.zipcache_quant_dequant(a.view, out.target, hi_bits, lo_bits, hi_fraction, group_size)
    return out.array


class ZipCacheKVCache(TwoSidedCache):
    """ZipCache's cache: each call is compressed on its own, keys by saliency and values at ``zipcache_hi_bits``.

    Args:
        config: any object with (some of) ``zipcache_hi_bits``, ``zipcache_lo_bits``, ``zipcache_hi_fraction``,
            ``zipcache_group_size`` and ``zipcache_quantize_values``, such as :class:`kvant.KVCacheConfig`.

    Raises:
        kvant.QuantizerConfigError: a field outside its range.

    The ``*_bytes`` properties are the reference's own arithmetic (a trim does not lower them); ``nbytes`` is what is
    held.

    Reference: ``ZipCacheKVCache``.
    """

    _core_class = _core.ZipCacheKVCache

    @property
    def baseline_key_bytes(self) -> int:
        """The reference's price of the keys with every token at ``zipcache_lo_bits``, in bytes."""
        return self._core.baseline_key_bytes

    @property
    def baseline_value_bytes(self) -> int:
        """The reference's price of the values with every token at ``zipcache_lo_bits``, in bytes."""
        return self._core.baseline_value_bytes

    @property
    def compression_ratio(self) -> float:
        """``fp16_key_bytes / compressed_key_bytes``; 1.0 before the first token."""
        return self._core.compression_ratio

    @property
    def effective_avg_bits(self) -> float:
        """``16 * compressed_key_bytes / fp16_key_bytes``; ``zipcache_hi_bits`` before the first token."""
        return self._core.effective_avg_bits


__all__ = [
    "ZipCacheKVCache",
    "ZipCacheState",
    "base_only_bytes",
    "channel_dequant",
    "channel_quant",
    "saliency_mask",
    "token_key_norms",
    "zipcache_bytes",
    "zipcache_compress",
    "zipcache_quant_dequant",
    "zipcache_reconstruct",
]
