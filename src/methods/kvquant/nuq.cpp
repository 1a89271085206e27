#include "methods/kvquant/nuq.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "methods/kvquant/nuq.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "methods/kvquant/nuq_lanes-inl.hpp"
#include "methods/kvquant/nuq_slices-inl.hpp"
#include "methods/kvquant/nuq_sweep-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::kvquant::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// fp32(1/N): means multiply by it, they do not divide.
inline float Reciprocal(std::int64_t n) {
  return static_cast<float>(1.0 / static_cast<double>(n));
}

inline V ColumnSum(const float* x, std::int64_t rows, std::int64_t stride) {
  const F d;
  V sum = hn::Zero(d);
  for (std::int64_t row = 0; row < rows; ++row) sum = hn::Add(sum, hn::Load(d, x + row * stride));
  return sum;
}

// ---- outliers

constexpr std::int64_t kInsertionLimit = 32;  // above it, sorting all of |x| is cheaper

// The k largest |x| of each lane, ascending, in scratch; returns where.
inline const float* Largest(const float* x, std::int64_t n, std::int64_t stride, std::int64_t k, float* scratch) {
  if (k <= kInsertionLimit) {
    LargestByInsertion(x, n, stride, k, scratch);
    return scratch;
  }
  const F d;
  const std::int64_t lanes = LaneCount();
  for (std::int64_t row = 0; row < n; ++row) {
    hn::Store(hn::Abs(hn::Load(d, x + row * stride)), d, scratch + row * lanes);
  }
  SortLanes(scratch, n);
  return scratch + (n - k) * lanes;
}

void MarkOutliers(const Columns& in, std::int64_t k, std::uint8_t* mask, float* scratch) {
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::Rebind<std::uint8_t, F> d8;
  const std::int64_t lanes = LaneCount();
  const V one = hn::Set(d, 1.0F);
  for (std::int64_t first = 0; first < in.columns; first += lanes) {
    const float* x = in.x + first;
    const float* largest = Largest(x, in.rows, in.stride, k, scratch);
    const V threshold = hn::Load(d, largest);
    // Cells equal to the threshold fill what the larger ones leave, the lower rows first.
    V ties = hn::Set(d, static_cast<float>(k));
    for (std::int64_t i = 0; i < k; ++i) {
      ties = hn::Sub(ties, hn::IfThenElseZero(hn::Gt(hn::Load(d, largest + i * lanes), threshold), one));
    }
    for (std::int64_t row = 0; row < in.rows; ++row) {
      const V magnitude = hn::Abs(hn::Load(d, x + row * in.stride));
      const M tie = hn::And(hn::Eq(magnitude, threshold), hn::Gt(ties, hn::Zero(d)));
      ties = hn::Sub(ties, hn::IfThenElseZero(tie, one));
      const M marked = hn::Or(hn::Gt(magnitude, threshold), tie);
      const auto bit = hn::ConvertTo(di, hn::IfThenElseZero(marked, one));
      hn::StoreU(hn::DemoteTo(d8, bit), d8, mask + row * in.stride + first);
    }
  }
}

void NthLargest(const Columns& in, std::int64_t k, float* out, float* scratch) {
  const F d;
  for (std::int64_t first = 0; first < in.columns; first += LaneCount()) {
    hn::StoreU(hn::Load(d, Largest(in.x + first, in.rows, in.stride, k, scratch)), d, out + first);
  }
}

void FillOutliers(const Columns& in, const std::uint8_t* mask, float* out) {
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::Rebind<std::uint8_t, F> d8;
  const std::int64_t lanes = LaneCount();
  const V reciprocal = hn::Set(d, Reciprocal(in.rows));
  for (std::int64_t first = 0; first < in.columns; first += lanes) {
    const V mean = hn::Mul(ColumnSum(in.x + first, in.rows, in.stride), reciprocal);
    for (std::int64_t row = 0; row < in.rows; ++row) {
      const std::int64_t at = row * in.stride + first;
      const auto marked = hn::PromoteTo(di, hn::LoadU(d8, mask + at));
      const M is_outlier = hn::RebindMask(d, hn::Gt(marked, hn::Zero(di)));
      hn::Store(hn::IfThenElse(is_outlier, mean, hn::Load(d, in.x + at)), d, out + at);
    }
  }
}

// ---- levels

