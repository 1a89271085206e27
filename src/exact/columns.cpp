// Plain loops, vectorised by the compiler once per instruction set: Highway supplies the targets and the dispatch.
#include "exact/columns.hpp"

#include <cstring>

// foreach_target.h must come before highway.h.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "exact/columns.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kvant::exact::HWY_NAMESPACE {

constexpr float kSmallestScale = 1e-8F;
// Adding and subtracting 1.5 * 2^23 rounds 0..255 to the nearest integer, ties to even, as rintf does.
constexpr float kRounder = 12582912.0F;

void Add(const float* HWY_RESTRICT x, std::int64_t n, float* HWY_RESTRICT sum) {
  for (std::int64_t c = 0; c < n; ++c) sum[c] += x[c];
}

void AddSquares(const float* HWY_RESTRICT x, std::int64_t n, float* HWY_RESTRICT sum) {
  for (std::int64_t c = 0; c < n; ++c) sum[c] += x[c] * x[c];
}

void AddSquaredDifferences(const float* HWY_RESTRICT x, const float* HWY_RESTRICT mean, std::int64_t n,
                           float* HWY_RESTRICT sum) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float difference = x[c] - mean[c];
    sum[c] += difference * difference;
  }
}

void Multiply(float factor, std::int64_t n, float* HWY_RESTRICT x) {
  for (std::int64_t c = 0; c < n; ++c) x[c] *= factor;
}

void MinMax(const float* const* rows, std::int64_t n_rows, std::int64_t n, float* HWY_RESTRICT min,
            float* HWY_RESTRICT max) {
  std::memcpy(min, rows[0], static_cast<std::size_t>(n) * sizeof(float));
  std::memcpy(max, rows[0], static_cast<std::size_t>(n) * sizeof(float));
  for (std::int64_t r = 1; r < n_rows; ++r) {
    const float* HWY_RESTRICT x = rows[r];
    for (std::int64_t c = 0; c < n; ++c) {
      const float low = x[c] < min[c] ? x[c] : min[c];
      const float high = x[c] > max[c] ? x[c] : max[c];
      min[c] = x[c] != x[c] ? x[c] : low;  // comparisons with NaN are false: a NaN once stored stays
      max[c] = x[c] != x[c] ? x[c] : high;
    }
  }
}

void Grid(const float* HWY_RESTRICT min, const float* HWY_RESTRICT max, const float* HWY_RESTRICT levels,
          std::int64_t n, float* HWY_RESTRICT scale) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float step = (max[c] - min[c]) / levels[c];
    scale[c] = step < kSmallestScale ? kSmallestScale : step;
  }
}

void Encode(const float* HWY_RESTRICT x, const float* HWY_RESTRICT min, const float* HWY_RESTRICT scale,
            const float* HWY_RESTRICT levels, std::int64_t n, std::uint8_t* HWY_RESTRICT codes) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float place = (x[c] - min[c]) / scale[c];
    const float limited = place < levels[c] ? place : levels[c];
    const float known = place != place ? 0.0F : limited;
    codes[c] = static_cast<std::uint8_t>(static_cast<std::int32_t>((known + kRounder) - kRounder));
  }
}

void Decode(const std::uint8_t* HWY_RESTRICT codes, const float* HWY_RESTRICT min, const float* HWY_RESTRICT scale,
            std::int64_t n, float* HWY_RESTRICT x) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float code = static_cast<float>(static_cast<std::int32_t>(codes[c]));
    x[c] = code * scale[c] + min[c];
  }
}

void Slice(const std::uint8_t* rows, std::int64_t row_stride, int shift, int bits, std::int64_t n, std::uint8_t* planes,
           std::int64_t plane_stride) {
  for (int b = 0; b < bits; ++b) {
    std::uint8_t* HWY_RESTRICT plane = planes + b * plane_stride;
    const int bit = shift + b;
    for (std::int64_t c = 0; c < n; ++c) {
      const std::uint8_t* HWY_RESTRICT at = rows + c;
      unsigned word = 0;
      for (int r = 0; r < 8; ++r) word |= ((at[r * row_stride] >> bit) & 1U) << r;
      plane[c] = static_cast<std::uint8_t>(word);
    }
  }
}

void Unslice(const std::uint8_t* planes, std::int64_t plane_stride, int shift, int bits, std::int64_t n,
             std::uint8_t* rows, std::int64_t row_stride) {
  for (int b = 0; b < bits; ++b) {
    const std::uint8_t* HWY_RESTRICT plane = planes + b * plane_stride;
    const int bit = shift + b;
    for (int r = 0; r < 8; ++r) {
      std::uint8_t* HWY_RESTRICT row = rows + r * row_stride;
      for (std::int64_t c = 0; c < n; ++c) {
        row[c] = static_cast<std::uint8_t>(row[c] | (((plane[c] >> r) & 1U) << bit));
      }
    }
  }
}

ColumnKernels Table() {
  return {Add, AddSquares, AddSquaredDifferences, Multiply, MinMax, Grid, Encode, Decode, Slice, Unslice};
}

}  // namespace kvant::exact::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::exact {

HWY_EXPORT(Table);

const ColumnKernels& columns() {
  static const ColumnKernels table = HWY_DYNAMIC_DISPATCH(Table)();
  return table;
}

}  // namespace kvant::exact
#endif
