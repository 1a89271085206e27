"""Names, argument names, defaults and named tuples are the reference package's."""

import inspect

import pytest

pytest.importorskip("mlx.core", reason="pip install mlx-cpu mlx veloxquant-mlx")
pytest.importorskip("veloxquant_mlx", reason="pip install mlx-cpu mlx veloxquant-mlx")

import kvant
import kvant._quant_utils
from veloxquant_mlx.cache import kitty_cache, kvquant_cache, zipcache_cache
from veloxquant_mlx.cache.base import KVCacheConfig as TheirConfig
from veloxquant_mlx.quantizers import _quant_utils as ref_group
from veloxquant_mlx.quantizers import kitty as ref_kitty
from veloxquant_mlx.quantizers import kvquant as ref_kvquant
from veloxquant_mlx.quantizers import zipcache as ref_zipcache

MODULES = [
    (kvant.kitty, ref_kitty),
    (kvant.kvquant, ref_kvquant),
    (kvant.zipcache, ref_zipcache),
    (kvant._quant_utils, ref_group),
]
FUNCTIONS = [
    (ours, theirs, name)
    for ours, theirs in MODULES
    for name, value in inspect.getmembers(theirs, inspect.isfunction)
    if value.__module__ == theirs.__name__ and ("group" in name or theirs is not ref_group)
]
CLASSES = [
    (kvant.KittyKVCache, kitty_cache.KittyKVCache),
    (kvant.KVQuantKVCache, kvquant_cache.KVQuantKVCache),
    (kvant.ZipCacheKVCache, zipcache_cache.ZipCacheKVCache),
]


@pytest.mark.parametrize(("ours", "theirs", "name"), FUNCTIONS, ids=[name for *_, name in FUNCTIONS])
def test_signature(ours, theirs, name):
    got, want = inspect.signature(getattr(ours, name)), inspect.signature(getattr(theirs, name))
    assert [(p.name, p.default, p.kind) for p in got.parameters.values()] == [
        (p.name, p.default, p.kind) for p in want.parameters.values()
    ]
    assert getattr(ours, name).__doc__


def test_all_of_the_three_pages():
    assert len(FUNCTIONS) == 5 + 10 + 9 + 6


@pytest.mark.parametrize("name", ["kvquant.DenseSparse", "zipcache.ZipCacheState"])
def test_named_tuple(name):
    module, name = name.split(".")
    theirs = {"kvquant": ref_kvquant, "zipcache": ref_zipcache}[module]
    assert getattr(getattr(kvant, module), name)._fields == getattr(theirs, name)._fields


@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_properties(ours, theirs):
    public = {name for name, value in vars(theirs).items() if isinstance(value, property) and not name.startswith("_")}
    assert public - {name for name in dir(ours) if isinstance(inspect.getattr_static(ours, name), property)} <= {
        "merge"
    }
    assert all(inspect.getattr_static(ours, name).__doc__ for name in public)


@pytest.mark.parametrize("method", ["kitty", "kvquant", "zipcache"])
def test_config_fields_and_defaults(method):
    theirs, ours = TheirConfig(), kvant.KVCacheConfig()
    names = [name for name in vars(theirs) if name.startswith(method + "_")]
    assert names
    for name in [*names, "method", "head_dim"]:
        assert (getattr(ours, name), type(getattr(ours, name))) == (getattr(theirs, name), type(getattr(theirs, name)))
