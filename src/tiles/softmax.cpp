// The online softmax over one page and the small vector operations around it, per instruction set.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/softmax.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "base/half.hpp"
#include "hwy/contrib/math/math-inl.h"
#include "tiles/kernels.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The maximum of one row of scores, NaN if a score is NaN. Two registers at a time: a maximum waits for the one before.
float Peak(const float* s, int cells) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto first = hn::Set(d, kMinusInfinity);
  auto second = first;
  auto bad = hn::IsNaN(first);
  int i = 0;
  for (; i + 2 * lanes <= cells; i += 2 * lanes) {
    const auto a = hn::LoadU(d, s + i);
    const auto b = hn::LoadU(d, s + i + lanes);
    first = hn::Max(first, a);
    second = hn::Max(second, b);
    bad = hn::Or(bad, hn::Or(hn::IsNaN(a), hn::IsNaN(b)));
  }
  for (; i < cells; i += lanes) {
    const auto a = hn::LoadU(d, s + i);
    first = hn::Max(first, a);
    bad = hn::Or(bad, hn::IsNaN(a));
  }
  if (!hn::AllFalse(d, bad)) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(first, second)));
}

// Applies soft cap and mask to one row of scores in place and returns its maximum, NaN if a visible score is NaN.
float Finish(const SoftmaxArgs& a, float* s, const float* mask, float slope) {
  if (a.softcap <= 0 && mask == nullptr) return Peak(s, a.cells);
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto peak = hn::Set(d, kMinusInfinity);
  auto bad = hn::IsNaN(peak);
  for (int i = 0; i < a.cells; i += lanes) {
    auto score = hn::LoadU(d, s + i);
    if (a.softcap > 0) {
      // x >= 9 is 1 in float32; the clamp keeps the polynomial's argument in range.
      const auto scaled = hn::Clamp(hn::Div(score, hn::Set(d, a.softcap)), hn::Set(d, -10.0F), hn::Set(d, 10.0F));
      const auto capped = hn::Mul(hn::Set(d, a.softcap), hn::Tanh(d, scaled));
      score = hn::IfThenElse(hn::IsNaN(score), score, capped);  // the clamp would lose a NaN
    }
    if (mask != nullptr) {
      const auto addend = hn::LoadU(d, mask + i);
      // Where the mask is -inf the score may be anything, NaN from stale memory included.
      const auto hidden = hn::Eq(addend, hn::Set(d, kMinusInfinity));
      score = hn::IfThenElse(hidden, addend, hn::MulAdd(hn::Set(d, slope), addend, score));
    }
    hn::StoreU(score, d, s + i);
    peak = hn::Max(peak, score);
    bad = hn::Or(bad, hn::IsNaN(score));
  }
  if (!hn::AllFalse(d, bad)) return std::numeric_limits<float>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, peak));
}

// 2^t for t <= 0: a polynomial for the fraction (relative error 1.0e-7) times an exponent; 0 below 2^-126.
template <class D, class V>
HWY_INLINE V PowerOfTwo(D d, V t) {
  const hn::RebindToSigned<D> di;
  t = hn::Max(hn::Set(d, -127.0F), t);  // this order keeps a NaN
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the lowest bits; the shift below drops the others.
  const V rounder = hn::Set(d, 12582912.0F);
  const V rounded = hn::Add(t, rounder);
  const auto whole = hn::BitCast(di, rounded);
  const V f = hn::Sub(t, hn::Sub(rounded, rounder));
  V p = hn::MulAdd(hn::Set(d, 0.00133908634F), f, hn::Set(d, 0.00967603192F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555035711F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240221075F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147188F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.00000008F));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(whole, hn::Set(di, 127)))));
}

float Exponentiate(float* s, int cells, float peak) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto log2e = hn::Set(d, 1.44269504F);
  const auto highest = hn::Set(d, peak);
  const auto weigh = [&](int i) HWY_ATTR {
    const auto weight = PowerOfTwo(d, hn::Mul(hn::Sub(hn::LoadU(d, s + i), highest), log2e));
    hn::StoreU(weight, d, s + i);
    return weight;
  };
  auto first = hn::Zero(d);
  auto second = hn::Zero(d);
  int i = 0;
  for (; i + 2 * lanes <= cells; i += 2 * lanes) {
    first = hn::Add(first, weigh(i));
    second = hn::Add(second, weigh(i + lanes));
  }
  for (; i < cells; i += lanes) first = hn::Add(first, weigh(i));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(first, second)));
}

