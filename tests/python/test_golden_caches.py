"""Every recorded history of a cache, and every recorded construction."""

import golden
import kvant
import numpy as np
import pytest
from bits import assert_bits

# Quirks refused with a typed error: case -> step at which it is refused.
REFUSED = {
    "kitty_cache/27": "trim",  # a negative trim
    "kvquant_cache/44": "trim",
    "zipcache_cache/23": "trim",
    "kvquant_cache/46": "update_and_fetch",  # NaN and infinity
}
# Constructions that the reference accepts and kvant refuses.
REFUSED_CONFIG = {"construct/497", "construct/499", "construct/500", "construct/504"}

CASES = [case for case in golden.cases() if case["kind"] == "cache"]
CONSTRUCTIONS = [case for case in golden.cases() if case["id"].startswith("construct/")]


def config_of(case):
    return kvant.KVCacheConfig(**{name: golden.number(value) for name, value in case["config"].items()})


def check_properties(cache, want):
    for name, value in want.items():
        got = getattr(cache, name)
        assert (got, type(got)) == (golden.number(value), type(golden.number(value))), name


def check_state(cache, step, stored):
    for name, want in step.get("state", {}).items():
        got = getattr(cache, name)
        if want is None:
            assert got is None, name
            continue
        if name == "value_levels":
            assert isinstance(got, list) and len(got) == step["value_levels_is_list_of"]
            got = got[0]
        assert_bits(got, stored[want["tensor"]], name)


def check_rows(got, want, stored, before, what):
    first, last = want["token_range"]
    assert got.shape[2] == last
    assert_bits(got[:, :, first:last], stored[want["tensor"]], what)
    if before is not None:
        assert_bits(got[:, :, :first], before[:, :, :first], what + " of earlier calls")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_history(case):
    stored = golden.tensors(case["file"])
    cache = getattr(kvant, case["class"])(config_of(case))
    check_properties(cache, case["constant_properties"])
    check_properties(cache, case["initial_properties"])
    assert hasattr(cache, "merge") == case["has_merge"]
    assert hasattr(cache, "bits") == case["has_bits"]
    keys = values = None
    for step in case["steps"]:
        refused = "raises" in step or REFUSED.get(case["id"]) == step["op"]
        if step["op"] == "trim":
            if refused:
                with pytest.raises(kvant.Error):
                    cache.trim(step["n"])
                return
            assert cache.trim(step["n"]) == step["returns"]
        else:
            new = [stored[step["inputs"][name]] for name in ("keys", "values")]
            if refused:
                with pytest.raises(kvant.Error):
                    cache.update_and_fetch(*new)
                return
            got_keys, got_values = cache.update_and_fetch(*new)
            check_rows(got_keys, step["outputs"]["keys"], stored, keys, "keys")
            check_rows(got_values, step["outputs"]["values"], stored, values, "values")
            keys, values = got_keys, got_values
        assert cache.offset == step["offset"]
        check_properties(cache, step["properties"])
        check_state(cache, step, stored)


@pytest.mark.parametrize("case", CONSTRUCTIONS, ids=[case["id"] for case in CONSTRUCTIONS])
def test_construction(case):
    def construct():
        config = config_of(case)
        return getattr(kvant, case["class"])(config) if case["class"] else kvant.make_cache(config)

    if case["kind"] == "error" or case["id"] in REFUSED_CONFIG:
        with pytest.raises(kvant.QuantizerConfigError) as caught:
            construct()
        for name in case.get("names", []):
            assert name in str(caught.value)
    else:
        construct()


def test_merge_is_hidden_where_the_reference_hides_it():
    for cls in (kvant.KVQuantKVCache, kvant.ZipCacheKVCache):
        with pytest.raises(AttributeError, match="merge"):
            _ = cls(kvant.KVCacheConfig()).merge
    assert hasattr(kvant.KittyKVCache(kvant.KVCacheConfig()), "merge")


def test_every_exception_is_used():
    known = {case["id"]: case for case in golden.cases()}
    for name in [*REFUSED, *REFUSED_CONFIG]:
        assert golden.group_of(known[name]) == "quirk"


def test_rows_are_new_arrays():
    cache = kvant.ZipCacheKVCache(kvant.KVCacheConfig())
    x = np.ones((1, 1, 2, 4), np.float16)
    first, _ = cache.update_and_fetch(x, x)
    first[:] = 7
    second, _ = cache.keys_and_values()
    assert (second == 1).all()
