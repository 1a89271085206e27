"""Kitty: keys per channel in two widths, the channels with the largest variance in the wider one.

The names, arguments, defaults and results of ``veloxquant_mlx.quantizers.kitty`` and
``veloxquant_mlx.cache.kitty_cache``. Arrays may be NumPy's, mlx's or torch's (f16, bf16, f32, any strides); results are
new arrays of the same framework. Every function raises :class:`kvant.Error` (a ``ValueError``) for a shape, an element
type or a number outside its range, and works on the CPU without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _core
from ._arrays import read, read_floats
from .cache import ReferenceCache


def rank_channels_by_sensitivity(keys: Any, hi_fraction: float = 0.25) -> tuple[list[int], list[int]]:
    """Channels split by the variance of their values over the tokens.

    Args:
        keys: ``[S, D]``.
        hi_fraction: share of hi channels; ``max(1, trunc(D * hi_fraction))`` of them, ties to the lower index.

    Returns:
        ``(hi, lo)``: ascending lists of channel indices.

    Reference: ``rank_channels_by_sensitivity``.
    """
    return _core.rank_channels_by_sensitivity(read_floats(keys, "keys", 2).view, hi_fraction)


def quantize_mixed_channels(
    keys: Any,
    hi_indices: Sequence[int],
    lo_indices: Sequence[int],
    hi_bit: int = 4,
    lo_bit: int = 2,
    group_size: int = 32,
) -> Any:
    """Keys as two widths hold them.

    Args:
        keys: ``[S, D]``.
        hi_indices: channels with ``hi_bit`` bits; negative ones count from the end.
        lo_indices: channels with ``lo_bit`` bits; a channel in both lists is one of these, one in neither is kept.
        hi_bit: 1..8.
        lo_bit: 1..8.
        group_size: tokens that share a minimum and a step.

    Returns:
        ``[S, D]`` f16.

    Raises:
        kvant.OutOfRangeError: a channel beyond D (also an ``IndexError``).

    Reference: ``quantize_mixed_channels``.
    """
    k = read_floats(keys, "keys", 2)
    out = k.empty(k.shape, "f16")
    hi, lo = [int(i) for i in hi_indices], [int(i) for i in lo_indices]
    _core.quantize_mixed_channels(k.view, hi, lo, out.target, hi_bit, lo_bit, group_size)
    return out.array


def compute_running_variance(key_sum: Any, key_sq_sum: Any, n: int) -> Any:
    """Variance per channel from running sums: ``max(key_sq_sum / n - (key_sum / n)^2, 0)``.

    Args:
        key_sum: ``[D]``, the sum of n keys.
        key_sq_sum: ``[D]``, the sum of their squares.
        n: tokens in the sums.

    Returns:
        ``[D]`` f32; zeros for n < 2.

    Reference: ``compute_running_variance``.
    """
    total = read_floats(key_sum, "key_sum", 1)
    squares = read_floats(key_sq_sum, "key_sq_sum", 1)
    out = total.empty(total.shape, "f32")
    _core.compute_running_variance(total.view, squares.view, n, out.target)
    return out.array


def hi_mask_from_variance_batched(variance: Any, hi_fraction: float) -> Any:
    """The split of :func:`rank_channels_by_sensitivity` for rows of variances.

    Args:
        variance: ``[N, D]``; NaN ranks last.
        hi_fraction: share of hi channels.

    Returns:
        ``[N, D]`` bool, True for hi channels.

    Reference: ``hi_mask_from_variance_batched``.
    """
    v = read_floats(variance, "variance", 2)
    out = v.empty(v.shape, "bool")
    _core.hi_mask_from_variance_batched(v.view, hi_fraction, out.target)
    return out.array


def quantize_mixed_channels_batched(
    keys: Any, hi_mask: Any, hi_bit: int = 4, lo_bit: int = 2, group_size: int = 32
) -> Any:
    """:func:`quantize_mixed_channels` for N matrices with a split of their own each.

    Args:
        keys: ``[N, S, D]``.
        hi_mask: ``[N, D]`` bool.
        hi_bit: 1..8.
        lo_bit: 1..8.
        group_size: tokens that share a minimum and a step.

    Returns:
        ``[N, S, D]`` f16.

    Reference: ``quantize_mixed_channels_batched``.
    """
    k = read_floats(keys, "keys", 3)
    mask = read(hi_mask, "hi_mask", 2)
    out = k.empty(k.shape, "f16")
    _core.quantize_mixed_channels_batched(k.view, mask.view, out.target, hi_bit, lo_bit, group_size)
    return out.array


class KittyKVCache(ReferenceCache):
    """Kitty's cache: keys packed in two widths, values as they came.

    Args:
        config: any object with (some of) ``head_dim``, ``kitty_hi_fraction``, ``kitty_hi_bit``, ``kitty_lo_bit`` and
            ``kitty_group_size``, such as :class:`kvant.KVCacheConfig`.

    Raises:
        kvant.QuantizerConfigError: a field outside its range.

    Channels are ranked by the first call's variance, later by running statistics of the reconstructed keys. The
    ``*_bytes`` properties are the reference's own arithmetic; ``nbytes`` is what is held.

    Reference: ``KittyKVCache``.
    """

    _core_class = _core.KittyKVCache

    @property
    def value_fp16_bytes(self) -> int:
        """What the reference charges for the values, in bytes (with the keys' head size)."""
        return self._core.value_fp16_bytes

    @property
    def assigned_avg_bits(self) -> float:
        """Mean bits of a key code, without parameters."""
        return self._core.assigned_avg_bits

    @property
    def hi_fraction(self) -> float:
        """Configured share of hi channels."""
        return self._core.hi_fraction

    @property
    def hi_bit(self) -> int:
        """Configured bits of hi channels."""
        return self._core.hi_bit

    @property
    def lo_bit(self) -> int:
        """Configured bits of lo channels."""
        return self._core.lo_bit

    @property
    def group_size(self) -> int:
        """Configured tokens of a group."""
        return self._core.group_size

    @classmethod
    def merge(cls, caches: Sequence[KittyKVCache]) -> Any:
        """A plain, uncompressed ``mlx_lm`` batch cache of the decoded rows, as the reference's inherited ``merge``.

        A server that batches requests calls this: what it then holds is no longer packed. The two other caches have no
        such attribute, so that they are served one by one.
        """
        from mlx_lm.models.cache import KVCache

        plain = []
        for cache in caches:
            copy = KVCache()
            keys, values = cache.keys_and_values()
            if keys is not None:
                copy.state = (keys, values, cache.offset)
            plain.append(copy)
        return KVCache.merge(plain)


__all__ = [
    "KittyKVCache",
    "compute_running_variance",
    "hi_mask_from_variance_batched",
    "quantize_mixed_channels",
    "quantize_mixed_channels_batched",
    "rank_channels_by_sensitivity",
]
