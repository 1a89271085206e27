"""Bad arguments: typed errors that name the argument, and objects that are unchanged afterwards."""

import kvant
import numpy as np
import pytest
from bits import assert_bits
from kvant import group_quant, kitty, kvquant, zipcache
from random_arrays_numpy import make

X = make(1, (20, 6), "f16", "normal")
CACHES = [kvant.KittyKVCache, kvant.KVQuantKVCache, kvant.ZipCacheKVCache]


def levels(n=4):
    return np.sort(make(2, (n, 6), "f32", "normal"), axis=0)


CALLS = {
    "bits": lambda: group_quant.group_quant_dequant(X, 0),
    "bits, too many": lambda: group_quant.group_quant_codes(X, 9),
    "group_size": lambda: group_quant.group_quant_codes(X, 2, 0),
    "n": lambda: group_quant.group_dequant_codes(*group_quant.group_quant_codes(X, 2), 33),
    "hi_fraction": lambda: kitty.rank_channels_by_sensitivity(X, float("nan")),
    "hi_mask": lambda: kitty.quantize_mixed_channels_batched(X[None], np.zeros((1, 5), bool)),
    "hi_mask, type": lambda: kitty.quantize_mixed_channels_batched(X[None], np.zeros((1, 6), np.int32)),
    "key_sq_sum": lambda: kitty.compute_running_variance(X[0], X[0, :5], 3),
    "saliency_mask": lambda: zipcache.saliency_mask(X[:, 0], float("nan")),
    "zipcache bits": lambda: zipcache.zipcache_compress(X, 12, 2),
    "zipcache group": lambda: zipcache.base_only_bytes(3, 4, 2, 0),
    "scales": lambda: zipcache.channel_dequant(np.zeros((20, 6), np.uint8), levels(2), levels(1)),
    "codes": lambda: zipcache.channel_dequant(np.full((20, 6), 300, np.int32), levels(1), levels(1)),
    "codes, fractions": lambda: zipcache.channel_dequant(np.full((20, 6), 0.5, np.float32), levels(1), levels(1)),
    "state": lambda: zipcache.zipcache_reconstruct(zipcache.zipcache_compress(X)._replace(seq_len=19)),
    "state codes": lambda: zipcache.zipcache_reconstruct(
        zipcache.zipcache_compress(X)._replace(hi_codes=np.zeros((1, 6), np.uint8))
    ),
    "outlier_fraction": lambda: kvquant.split_dense_sparse(X, float("nan")),
    "kvquant bits": lambda: kvquant.fit_nuq_levels(X, 0),
    "no rows": lambda: kvquant.fit_nuq_levels(X[:0], 2),
    "levels": lambda: kvquant.quantize_nuq(X, levels()[:, :5]),
    "NaN": lambda: kvquant.nuq_quant_dequant(np.full((4, 4), np.nan, np.float32), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_function(name):
    with pytest.raises(kvant.Error) as caught:
        CALLS[name]()
    assert isinstance(caught.value, ValueError)
    assert caught.value.code in ("invalid_argument", "out_of_range", "not_finite", "unsupported")
    assert len(str(caught.value)) > 10


@pytest.mark.parametrize("channel", [6, -7])
def test_index_out_of_range(channel):
    with pytest.raises(IndexError) as caught:
        kitty.quantize_mixed_channels(X, [channel], [0])
    assert isinstance(caught.value, kvant.OutOfRangeError) and caught.value.code == "out_of_range"
    with pytest.raises(kvant.OutOfRangeError):
        kvquant.dequant_nuq(np.full((3, 6), 4, np.int32), levels(4))


def block(tokens, batch=2, heads=3, dim=8, dtype="f16", seed=0):
    return make(seed, (batch, heads, tokens, dim), dtype, "normal")


BAD_UPDATES = {
    "batch": lambda: (block(4, batch=1), block(4, batch=1)),
    "heads": lambda: (block(4, heads=2), block(4, heads=2)),
    "channels": lambda: (block(4, dim=6), block(4, dim=6)),
    "tokens": lambda: (block(4), block(5)),
    "batch of values": lambda: (block(4), block(4, batch=1)),
    "axes": lambda: (block(4)[0], block(4)[0]),
    "type": lambda: (block(4).astype(np.float64), block(4)),
}


@pytest.mark.parametrize("cls", CACHES)
@pytest.mark.parametrize("name", BAD_UPDATES)
def test_refused_update_changes_nothing(cls, name):
    cache, other = cls(kvant.KVCacheConfig()), cls(kvant.KVCacheConfig())
    for c in (cache, other):
        c.update_and_fetch(block(40), block(40, seed=1))
    with pytest.raises(kvant.Error):
        cache.update_and_fetch(*BAD_UPDATES[name]())
    assert (cache.offset, cache.nbytes, cache.compressed_key_bytes) == (40, other.nbytes, other.compressed_key_bytes)
    for got, want in zip(
        cache.update_and_fetch(block(5), block(5)), other.update_and_fetch(block(5), block(5)), strict=True
    ):
        assert_bits(got, want)


@pytest.mark.parametrize("cls", CACHES)
def test_refused_first_update_leaves_an_empty_cache(cls):
    cache = cls(kvant.KVCacheConfig())
    with pytest.raises(kvant.Error):
        cache.update_and_fetch(block(4), block(5))
    assert cache.empty() and cache.offset == 0 and cache.keys_and_values() == (None, None)
    cache.update_and_fetch(block(4, batch=1), block(4, batch=1))
    assert cache.offset == 4


@pytest.mark.parametrize("cls", CACHES)
def test_trim(cls):
    cache = cls(kvant.KVCacheConfig())
    assert cache.trim(3) == 0
    cache.update_and_fetch(block(10), block(10))
    with pytest.raises(kvant.Error, match="-1"):
        cache.trim(-1)
    assert cache.trim(4) == 4
    assert cache.trim(40) == 6
    assert cache.offset == 0 and not cache.empty() and cache.is_trimmable()


@pytest.mark.parametrize("cls", CACHES)
def test_attend(cls):
    cache = cls(kvant.KVCacheConfig())
    with pytest.raises(kvant.Error):
        cache.attend(block(1))
    cache.update_and_fetch(block(10), block(10))
    for queries in (block(1, dim=6), block(1, heads=4), block(1, batch=1), block(1)[0]):
        with pytest.raises(kvant.Error):
            cache.attend(queries)


def test_kvquant_refuses_what_no_level_can_be_fit_to():
    cache = kvant.KVQuantKVCache(kvant.KVCacheConfig())
    bad = block(20)
    bad[0, 0, 3, 1] = np.inf
    with pytest.raises(kvant.Error) as caught:
        cache.update_and_fetch(bad, block(20))
    assert caught.value.code == "not_finite" and cache.empty()


def test_kvquant_needs_values_of_the_keys_size():
    with pytest.raises(kvant.Error):
        kvant.KVQuantKVCache(kvant.KVCacheConfig()).update_and_fetch(block(20), block(20, dim=4))


def test_kvquant_needs_values_of_the_keys_type():
    with pytest.raises(kvant.Error, match="f32"):
        kvant.KVQuantKVCache(kvant.KVCacheConfig()).update_and_fetch(block(20), block(20, dtype="f32"))
