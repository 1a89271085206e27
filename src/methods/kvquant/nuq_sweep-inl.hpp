// The parts of nuq.cpp that are one Lloyd sweep. Included once per target, hence the toggled guard.
#if defined(KVANT_NUQ_SWEEP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_NUQ_SWEEP_INL_HPP
#undef KVANT_NUQ_SWEEP_INL_HPP
#else
#define KVANT_NUQ_SWEEP_INL_HPP
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "methods/kvquant/nuq_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::kvquant::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using M = hn::MFromD<F>;

// Count and fp32 sum, in row order, of the samples y <= middle[j] for kCount midpoints.
template <int kCount>
inline void AddBelow(const float* y, std::int64_t rows, const float* middles, float* counts, float* sums) {
  const F d;
  const std::int64_t lanes = LaneCount();
  const V one = hn::Set(d, 1.0F);
  const V zero = hn::Zero(d);
  const auto middle = [&](int j) { return hn::Load(d, middles + (j < kCount ? j : 0) * lanes); };
  const V m0 = middle(0), m1 = middle(1), m2 = middle(2), m3 = middle(3);
  const V m4 = middle(4), m5 = middle(5), m6 = middle(6), m7 = middle(7);
  V s0 = zero, s1 = zero, s2 = zero, s3 = zero, s4 = zero, s5 = zero, s6 = zero, s7 = zero;
  V c0 = zero, c1 = zero, c2 = zero, c3 = zero, c4 = zero, c5 = zero, c6 = zero, c7 = zero;
  for (std::int64_t row = 0; row < rows; ++row) {
    const V sample = hn::Load(d, y + row * lanes);
    const auto add = [&](V limit, V& count, V& sum) HWY_ATTR {
      const M below = hn::Le(sample, limit);
      // Sums start at +0 and adding +0 keeps every bit of them.
      sum = hn::Add(sum, hn::IfThenElseZero(below, sample));
      count = hn::Add(count, hn::IfThenElseZero(below, one));
    };
    add(m0, c0, s0);
    if (kCount > 1) add(m1, c1, s1);
    if (kCount > 2) add(m2, c2, s2);
    if (kCount > 3) add(m3, c3, s3);
    if (kCount > 4) add(m4, c4, s4);
    if (kCount > 5) add(m5, c5, s5);
    if (kCount > 6) add(m6, c6, s6);
    if (kCount > 7) add(m7, c7, s7);
  }
  const auto store = [&](int j, V count, V sum) HWY_ATTR {
    if (j >= kCount) return;
    hn::Store(count, d, counts + j * lanes);
    hn::Store(sum, d, sums + j * lanes);
  };
  store(0, c0, s0), store(1, c1, s1), store(2, c2, s2), store(3, c3, s3);
  store(4, c4, s4), store(5, c5, s5), store(6, c6, s6), store(7, c7, s7);
}

// As many midpoints at a time as registers hold.
inline void AddAllBelow(const float* y, std::int64_t rows, int middle_count, const float* middles, float* counts,
                        float* sums) {
  const std::int64_t lanes = LaneCount();
  constexpr int kAtOnce = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64 ? 7 : 4;
  for (int j = 0; j < middle_count;) {
    const int left = std::min(middle_count - j, kAtOnce);
    const auto call = [&](auto add)
                          HWY_ATTR { add(y, rows, middles + j * lanes, counts + j * lanes, sums + j * lanes); };
    switch (left) {
      case 1:
        call(AddBelow<1>);
        break;
      case 2:
        call(AddBelow<2>);
        break;
      case 3:
        call(AddBelow<3>);
        break;
      case 4:
        call(AddBelow<4>);
        break;
      case 5:
        call(AddBelow<5>);
        break;
      case 6:
        call(AddBelow<6>);
        break;
      default:
        call(AddBelow<7>);
    }
    j += left;
  }
}

inline void StoreMiddles(const float* levels, std::int64_t stride, int level_count, float* middles) {
  const F d;
  const V half = hn::Set(d, 0.5F);
  for (int j = 0; j + 1 < level_count; ++j) {
    const V sum = hn::Add(hn::Load(d, levels + j * stride), hn::Load(d, levels + (j + 1) * stride));
    hn::Store(hn::Mul(half, sum), d, middles + j * LaneCount());
  }
}

// New levels from the sums below the midpoints; a level without samples stays.
inline void MoveLevels(int level_count, std::int64_t rows, V total, const float* counts, const float* sums,
                       float* levels) {
  const F d;
  const std::int64_t lanes = LaneCount();
  V count_below = hn::Zero(d);
  V sum_below = hn::Zero(d);
  for (int l = 0; l < level_count; ++l) {
    const bool last = l + 1 == level_count;
    const V count_to = last ? hn::Set(d, static_cast<float>(rows)) : hn::Load(d, counts + l * lanes);
    const V sum_to = last ? total : hn::Load(d, sums + l * lanes);
    const V count = hn::Sub(count_to, count_below);
    const V mean = hn::Div(hn::Sub(sum_to, sum_below), count);
    const M any = hn::Gt(count, hn::Zero(d));
    hn::Store(hn::IfThenElse(any, mean, hn::Load(d, levels + l * lanes)), d, levels + l * lanes);
    count_below = count_to;
    sum_below = sum_to;
  }
}

}  // namespace kvant::kvquant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
