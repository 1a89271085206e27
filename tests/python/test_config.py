"""KVCacheConfig, its checks, and how caches are made from it."""

import types

import kvant
import pytest

BAD = [
    ("kitty", "kitty_hi_fraction", 1.5),
    ("kitty", "kitty_hi_fraction", -0.2),
    ("kitty", "kitty_hi_fraction", float("nan")),
    ("kitty", "kitty_hi_bit", 0),
    ("kitty", "kitty_lo_bit", 9),
    ("kitty", "kitty_group_size", 0),
    ("kvquant", "kvquant_n_sink", -1),
    ("kvquant", "kvquant_bits", 0),
    ("kvquant", "kvquant_bits", 9),
    ("kvquant", "kvquant_outlier_fraction", float("nan")),
    ("zipcache", "zipcache_hi_fraction", 1.5),
    ("zipcache", "zipcache_hi_fraction", float("nan")),
    ("zipcache", "zipcache_hi_bits", 0),
    ("zipcache", "zipcache_lo_bits", 9),
    ("zipcache", "zipcache_group_size", -3),
]


@pytest.mark.parametrize(("method", "field", "value"), BAD)
def test_bad_field(method, field, value):
    with pytest.raises(kvant.QuantizerConfigError, match=field) as caught:
        kvant.make_cache(kvant.KVCacheConfig(method=method, **{field: value}))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, kvant.Error)


def test_fields_of_other_methods_are_not_looked_at():
    kvant.KittyKVCache(kvant.KVCacheConfig(zipcache_hi_bits=0, kvquant_n_sink=-1))


def test_unknown_method_lists_the_choices():
    with pytest.raises(kvant.QuantizerConfigError, match="kitty, kvquant, zipcache"):
        kvant.make_cache(kvant.KVCacheConfig(method="nonesuch"))


def test_unknown_field():
    with pytest.raises(TypeError, match="kitty_hifraction"):
        kvant.KVCacheConfig(kitty_hifraction=0.5)


def test_a_named_field_beats_options_even_at_its_default():
    options = kvant.KittyOptions(kitty_hi_fraction=0.5, kitty_hi_bit=8)
    config = kvant.KVCacheConfig(method="kitty", options=options, kitty_hi_bit=4)
    assert (config.kitty_hi_fraction, config.kitty_hi_bit, config.kitty_lo_bit) == (0.5, 4, 2)


def test_any_object_with_the_fields_will_do():
    """The reference's caches read their fields with getattr, int() and float()."""
    cache = kvant.KittyKVCache(types.SimpleNamespace(kitty_hi_fraction="0.5", kitty_hi_bit=3.0))
    assert (cache.hi_fraction, cache.hi_bit, cache.lo_bit, cache.group_size) == (0.5, 3, 2, 32)
    with pytest.raises((ValueError, TypeError)):
        kvant.KittyKVCache(types.SimpleNamespace(kitty_hi_fraction="half"))


def test_config_is_a_dataclass():
    assert kvant.KVCacheConfig(method="kitty") == kvant.KVCacheConfig("kitty")
    assert "kitty_hi_fraction=0.25" in repr(kvant.KVCacheConfig())


def test_changing_the_config_later_does_not_change_the_cache():
    config = kvant.KVCacheConfig(method="kitty")
    cache = kvant.KittyKVCache(config)
    config.kitty_hi_bit = 8
    assert cache.hi_bit == 4
