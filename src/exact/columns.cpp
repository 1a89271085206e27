// Loops over columns, once per instruction set: most are plain and vectorised by the compiler, the others use Highway,
// which supplies the targets and the dispatch.
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
namespace hn = hwy::HWY_NAMESPACE;

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

// Columns [c, c + lanes of D) of MinMax: minimum and maximum stay in registers over the rows.
template <class D>
void MinMaxLanes(D d, const float* const* rows, std::int64_t n_rows, std::int64_t c, float* min, float* max) {
  auto low = hn::LoadU(d, rows[0] + c);
  auto high = low;
  auto known = low;  // becomes NaN with the first NaN row; the comparisons below skip NaN
  for (std::int64_t r = 1; r < n_rows; ++r) {
    const auto x = hn::LoadU(d, rows[r] + c);
    low = hn::IfThenElse(hn::Lt(x, low), x, low);
    high = hn::IfThenElse(hn::Gt(x, high), x, high);
    known = hn::IfThenElse(hn::Eq(x, x), known, x);
  }
  const auto is_known = hn::Eq(known, known);
  hn::StoreU(hn::IfThenElse(is_known, low, known), d, min + c);
  hn::StoreU(hn::IfThenElse(is_known, high, known), d, max + c);
}

void MinMax(const float* const* rows, std::int64_t n_rows, std::int64_t n, float* HWY_RESTRICT min,
            float* HWY_RESTRICT max) {
  const hn::CappedTag<float, 16> d;
  const hn::CappedTag<float, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) MinMaxLanes(d, rows, n_rows, c, min, max);
  for (; c < n; ++c) MinMaxLanes(one, rows, n_rows, c, min, max);
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

// Columns [c, c + lanes of D) of Slice.
template <class D>
void SliceLanes(D d, const std::uint8_t* rows, std::int64_t row_stride, int shift, int bits, std::int64_t c,
                std::uint8_t* planes, std::int64_t plane_stride) {
  for (int b = 0; b < bits; ++b) {
    const auto bit = hn::Set(d, static_cast<std::uint8_t>(1U << (shift + b)));
    auto word = hn::Zero(d);
    for (int r = 0; r < 8; ++r) {
      const auto set = hn::TestBit(hn::LoadU(d, rows + r * row_stride + c), bit);
      word = hn::Or(word, hn::IfThenElseZero(set, hn::Set(d, static_cast<std::uint8_t>(1U << r))));
    }
    hn::StoreU(word, d, planes + b * plane_stride + c);
  }
}

void Slice(const std::uint8_t* rows, std::int64_t row_stride, int shift, int bits, std::int64_t n, std::uint8_t* planes,
           std::int64_t plane_stride) {
  const hn::CappedTag<std::uint8_t, 64> d;
  const hn::CappedTag<std::uint8_t, 8> few;
  const hn::CappedTag<std::uint8_t, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) SliceLanes(d, rows, row_stride, shift, bits, c, planes, plane_stride);
  for (; c + 8 <= n; c += 8) SliceLanes(few, rows, row_stride, shift, bits, c, planes, plane_stride);
  for (; c < n; ++c) SliceLanes(one, rows, row_stride, shift, bits, c, planes, plane_stride);
}

// Columns [c, c + lanes of D) of Unslice.
template <class D>
void UnsliceLanes(D d, const std::uint8_t* planes, std::int64_t plane_stride, int shift, int bits, std::int64_t c,
                  std::uint8_t* rows, std::int64_t row_stride) {
  for (int r = 0; r < 8; ++r) {
    const auto row_bit = hn::Set(d, static_cast<std::uint8_t>(1U << r));
    std::uint8_t* row = rows + r * row_stride + c;
    auto code = shift == 0 ? hn::Zero(d) : hn::LoadU(d, row);
    for (int b = 0; b < bits; ++b) {
      const auto set = hn::TestBit(hn::LoadU(d, planes + b * plane_stride + c), row_bit);
      code = hn::Or(code, hn::IfThenElseZero(set, hn::Set(d, static_cast<std::uint8_t>(1U << (shift + b)))));
    }
    hn::StoreU(code, d, row);
  }
}

void Unslice(const std::uint8_t* planes, std::int64_t plane_stride, int shift, int bits, std::int64_t n,
             std::uint8_t* rows, std::int64_t row_stride) {
  const hn::CappedTag<std::uint8_t, 64> d;
  const hn::CappedTag<std::uint8_t, 8> few;
  const hn::CappedTag<std::uint8_t, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) UnsliceLanes(d, planes, plane_stride, shift, bits, c, rows, row_stride);
  for (; c + 8 <= n; c += 8) UnsliceLanes(few, planes, plane_stride, shift, bits, c, rows, row_stride);
  for (; c < n; ++c) UnsliceLanes(one, planes, plane_stride, shift, bits, c, rows, row_stride);
}

ColumnKernels Table() {
  return {hwy::TargetName(HWY_TARGET),
          Add,
          AddSquares,
          AddSquaredDifferences,
          Multiply,
          MinMax,
          Grid,
          Encode,
          Decode,
          Slice,
          Unslice};
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

std::vector<ColumnKernels> all_columns() {
  std::vector<ColumnKernels> tables;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    tables.push_back(HWY_DYNAMIC_DISPATCH(Table)());
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  return tables;
}

}  // namespace kvant::exact
#endif
