"""Every function against the installed reference package, on random inputs and settings, bit for bit."""

import pytest

pytest.importorskip("mlx.core", reason="pip install mlx-cpu mlx veloxquant-mlx")
pytest.importorskip("veloxquant_mlx", reason="pip install mlx-cpu mlx veloxquant-mlx")

import random_arrays as ra
from bits import assert_bits
from hypothesis import given
from hypothesis import strategies as st
from kvant import group_quant, kitty, kvquant, zipcache
from veloxquant_mlx.quantizers import _quant_utils as ref_group
from veloxquant_mlx.quantizers import kitty as ref_kitty
from veloxquant_mlx.quantizers import kvquant as ref_kvquant
from veloxquant_mlx.quantizers import zipcache as ref_zipcache


def assert_all(got, want, names=None, signed_zero=True):
    names = names or [str(i) for i in range(len(want))]
    for a, b, name in zip(got, want, names, strict=True):
        assert_bits(a, b, name, signed_zero)


@given(ra.matrices, ra.bits, ra.group_sizes)
def test_group_quant(x, bits, group):
    theirs = ref_group._group_quant_codes(ra.to_mlx(x), bits, group)
    ours = group_quant.group_quant_codes(x, bits, group)
    assert_all(ours, theirs, ("codes", "scale", "zero"), signed_zero=False)
    assert_bits(
        group_quant.group_dequant_codes(*ours, x.shape[0], group),
        ref_group._group_dequant_codes(*theirs, x.shape[0], group),
        signed_zero=False,
    )
    assert_bits(
        group_quant.group_quant_dequant(x, bits, group), ref_group._group_quant_dequant(ra.to_mlx(x), bits, group)
    )


@given(ra.batches, ra.bits, ra.group_sizes)
def test_group_quant_batched(x, bits, group):
    theirs = ref_group._group_quant_codes_batched(ra.to_mlx(x), bits, group)
    ours = group_quant.group_quant_codes_batched(x, bits, group)
    assert_all(ours, theirs, ("codes", "scale", "zero"), signed_zero=False)
    assert_bits(
        group_quant.group_dequant_codes_batched(*ours, x.shape[1], group),
        ref_group._group_dequant_codes_batched(*theirs, x.shape[1], group),
        signed_zero=False,
    )
    assert_bits(
        group_quant.group_quant_dequant_batched(x, bits, group),
        ref_group._group_quant_dequant_batched(ra.to_mlx(x), bits, group),
    )


@given(ra.matrices, ra.fractions, ra.bits, ra.bits, ra.group_sizes)
def test_kitty_plain(x, fraction, hi, lo, group):
    m = ra.to_mlx(x)
    ours = kitty.rank_channels_by_sensitivity(x, fraction)
    assert ours == ref_kitty.rank_channels_by_sensitivity(m, fraction)
    assert_bits(
        kitty.quantize_mixed_channels(x, *ours, hi, lo, group),
        ref_kitty.quantize_mixed_channels(m, *ours, hi, lo, group),
    )


@given(ra.batches, ra.fractions, ra.bits, ra.bits, ra.group_sizes)
def test_kitty_batched(x, fraction, hi, lo, group):
    import mlx.core as mx

    m = ra.to_mlx(x)
    variance = mx.var(m.astype(mx.float32), axis=1)
    mask = ref_kitty.hi_mask_from_variance_batched(variance, fraction)
    assert_bits(kitty.hi_mask_from_variance_batched(variance, fraction), mask, "mask")
    assert_bits(
        kitty.quantize_mixed_channels_batched(m, mask, hi, lo, group),
        ref_kitty.quantize_mixed_channels_batched(m, mask, hi, lo, group),
    )


@given(ra.arrays[2](st.just(2), st.integers(1, 40)), st.integers(0, 2000))
def test_running_variance(x, n):
    import mlx.core as mx

    m = ra.to_mlx(x).astype(mx.float32)
    total, squares = m[0] * n, mx.abs(m[1]) * n
    assert_bits(
        kitty.compute_running_variance(total, squares, n), ref_kitty.compute_running_variance(total, squares, n)
    )