void Fit(const Columns& in, int level_count, std::int64_t sweeps, float* levels, float* scratch) {
  const F d;
  const std::int64_t lanes = LaneCount();
  float* y = scratch;
  float* sorted = y + in.rows * lanes;
  float* own = sorted + in.rows * lanes;
  float* middles = own + kMaxLevels * lanes;
  float* counts = middles + kMaxLevels * lanes;
  float* sums = counts + kMaxLevels * lanes;
  const V reciprocal = hn::Set(d, Reciprocal(in.rows));
  for (std::int64_t first = 0; first < in.columns; first += lanes) {
    const V mean = hn::Mul(ColumnSum(in.x + first, in.rows, in.stride), reciprocal);
    V total = hn::Zero(d);
    for (std::int64_t row = 0; row < in.rows; ++row) {
      const V centred = hn::Sub(hn::Load(d, in.x + row * in.stride + first), mean);
      total = hn::Add(total, centred);
      hn::Store(centred, d, y + row * lanes);
      hn::Store(centred, d, sorted + row * lanes);
    }
    SortLanes(sorted, in.rows);
    for (int l = 0; l < level_count; ++l) {
      hn::Store(hn::Load(d, sorted + first_sample(l, level_count, in.rows) * lanes), d, own + l * lanes);
    }
    for (std::int64_t sweep = 0; sweep < std::max<std::int64_t>(sweeps, 1); ++sweep) {
      SortLanes(own, level_count);
      StoreMiddles(own, lanes, level_count, middles);
      AddAllBelow(y, in.rows, level_count - 1, middles, counts, sums);
      MoveLevels(level_count, in.rows, total, counts, sums, own);
    }
    SortLanes(own, level_count);
    for (int l = 0; l < level_count; ++l) {
      hn::Store(hn::Add(hn::Load(d, own + l * lanes), mean), d, levels + l * in.stride + first);
    }
  }
}

void Encode(const Columns& in, int level_count, const float* levels, std::uint8_t* codes) {
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::Rebind<std::uint8_t, F> d8;
  const std::int64_t lanes = LaneCount();
  alignas(64) float middles[kMaxLevels * 16];
  for (std::int64_t first = 0; first < in.columns; first += lanes) {
    StoreMiddles(levels + first, in.stride, level_count, middles);
    for (std::int64_t row = 0; row < in.rows; ++row) {
      const V x = hn::Load(d, in.x + row * in.stride + first);
      auto code = hn::Zero(di);
      for (int j = 0; j + 1 < level_count; ++j) {
        code = hn::Sub(code, hn::VecFromMask(di, hn::RebindMask(di, hn::Lt(hn::Load(d, middles + j * lanes), x))));
      }
      hn::StoreU(hn::DemoteTo(d8, code), d8, codes + row * in.stride + first);
    }
  }
}

void FillNuq(NuqKernels& k) {
  k.name = hwy::TargetName(HWY_TARGET);
  k.mark_outliers = MarkOutliers;
  k.nth_largest = NthLargest;
  k.fill_outliers = FillOutliers;
  k.fit = Fit;
  k.encode = Encode;
  k.slice = Slice;
  k.unslice = Unslice;
  k.look_up_16 = LookUp<std::uint16_t>;
  k.look_up_32 = LookUp<std::uint32_t>;
  k.look_up_rows_16 = LookUpRows<std::uint16_t>;
  k.look_up_rows_32 = LookUpRows<std::uint32_t>;
}

}  // namespace kvant::kvquant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::kvquant {

HWY_EXPORT(FillNuq);

namespace {

std::vector<NuqKernels> make_sets() {
  std::vector<NuqKernels> sets;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {  // Highway's best first
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    NuqKernels k;
    HWY_DYNAMIC_DISPATCH(FillNuq)(k);
    if (sets.empty() || sets.back().name != k.name) sets.push_back(k);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  return sets;
}

}  // namespace

const std::vector<NuqKernels>& all_nuq_kernels() {
  static const std::vector<NuqKernels> sets = make_sets();
  return sets;
}

const NuqKernels& nuq_kernels() {
  static const NuqKernels& best = all_nuq_kernels().front();
  return best;
}

std::size_t float_scratch(std::int64_t rows, std::int64_t k) {
  constexpr std::size_t kLanes = 16;
  const auto n = static_cast<std::size_t>(rows);
  if (k > 0) return std::max(n, static_cast<std::size_t>(k)) * kLanes;
  return (2 * n + 4 * static_cast<std::size_t>(kMaxLevels)) * kLanes;
}

std::int64_t outlier_count(std::int64_t n, double fraction) {
  if (!(fraction > 0) || n < 2) return 0;
  const double rounded = std::nearbyint(static_cast<double>(n) * fraction);
  const double limit = static_cast<double>(n - 1);
  return static_cast<std::int64_t>(std::min(std::max(1.0, rounded), limit));
}

std::int64_t first_sample(int level, int level_count, std::int64_t n) {
  const float share = (static_cast<float>(level) + 0.5F) / static_cast<float>(level_count);
  const float sample = std::nearbyint(share * static_cast<float>(n - 1));
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(sample), 0, n - 1);
}

}  // namespace kvant::kvquant
#endif
