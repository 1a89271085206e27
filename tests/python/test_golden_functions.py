"""Every recorded function call, through Python.

"close" cases are compared by bits: kvant sums in the reference's order.
"""

import importlib

import golden
import kvant
import numpy as np
import pytest
from bits import assert_bits

# Quirks that kvant refuses with a typed error instead of repeating them; listed in the methods' READMEs as well.
REFUSED = {
    "_quant_utils._group_quant_dequant/37": "0 bits",
    "_quant_utils._group_quant_dequant/39": "9 bits",
    "_quant_utils._group_quant_dequant/40": "16 bits",
    "zipcache.channel_quant/12": "9 bits",
    "kitty.rank_channels_by_sensitivity/17": "NaN",
    "kvquant.split_dense_sparse/19": "NaN",
    "kvquant.fit_nuq_levels/16": "0 bits",
    "kvquant.fit_nuq_levels_batched/16": "0 bits",
    "kvquant.fit_nuq_levels/18": "NaN",
    "kvquant.fit_nuq_levels_batched/18": "NaN",
    "kvquant.fit_nuq_levels/19": "infinity",
    "kvquant.fit_nuq_levels_batched/19": "infinity",
}

CASES = [case for case in golden.cases() if "function" in case]


def argument(value, file):
    value = golden.number(value)
    if isinstance(value, dict) and "tensor" in value:
        return golden.tensors(file)[value["tensor"]]
    if isinstance(value, dict) and "fields" in value:
        return kvant.zipcache.ZipCacheState(**{name: argument(field, file) for name, field in value["fields"].items()})
    if isinstance(value, dict) and "value" in value:
        return golden.number(value["value"])
    return value


def call(case):
    module = importlib.import_module("kvant." + case["module"].rsplit(".", 1)[1])
    arguments = {name: argument(value, case["file"]) for name, value in case["args"].items()}
    return getattr(module, case["function"])(**arguments)


def assert_same(got, want, file, what):
    if "tensor" in want:
        assert_bits(got, golden.tensors(file)[want["tensor"]], what, want["compare"].get("signed_zero", True))
    elif want.get("compare", {}).get("kind") == "close":
        assert got == pytest.approx(want["value"], rel=want["compare"]["rtol"], abs=want["compare"]["atol"])
    else:
        expected = golden.number(want["value"])
        assert got == expected, what
        assert type(got) is type(expected), what


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_function(case):
    if case["kind"] == "error" or case["id"] in REFUSED:
        with pytest.raises(kvant.Error):
            call(case)
        return
    got = call(case)
    returns = case["returns"]
    if isinstance(returns, dict):
        assert list(got._fields) == list(returns)
        pairs = [(getattr(got, name), want, name) for name, want in returns.items()]
    else:
        results = got if len(returns) > 1 else [got]
        assert len(results) == len(returns)
        pairs = [(result, want, str(i)) for i, (result, want) in enumerate(zip(results, returns))]
    for result, want, name in pairs:
        assert_same(result, want, case["file"], name)


def test_every_exception_is_used():
    known = {case["id"] for case in CASES}
    assert REFUSED.keys() <= known
    assert all(golden.group_of(case) == "quirk" for case in CASES if case["id"] in REFUSED)


def test_results_are_new_numpy_arrays():
    x = np.zeros((4, 2), np.float16)
    got = kvant.group_quant.group_quant_dequant(x, 2)
    assert type(got) is np.ndarray and got.flags.writeable and not np.shares_memory(got, x)
