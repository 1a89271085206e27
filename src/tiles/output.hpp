// How the integer sums of a product reach its output. Included once per target, hence the toggled guard.
#if defined(KVANT_TILES_OUTPUT_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_OUTPUT_HPP
#undef KVANT_TILES_OUTPUT_HPP
#else
#define KVANT_TILES_OUTPUT_HPP
#endif

#include <type_traits>

#include "hwy/highway.h"
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

// The output of a product from one vector and one row tile on.
struct Output {
  Start start;
  const float* factor;
  const float* alpha;
  const float* bias;
  float* out;
  std::int64_t stride;

  // Only the first sum over kSumDepth depth indices starts as the product says.
  Output(const CodeProduct& a, bool first, int tile)
      : start(first ? a.start : Start::add),
        factor(a.factor),
        alpha(a.alpha),
        bias(a.bias),
        out(a.out + tile * kLanes),
        stride(a.out_stride) {}
  void next(int vectors) {
    factor += vectors;
    alpha += alpha != nullptr ? vectors : 0;
    bias += bias != nullptr ? vectors : 0;
    out += vectors * stride;
  }
};

template <Start kStart, class V>
HWY_INLINE void StoreSum(const Output& to, V sum, int n, float* out) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<float, 16> d;
  const auto product = hn::Mul(hn::ConvertTo(d, sum), hn::Set(d, to.factor[n]));
  if constexpr (kStart == Start::add) {
    hn::StoreU(hn::Add(hn::LoadU(d, out), product), d, out);
  } else if constexpr (kStart == Start::replace) {
    hn::StoreU(hn::Add(hn::Set(d, to.bias[n]), product), d, out);
  } else {
    const auto before = hn::MulAdd(hn::LoadU(d, out), hn::Set(d, to.alpha[n]), hn::Set(d, to.bias[n]));
    hn::StoreU(hn::Add(before, product), d, out);
  }
}

// Calls body with the start as a type.
template <class Body>
HWY_INLINE void WithStart(Start start, const Body& body) {
  if (start == Start::add) body(std::integral_constant<Start, Start::add>());
  if (start == Start::replace) body(std::integral_constant<Start, Start::replace>());
  if (start == Start::rescale) body(std::integral_constant<Start, Start::rescale>());
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