@given(ra.matrices, ra.fractions, ra.bits, ra.bits, ra.group_sizes)
def test_zipcache(x, fraction, hi, lo, group):
    m = ra.to_mlx(x)
    norms = zipcache.token_key_norms(x)
    assert_bits(norms, ref_zipcache.token_key_norms(m), "norms")
    assert_bits(zipcache.saliency_mask(norms, fraction), ref_zipcache.saliency_mask(ra.to_mlx(norms), fraction), "mask")
    ours = zipcache.zipcache_compress(x, hi, lo, fraction, group)
    theirs = ref_zipcache.zipcache_compress(m, hi, lo, fraction, group)
    assert ours._fields == theirs._fields
    for name, a, b in zip(ours._fields, ours, theirs):
        if isinstance(b, int):
            assert (a, type(a)) == (b, int), name
        else:
            assert_bits(a, b, name, signed_zero=False)
    assert_bits(zipcache.zipcache_reconstruct(ours), ref_zipcache.zipcache_reconstruct(theirs))
    assert zipcache.zipcache_bytes(ours) == ref_zipcache.zipcache_bytes(theirs)
    assert zipcache.zipcache_bytes(ours, 7) == ref_zipcache.zipcache_bytes(theirs, 7)
    assert_bits(
        zipcache.zipcache_quant_dequant(x, hi, lo, fraction, group),
        ref_zipcache.zipcache_quant_dequant(m, hi, lo, fraction, group),
    )


@given(ra.matrices, ra.bits, ra.group_sizes)
def test_channel_quant(x, bits, group):
    ours = zipcache.channel_quant(x, bits, group)
    theirs = ref_zipcache.channel_quant(ra.to_mlx(x), bits, group)
    assert_all(ours, theirs, ("codes", "scales", "zeros"), signed_zero=False)
    assert_bits(zipcache.channel_dequant(*ours, group), ref_zipcache.channel_dequant(*theirs, group), signed_zero=False)


@given(st.integers(0, 5000), st.integers(0, 300), st.integers(1, 8), ra.group_sizes)
def test_base_only_bytes(tokens, channels, bits, group):
    assert zipcache.base_only_bytes(tokens, channels, bits, group) == ref_zipcache.base_only_bytes(
        tokens, channels, bits, group
    )


@given(ra.matrices, st.integers(1, 5), ra.fractions, st.integers(0, 9))
def test_kvquant_plain(x, bits, fraction, iterations):
    m = ra.to_mlx(x)
    split, theirs = kvquant.split_dense_sparse(x, fraction), ref_kvquant.split_dense_sparse(m, fraction)
    assert split._fields == theirs._fields
    assert_all(split, theirs, split._fields)
    levels = kvquant.fit_nuq_levels(split.inliers, bits, iterations)
    assert_bits(levels, ref_kvquant.fit_nuq_levels(theirs.inliers, bits, iterations), "levels", signed_zero=False)
    codes = kvquant.quantize_nuq(x, levels)
    assert_bits(codes, ref_kvquant.quantize_nuq(m, ra.to_mlx(levels)), "codes")
    assert_bits(
        kvquant.dequant_nuq(codes, levels), ref_kvquant.dequant_nuq(ra.to_mlx(codes), ra.to_mlx(levels)), "values"
    )
    assert_bits(
        kvquant.nuq_quant_dequant(x, bits, fraction, iterations),
        ref_kvquant.nuq_quant_dequant(m, bits, fraction, iterations),
        signed_zero=False,
    )
    theirs = ref_kvquant.nuq_distortion(m, ra.to_mlx(levels))
    assert kvquant.nuq_distortion(x, levels) == pytest.approx(theirs, rel=1e-5)


@given(ra.batches, st.integers(1, 5), ra.fractions, st.integers(0, 9))
def test_kvquant_batched(x, bits, fraction, iterations):
    m = ra.to_mlx(x)
    split, theirs = kvquant.split_dense_sparse_batched(x, fraction), ref_kvquant.split_dense_sparse_batched(m, fraction)
    assert_all(split, theirs, split._fields)
    levels = kvquant.fit_nuq_levels_batched(split.inliers, bits, iterations)
    assert_bits(
        levels, ref_kvquant.fit_nuq_levels_batched(theirs.inliers, bits, iterations), "levels", signed_zero=False
    )
    codes = kvquant.quantize_nuq_batched(x, levels)
    assert_bits(codes, ref_kvquant.quantize_nuq_batched(m, ra.to_mlx(levels)), "codes")
    assert_bits(
        kvquant.dequant_nuq_batched(codes, levels),
        ref_kvquant.dequant_nuq_batched(ra.to_mlx(codes), ra.to_mlx(levels)),
        "values",
    )
