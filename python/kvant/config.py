"""``KVCacheConfig``: the settings of the caches, with the reference package's field names and defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import _core


@dataclasses.dataclass
class KittyOptions:
    """Kitty's fields of ``KVCacheConfig``, for its ``options`` argument."""

    kitty_hi_fraction: float = 0.25
    kitty_hi_bit: int = 4
    kitty_lo_bit: int = 2
    kitty_group_size: int = 32


@dataclasses.dataclass
class KVQuantOptions:
    """KVQuant's fields of ``KVCacheConfig``, for its ``options`` argument."""

    kvquant_bits: int = 3
    kvquant_outlier_fraction: float = 0.01
    kvquant_group_size: int = 32
    kvquant_lloyd_iters: int = 8
    kvquant_refit_interval: int = 0
    kvquant_n_sink: int = 1


@dataclasses.dataclass
class ZipCacheOptions:
    """ZipCache's fields of ``KVCacheConfig``, for its ``options`` argument."""

    zipcache_hi_bits: int = 4
    zipcache_lo_bits: int = 2
    zipcache_hi_fraction: float = 0.20
    zipcache_group_size: int = 32
    zipcache_quantize_values: bool = True


@dataclasses.dataclass(init=False)
class KVCacheConfig:
    """Settings of one cache (``veloxquant_mlx.KVCacheConfig`` with the fields of the three methods).

    Args:
        method: ``"kitty"``, ``"kvquant"`` or ``"zipcache"`` for :func:`kvant.make_cache`. A class such as
            ``KittyKVCache(config)`` reads its own fields and not this one. The default is the reference's, which kvant
            does not have.
        head_dim: channels of a head; only Kitty reads it, for ``assigned_avg_bits`` and the counters of ``trim``.
        options: ``KittyOptions``, ``KVQuantOptions`` or ``ZipCacheOptions``. A field named in the call beats it.
        kitty_hi_fraction: share of channels with ``kitty_hi_bit`` bits, 0..1; at least one channel.
        kitty_hi_bit: bits of the channels with the largest variance, 1..8.
        kitty_lo_bit: bits of the other channels, 1..8.
        kitty_group_size: tokens that share a minimum and a step, at least 1.
        kvquant_bits: bits of a code, 1..8; 2^bits levels.
        kvquant_outlier_fraction: share of the values of a channel (keys) or token (values) kept exact.
        kvquant_group_size: reserved, as in the reference.
        kvquant_lloyd_iters: sweeps of the level fit; at least one is made.
        kvquant_refit_interval: tokens between two fits of the key levels; 0: the first fit stays.
        kvquant_n_sink: first tokens kept exact, at least 0.
        zipcache_hi_bits: bits of salient tokens, and of values, 1..8.
        zipcache_lo_bits: bits of the other tokens, 1..8.
        zipcache_hi_fraction: share of salient tokens, 0..1.
        zipcache_group_size: tokens that share a minimum and a step, at least 1.
        zipcache_quantize_values: False leaves values as they are.

    The fields are checked when a cache is made from them (:class:`kvant.QuantizerConfigError`).
    """

    method: str = "turboquant_rvq"
    head_dim: int = 128
    kitty_hi_fraction: float = 0.25
    kitty_hi_bit: int = 4
    kitty_lo_bit: int = 2
    kitty_group_size: int = 32
    kvquant_bits: int = 3
    kvquant_outlier_fraction: float = 0.01
    kvquant_group_size: int = 32
    kvquant_lloyd_iters: int = 8
    kvquant_refit_interval: int = 0
    kvquant_n_sink: int = 1
    zipcache_hi_bits: int = 4
    zipcache_lo_bits: int = 2
    zipcache_hi_fraction: float = 0.20
    zipcache_group_size: int = 32
    zipcache_quantize_values: bool = True

    def __init__(
        self,
        method: str = "turboquant_rvq",
        head_dim: int = 128,
        *,
        options: KittyOptions | KVQuantOptions | ZipCacheOptions | None = None,
        **fields: Any,
    ) -> None:
        self.method = method
        self.head_dim = head_dim
        names = [field.name for field in dataclasses.fields(self)][2:]
        unknown = [name for name in fields if name not in names]
        if unknown:
            raise TypeError(f"KVCacheConfig has no field {unknown[0]!r}; fields: method, head_dim, {', '.join(names)}")
        for field in dataclasses.fields(self)[2:]:
            given = getattr(options, field.name, field.default)
            setattr(self, field.name, fields.get(field.name, given))


_CASTS = {"int": int, "float": float, "bool": bool, "str": str}


def to_core(config: Any) -> _core.Config:
    """The library's form of any object with (some of) the fields of :class:`KVCacheConfig`.

    Fields that the object lacks have their defaults, and numbers are converted with ``int()`` and ``float()``, as the
    reference's caches do.
    """
    result = _core.Config()
    for field in dataclasses.fields(KVCacheConfig):
        value = getattr(config, field.name, field.default)
        setattr(result, field.name, _CASTS[str(field.type)](value))
    return result
