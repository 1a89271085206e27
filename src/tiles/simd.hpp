// What the Highway translation units of this folder share. Included once per target, hence the toggled guard.
#if defined(KVANT_TILES_SIMD_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_SIMD_HPP
#undef KVANT_TILES_SIMD_HPP
#else
#define KVANT_TILES_SIMD_HPP
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const float* p) {
  return hwy::HWY_NAMESPACE::LoadU(d, p);
}
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const hwy::float16_t* p) {
  const hwy::HWY_NAMESPACE::Rebind<hwy::float16_t, D> dh;
  return hwy::HWY_NAMESPACE::PromoteTo(d, hwy::HWY_NAMESPACE::LoadU(dh, p));
}
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::VFromD<D> LoadWide(D d, const hwy::bfloat16_t* p) {
  const hwy::HWY_NAMESPACE::Rebind<hwy::bfloat16_t, D> dh;
  return hwy::HWY_NAMESPACE::PromoteTo(d, hwy::HWY_NAMESPACE::LoadU(dh, p));
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