void Softmax(const SoftmaxArgs& a) {
  for (int n = 0; n < a.vectors; ++n) {
    float* s = a.scores + n * a.stride;
    const float* mask = a.mask != nullptr ? a.mask[n] : nullptr;
    const float page_peak = Finish(a, s, mask, mask != nullptr ? a.slope[n] : 0.0F);
    const float peak = std::max(a.maximum[n], page_peak);
    if (!(page_peak < -kMinusInfinity && a.maximum[n] < -kMinusInfinity)) {
      // A NaN or infinity among the visible scores is the result, not a small weight.
      std::fill(s, s + a.cells, std::numeric_limits<float>::quiet_NaN());
      a.maximum[n] = a.sum[n] = s[0];
      a.alpha[n] = 1.0F;
      continue;
    }
    if (peak == kMinusInfinity) {  // nothing visible yet: -inf minus -inf would be NaN
      std::fill(s, s + a.cells, 0.0F);
      a.alpha[n] = 1.0F;
      continue;
    }
    a.alpha[n] = a.maximum[n] == peak ? 1.0F : std::exp(a.maximum[n] - peak);
    a.sum[n] = a.sum[n] * a.alpha[n] + Exponentiate(s, a.cells, peak);
    a.maximum[n] = peak;
  }
}

void Rescale(float* out, std::int64_t stride, int vectors, int rows, const float* alpha, const float* bias) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int n = 0; n < vectors; ++n) {
    float* row = out + n * stride;
    const auto factor = hn::Set(d, alpha[n]);
    const auto addend = hn::Set(d, bias[n]);
    for (int r = 0; r < rows; r += lanes) hn::StoreU(hn::MulAdd(hn::LoadU(d, row + r), factor, addend), d, row + r);
  }
}

float Dot(const float* a, const float* b, int n) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  int i = 0;
  for (; i + lanes <= n; i += lanes) sum = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum);
  float result = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) result += a[i] * b[i];
  return result;
}

template <typename T>
void LoadGridOf(const T* min, const T* max, DType type, const float* inverse, int n, float* middle, float* step) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto half = hn::Set(d, 0.5F);  // of each end: their sum may not be a float
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto low = LoadWide(d, min + i);
    const auto high = LoadWide(d, max + i);
    hn::StoreU(hn::MulAdd(high, half, hn::Mul(low, half)), d, middle + i);
    hn::StoreU(hn::Mul(hn::Sub(high, low), hn::LoadU(d, inverse + i)), d, step + i);
  }
  for (; i < n; ++i) {
    const float low = base::load_float(min, type, i);
    const float high = base::load_float(max, type, i);
    middle[i] = 0.5F * low + 0.5F * high;
    step[i] = (high - low) * inverse[i];
  }
}

void LoadGrid(const void* min, const void* max, DType type, const float* inverse, int n, float* middle, float* step) {
  const auto load = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    LoadGridOf(static_cast<const T*>(min), static_cast<const T*>(max), type, inverse, n, middle, step);
  };
  if (type == DType::f32) load(static_cast<float*>(nullptr));
  if (type == DType::f16) load(static_cast<hwy::float16_t*>(nullptr));
  if (type == DType::bf16) load(static_cast<hwy::bfloat16_t*>(nullptr));
}

// Four loads of four lanes, transposed.
void GatherLanes(const float* lanes, const std::uint16_t* order, int n, int vectors, float* to, std::int64_t stride) {
  const hn::CappedTag<float, 4> d;
  const auto at = [&](int i) HWY_ATTR { return hn::LoadU(d, lanes + 4 * order[i]); };
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    const auto a = at(i);
    const auto b = at(i + 1);
    const auto c = at(i + 2);
    const auto e = at(i + 3);
    const hn::Repartition<double, decltype(d)> d64;
    const auto ab = hn::InterleaveLower(d, a, b);
    const auto ce = hn::InterleaveLower(d, c, e);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce))), d, to + i);
    if (vectors == 1) continue;
    const auto store = [&](auto value, int vector)
                           HWY_ATTR { hn::StoreU(hn::BitCast(d, value), d, to + vector * stride + i); };
    store(hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce)), 1);
    const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
    const auto ce_high = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
    if (vectors > 2) store(hn::InterleaveLower(d64, ab_high, ce_high), 2);
    if (vectors > 3) store(hn::InterleaveUpper(d64, ab_high, ce_high), 3);
  }
  for (; i < n; ++i) {
    for (int v = 0; v < vectors; ++v) to[v * stride + i] = lanes[4 * order[i] + v];
  }
}

void FillSoftmax(Kernels& k) {
  k.load_grid = LoadGrid;
  k.gather_lanes = GatherLanes;
  k.softmax = Softmax;
  k.rescale = Rescale;
  k.dot = Dot;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillSoftmax);
void fill_softmax(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillSoftmax)(k);
}
}  // namespace kvant::tiles
#endif
