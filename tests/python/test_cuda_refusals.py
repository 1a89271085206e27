"""kvant.cuda where nothing runs on a device: what needs none, and what is refused. Needs neither torch nor a GPU."""

import kvant
import pytest

kc = pytest.importorskip("kvant.cuda", reason="this build of kvant has no CUDA library")

SHAPE = {"kv_heads": 8, "key_dim": 128, "value_dim": 128, "dtype": "f16"}


def pool(recipe="kivi:k=2,v=2", **changes):
    return kc.PagePool(recipe, **(SHAPE | changes), pages=1, exact_pages=1)


@pytest.mark.parametrize("bits", [2, 4])
def test_page_bytes(bits):
    """Codes, and a scale and a zero point of 16 bits for every 128 values."""
    values = 8 * 2 * 128 * 128
    assert kc.page_bytes(f"kivi:k={bits},v={bits}", **SHAPE) == values * bits // 8 + values // 128 * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [({"recipe": "kivi:k=9"}, "9"), ({"key_dim": 80}, "80"), ({"kv_heads": 0}, "kv_heads"), ({"dtype": "f32"}, "bf16")],
)
@pytest.mark.parametrize("call", [kc.page_bytes, pool])
def test_refusals_name_what_is_wrong(call, change, named):
    arguments = {"recipe": "kivi:k=2,v=2"} | SHAPE | change
    with pytest.raises(kvant.Error, match=named):
        call(arguments.pop("recipe"), **arguments)


@pytest.mark.skipif(kc.is_available(), reason="there is a device")
def test_without_a_device():
    for call in (kc.device_name, pool):
        with pytest.raises(kvant.Error, match="CUDA") as refused:
            call()
        assert refused.value.code == "unsupported"
