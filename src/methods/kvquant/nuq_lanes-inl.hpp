// The parts of nuq.cpp that sort and select. Included once per target, hence the toggled guard.
#if defined(KVANT_NUQ_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_NUQ_LANES_INL_HPP
#undef KVANT_NUQ_LANES_INL_HPP
#else
#define KVANT_NUQ_LANES_INL_HPP
#endif

#include <bit>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvant::kvquant::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using V = hn::VFromD<F>;

inline std::int64_t LaneCount() {
  return static_cast<std::int64_t>(hn::Lanes(F()));
}

// Sorts every lane of x [n][lanes] ascending: Batcher's merge exchange (Knuth 5.2.2, algorithm M), any n.
inline void SortLanes(float* x, std::int64_t n) {
  if (n < 2) return;
  const F d;
  const std::int64_t lanes = LaneCount();
  const std::int64_t top = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n))) / 2;
  for (std::int64_t p = top; p > 0; p /= 2) {
    std::int64_t q = top;
    std::int64_t r = 0;
    std::int64_t distance = p;
    for (;;) {
      // All i with (i & p) == r and i + distance < n: runs of p.
      for (std::int64_t start = r; start + distance < n; start += 2 * p) {
        const std::int64_t end = start + p < n - distance ? start + p : n - distance;
        float* low = x + start * lanes;
        float* high = low + distance * lanes;
        for (std::int64_t i = start; i < end; ++i, low += lanes, high += lanes) {
          const V a = hn::Load(d, low);
          const V b = hn::Load(d, high);
          hn::Store(hn::Min(a, b), d, low);
          hn::Store(hn::Max(a, b), d, high);
        }
      }
      if (q == p) break;
      distance = q - p;
      q /= 2;
      r = p;
    }
  }
}

// The k largest |x| of every lane, ascending in `largest` [k][lanes], by insertion. `x` has `stride` between rows.
inline void LargestByInsertion(const float* x, std::int64_t n, std::int64_t stride, std::int64_t k, float* largest) {
  const F d;
  const std::int64_t lanes = LaneCount();
  for (std::int64_t i = 0; i < k; ++i) hn::Store(hn::Set(d, -1.0F), d, largest + i * lanes);
  for (std::int64_t row = 0; row < n; ++row) {
    V value = hn::Abs(hn::Load(d, x + row * stride));
    if (hn::AllFalse(d, hn::Gt(value, hn::Load(d, largest)))) continue;
    // The smallest is dropped, the others move down where the new value is larger.
    value = hn::Max(value, hn::Load(d, largest));
    for (std::int64_t i = 0; i + 1 < k; ++i) {
      const V next = hn::Load(d, largest + (i + 1) * lanes);
      hn::Store(hn::Min(value, next), d, largest + i * lanes);
      value = hn::Max(value, next);
    }
    hn::Store(value, d, largest + (k - 1) * lanes);
  }
}

}  // namespace kvant::kvquant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
