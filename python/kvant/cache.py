"""What the three caches share: the interface of ``mlx_lm``'s KV cache on top of packed tiles."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np

from . import _core
from ._arrays import Kind, default_kind, empty_pair, read, read_floats
from .config import to_core
from .errors import Error, QuantizerConfigError


class ReferenceCache:
    """Keys and values of one attention layer, held packed; the rows that come out are the reference's to the bit.

    Arrays are ``[batch, heads, tokens, channels]`` of f16, bf16 or f32, from NumPy, mlx or torch, with any strides; the
    first call fixes batch, heads, channels and element types. Works as a cache of an unmodified ``mlx_lm`` model.
    Calls from several threads are serialised; the GIL is released while they compute.

    Attributes:
        threads: threads that a call may use; 0: OpenMP's default.
    """

    _core_class: ClassVar[Any]

    def __init__(self, config: Any) -> None:
        try:
            core = self._core_class(to_core(config))
        except Error as error:
            raise QuantizerConfigError(f"{type(self).__name__}: {error}") from None
        self._begin(core, None)

    def _begin(self, core: Any, kinds: tuple[type[Kind], type[Kind]] | None) -> None:
        """Holds ``core``; rows go out in the frameworks ``kinds``, None: those of the next arguments."""
        self._core = core
        self._lock = threading.Lock()
        self._kinds = kinds
        # (batch, heads, key channels, value channels) and the element types, fixed by the first update.
        self._shape, self._dtypes = core.shape or (None, None)

    @property
    def offset(self) -> int:
        """Tokens stored."""
        return self._core.offset

    def size(self) -> int:
        """Tokens stored."""
        return self._core.offset

    def __len__(self) -> int:
        return self._core.offset

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are caches of their own that go on to the bit."""
        with self._lock:
            return _restore, (type(self), self._core.save(), self._kinds, self._core.threads)

    def __bool__(self) -> bool:
        return True  # mlx_lm asks `if cache` for "is there one"

    def empty(self) -> bool:
        """True until the first call of ``update_and_fetch`` (as the reference: a trim to nothing does not undo it)."""
        return self._shape is None

    @property
    def nbytes(self) -> int:
        """Bytes held, within 1 % of what the allocator gave: codes, endpoints, masks, kept rows and bookkeeping."""
        return self._core.key_nbytes + self._core.value_nbytes

    @property
    def key_nbytes(self) -> int:
        """The share of the keys in ``nbytes``."""
        return self._core.key_nbytes

    @property
    def value_nbytes(self) -> int:
        """The share of the values in ``nbytes``."""
        return self._core.value_nbytes

    @property
    def compressed_key_bytes(self) -> int:
        """What the reference charges for the keys, in bytes (fp16 parameters, call by call)."""
        return self._core.compressed_key_bytes

    @property
    def fp16_key_bytes(self) -> int:
        """Bytes of the keys in fp16."""
        return self._core.fp16_key_bytes

    @property
    def threads(self) -> int:
        return self._core.threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._core.threads = threads

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Stores new tokens and returns all of them.

        Args:
            keys: ``[B, H, S, D]``.
            values: ``[B, H, S, Dv]``.

        Returns:
            ``(keys [B, H, offset, D], values [B, H, offset, Dv])``: new arrays of the arguments' frameworks, in the
            element types of the first call. Earlier rows are what earlier calls returned.

        Raises:
            kvant.Error: shapes or types that do not fit each other or the first call; the cache is then unchanged.

        A call of one token is lossless in the reference (a group of one row is its own minimum), so such tokens are
        kept as rows here and cost what rows cost; see python/README.md for the remedy.
        """
        with self._lock:
            self._update(keys, values)
            return self._fetch()

    def update(self, keys: Any, values: Any) -> None:
        """``update_and_fetch`` without the rows, for those who go on with :meth:`attend`.

        Its cost does not grow with the tokens stored, while ``update_and_fetch`` decodes them all.
        """
        with self._lock:
            self._update(keys, values)

    def _update(self, keys: Any, values: Any) -> None:
        k = read_floats(keys, "keys", 4)
        v = read_floats(values, "values", 4)
        self._core.update(k.view, v.view)
        if self._shape is None:
            self._shape, self._dtypes = self._core.shape
        self._kinds = (k.kind, v.kind)

    def _fetch(self) -> tuple[Any, Any]:
        assert self._shape is not None and self._kinds is not None
        batch, heads, key_dim, value_dim = self._shape
        tokens = self._core.offset
        shapes = (batch, heads, tokens, key_dim), (batch, heads, tokens, value_dim)
        keys, values = empty_pair(self._kinds, shapes, self._dtypes)
        self._core.fetch(keys.target, values.target, 0)
        return keys.array, values.array

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last ``update_and_fetch`` returned, less what was trimmed since; ``(None, None)`` at first."""
        with self._lock:
            return (None, None) if self._shape is None else self._fetch()

    @property
    def state(self) -> tuple[Any, int]:
        """``(image, offset)``: the whole cache as an array of bytes, and the number of tokens.

        The image holds settings, packed tiles, rows, statistics and counters; setting it, here or in ``from_state``,
        gives a cache that goes on to the bit. It is an array of the framework of the last arguments (mlx where it is
        loaded before there are any), so that ``mlx_lm`` evaluates and saves it.
        """
        with self._lock:
            data = np.frombuffer(self._core.save(), np.uint8)
            offset = self._core.offset
            kind = self._kinds[0] if self._kinds is not None else default_kind()
        return kind.of_bytes(data), offset

    @state.setter
    def state(self, state: Any) -> None:
        core, kind = self._load(state)
        core.threads = self._core.threads
        with self._lock:
            self._core, self._kinds = core, (kind, kind)
            self._shape, self._dtypes = core.shape or (None, None)

    @classmethod
    def from_state(cls, state: Any) -> ReferenceCache:
        """The cache whose ``state`` this is, as ``mlx_lm.models.cache.load_prompt_cache`` makes it.

        Raises:
            kvant.Error: not the state of a cache of this class, or damaged bytes (``code`` is ``bad_format``).
        """
        core, kind = cls._load(state)
        cache = cls.__new__(cls)
        cache._begin(core, (kind, kind))
        return cache

    @classmethod
    def _load(cls, state: Any) -> tuple[Any, type[Kind]]:
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise Error(f"state: a {cls.__name__} is restored from (image, offset), as its `state` gives them")
        image = read(state[0], "image", 1)
        if image.dtype != "uint8":
            raise Error(f"image is an array of {image.dtype}, not of uint8")
        core = _core.load_cache(np.asarray(state[0]).tobytes())
        if not isinstance(core, cls._core_class):
            raise Error(f"state: this is the image of a {core.method} cache, not of a {cls.__name__}")
        if core.offset != state[1]:
            raise Error(f"state: the image holds {core.offset} tokens, not {state[1]}")
        return core, image.kind

    def attend(self, queries: Any, scale: float | None = None, causal: bool = True, threads: int = 0) -> Any:
        """Attention over the stored tokens, computed from the packed codes; no row is decoded to memory.

        Args:
            queries: ``[B, Hq, n, D]``, Hq a multiple of the cached heads; query head h reads head h // (Hq // H).
            scale: multiplies the scores; None: 1 / sqrt(D).
            causal: row i of n sees tokens up to ``offset - n + i``; False: every row sees every token.
            threads: threads for this call; 0: OpenMP's default.

        Returns:
            ``[B, Hq, n, Dv]`` in the queries' framework and element type: softmax(scale * q k^T) v.

        Raises:
            kvant.Error: shapes that do not fit the cache, or an empty cache.
        """
        q = read_floats(queries, "queries", 4)
        with self._lock:
            if self._shape is None:
                raise Error("attend: the cache is empty")
            out = q.empty((*q.shape[:3], self._shape[3]), q.dtype)
            self._core.attend(q.view, out.target, 0.0 if scale is None else scale, causal, threads)
        return out.array

    def is_trimmable(self) -> bool:
        """Always True."""
        return True

    def trim(self, n: int) -> int:
        """Drops the last ``min(n, offset)`` tokens and returns how many.

        Raises:
            kvant.Error: a negative n (the reference moves its offset past the data).
        """
        with self._lock:
            return self._core.trim(n)

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of a call with new tokens: ``mlx_lm.models.cache.create_attention_mask`` at this offset."""
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(*args, **{"offset": self.offset, **kwargs})


class TwoSidedCache(ReferenceCache):
    """What the caches that quantize keys and values have in common."""

    @property
    def merge(self) -> Any:
        """Hidden, as in the reference: a batching server must not replace this cache by a plain one."""
        raise AttributeError(f"{type(self).__name__} does not support merge()")

    @property
    def compressed_value_bytes(self) -> int:
        """What the reference charges for the values, in bytes; 0 when they are not quantized."""
        return self._core.compressed_value_bytes

    @property
    def fp16_value_bytes(self) -> int:
        """Bytes of the values in fp16."""
        return self._core.fp16_value_bytes


def _restore(cls: type[ReferenceCache], image: bytes, kinds: Any, threads: int) -> ReferenceCache:
    """Makes a copied or unpickled cache."""
    cache = cls.__new__(cls)
    cache._begin(_core.load_cache(image), kinds)
    cache.threads = threads
    return cache
