"""Key-value caches of language models in 2 to 4 bits: Kitty, KVQuant and ZipCache, bit for bit and stored packed."""

from __future__ import annotations

from typing import Any

from . import group_quant, kitty, kvquant, zipcache
from ._core import active_kernel, force_kernel, kernel_names
from ._core import version as _version
from .cache import ReferenceCache
from .config import KittyOptions, KVCacheConfig, KVQuantOptions, ZipCacheOptions
from .errors import Error, OutOfRangeError, QuantizerConfigError
from .kitty import KittyKVCache
from .kvquant import KVQuantKVCache
from .zipcache import ZipCacheKVCache

__version__ = _version()

_CACHES: dict[str, type[ReferenceCache]] = {
    "kitty": KittyKVCache,
    "kvquant": KVQuantKVCache,
    "zipcache": ZipCacheKVCache,
}


def make_cache(config: Any) -> ReferenceCache:
    """The cache that ``config.method`` names (the reference's ``KVCacheFactory.create``).

    Raises:
        kvant.QuantizerConfigError: another method, or a field outside its range.
    """
    if config.method not in _CACHES:
        raise QuantizerConfigError(f"unknown method {config.method!r}; choices: {', '.join(_CACHES)}")
    return _CACHES[config.method](config)


def register_with_mlx_lm() -> None:
    """Lets ``mlx_lm.models.cache.load_prompt_cache`` find kvant's caches, which it looks up by name in its own module.

    ``save_prompt_cache`` needs no help. A class of that name that is there already and is not kvant's is an error.
    """
    from mlx_lm.models import cache as module

    for cls in _CACHES.values():
        if getattr(module, cls.__name__, cls) is not cls:
            raise Error(f"mlx_lm.models.cache.{cls.__name__} exists already")
        setattr(module, cls.__name__, cls)


__all__ = [
    "Error",
    "KVCacheConfig",
    "KVQuantKVCache",
    "KVQuantOptions",
    "KittyKVCache",
    "KittyOptions",
    "OutOfRangeError",
    "QuantizerConfigError",
    "ReferenceCache",
    "ZipCacheKVCache",
    "ZipCacheOptions",
    "active_kernel",
    "force_kernel",
    "group_quant",
    "kernel_names",
    "kitty",
    "kvquant",
    "make_cache",
    "register_with_mlx_lm",
    "zipcache",
]
