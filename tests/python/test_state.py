"""Copies, pickles and saved states of the caches go on to the bit; bytes that are not a state are typed errors."""

import copy
import pickle

import kvant
import numpy as np
import pytest
from bits import assert_bits
from random_arrays_numpy import make
from test_side_by_side_caches import COUNTERS

CACHES = [kvant.KittyKVCache, kvant.KVQuantKVCache, kvant.ZipCacheKVCache]
METHODS = {kvant.KittyKVCache: "kitty", kvant.KVQuantKVCache: "kvquant", kvant.ZipCacheKVCache: "zipcache"}
# Sizes of calls; a negative one trims. Packed blocks, rows, cut blocks, KVQuant's pending keys and closed runs.
HISTORIES = {
    "empty": [],
    "one block": [70],
    "block and rows": [70, 1, 1, 1],
    "cut block": [70, 33, -20],
    "cut to nothing": [40, -40],
    "pending": [1, 1, 1],
    "pages": [150, 1, 60, 1, -3],
}
OPERATIONS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "from_state": lambda cache: type(cache).from_state(cache.state),
    "state setter": lambda cache: with_state(type(cache)(kvant.KVCacheConfig()), cache.state),
}
FIELDS = {"kvquant_refit_interval": 7, "kitty_hi_fraction": 0.3, "zipcache_hi_fraction": 0.3, "kvquant_n_sink": 2}


def with_state(cache, state):
    cache.update_and_fetch(block(5, dim=4), block(5, dim=4))  # is forgotten
    cache.state = state
    return cache


def block(tokens, seed=0, dtype="f16", dim=24):
    return make(seed, (2, 3, tokens, dim), dtype, "normal")


def drive(cache, history, dtype, seed=0):
    for step, count in enumerate(history):
        if count < 0:
            assert cache.trim(-count) == -count
        else:
            cache.update_and_fetch(block(count, seed + step, dtype), block(count, seed + 100 + step, dtype))
    return cache


def assert_same(got, want):
    assert (got.offset, got.empty(), got.nbytes > 0) == (want.offset, want.empty(), True)
    for name in COUNTERS[METHODS[type(want)]].split():
        assert getattr(got, name) == getattr(want, name), name
    for a, b in zip(got.keys_and_values(), want.keys_and_values(), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_bits(a, b)


@pytest.mark.parametrize("cls", CACHES)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_goes_on_to_the_bit(cls, history, operation, dtype):
    cache = drive(cls(kvant.KVCacheConfig(head_dim=24, **FIELDS)), HISTORIES[history], dtype)
    other = OPERATIONS[operation](cache)
    assert type(other) is cls
    assert_same(other, cache)
    assert other.nbytes <= cache.nbytes  # the same tiles, no room for rows to come
    later = [1, 40, -15, 1, 1]
    before = cache.offset
    drive(other, later, dtype, seed=500)
    assert cache.offset == before  # the copy is a cache of its own
    drive(cache, later, dtype, seed=500)
    assert_same(other, cache)
    queries = block(2, 900, dtype)
    assert_bits(other.attend(queries), cache.attend(queries))


@pytest.mark.parametrize("cls", CACHES)
def test_a_copy_keeps_its_settings(cls):
    cache = drive(cls(kvant.KVCacheConfig(head_dim=24)), [40], "f16")
    cache.threads = 2
    assert copy.deepcopy(cache).threads == 2


@pytest.mark.parametrize("cls", CACHES)
def test_a_damaged_state_is_refused(cls):
    cache = drive(cls(kvant.KVCacheConfig(head_dim=24)), [70, 1], "f16")
    image, offset = cache.state
    image = np.array(image)
    other = CACHES[CACHES.index(cls) - 1]
    flipped = image.copy()
    flipped[len(image) // 2] ^= 4
    bad = {
        "damaged": (flipped, offset),
        "cut": (image[:-1], offset),
        "empty": (image[:0], 0),
        "offset": (image, offset + 1),
        "other bytes": (np.zeros(100, np.uint8), 0),
        "element type": (image.astype(np.int32), offset),
        "rows": (*cache.keys_and_values(), offset),
        "nothing": None,
    }
    target = drive(cls(kvant.KVCacheConfig(head_dim=24)), [9], "f16")
    for name, state in bad.items():
        with pytest.raises(kvant.Error) as caught:
            target.state = state
        assert name != "damaged" or caught.value.code == "bad_format"
        with pytest.raises(kvant.Error):
            cls.from_state(state)
    with pytest.raises(kvant.Error, match=METHODS[cls]):
        other.from_state((image, offset))
    assert_same(target, drive(cls(kvant.KVCacheConfig(head_dim=24)), [9], "f16"))
