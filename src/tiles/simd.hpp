// What the Highway translation units of this folder share. Included once per target, hence the toggled guard.
#if defined(KVANT_TILES_SIMD_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_SIMD_HPP
#undef KVANT_TILES_SIMD_HPP
#else
#define KVANT_TILES_SIMD_HPP
#endif

#include <cstdint>
#include <utility>

#include "hwy/highway.h"

// AVX3_DL is Highway's name for the AVX-512 generation with VNNI.
#undef KVANT_VNNI
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define KVANT_VNNI 1
#else
#define KVANT_VNNI 0
#endif
#undef KVANT_MADD
// pmaddwd; the byte shuffles that put x in its order need SSSE3.
#if HWY_ARCH_X86 && !KVANT_VNNI && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
#define KVANT_MADD 1
#else
#define KVANT_MADD 0
#endif

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

// Accumulators are arrays indexed by parameter packs, not by loops: GCC 12 promotes an array to registers only when
// every index is a constant before its loop passes run (and the element type is not a may_alias type like __m512i), and
// otherwise stores all accumulators on each step.
template <int... I>
using Indices = std::integer_sequence<int, I...>;
template <int kCount>
using Range = std::make_integer_sequence<int, kCount>;

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const float* p) {
  return hwy::HWY_NAMESPACE::LoadU(d, p);
}
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const hwy::float16_t* p) {
#if HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2
  // Without F16C Highway's conversion reads infinity and NaN as finite: a mask of -inf would hide nothing.
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto half = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7FFFU)));
  const auto finite = hn::BitCast(du, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112F)));
  const auto special = hn::VecFromMask(du, hn::Gt(magnitude, hn::Set(du, 0x0F7FFFFFU)));
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000U)));
  return hn::BitCast(d, hn::Or(hn::Or(finite, sign), hn::And(special, hn::Set(du, 0x7F800000U))));
#else
  const hwy::HWY_NAMESPACE::Rebind<hwy::float16_t, D> dh;
  return hwy::HWY_NAMESPACE::PromoteTo(d, hwy::HWY_NAMESPACE::LoadU(dh, p));
#endif
}
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const hwy::bfloat16_t* p) {
  const hwy::HWY_NAMESPACE::Rebind<hwy::bfloat16_t, D> dh;
  return hwy::HWY_NAMESPACE::PromoteTo(d, hwy::HWY_NAMESPACE::LoadU(dh, p));
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
