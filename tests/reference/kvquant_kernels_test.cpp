// Every instruction set's lanes against the rules written out for one column.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "methods/kvquant/matrix.hpp"

namespace kvant::kvquant {
namespace {

using Column = std::vector<float>;

Column column_of(const Matrix& matrix, std::int64_t c) {
  Column result;
  for (std::int64_t r = 0; r < matrix.rows(); ++r) result.push_back(matrix.row(r)[c]);
  return result;
}

Matrix random_matrix(std::int64_t rows, std::int64_t columns, bool ties, std::mt19937& random) {
  Matrix result(rows, columns);
  std::normal_distribution<float> normal;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const float x = normal(random);
      result.row(r)[c] = ties ? std::nearbyint(2 * x) / 2 : x;
    }
  }
  return result;
}

// Stable order by descending |x|.
std::vector<char> plain_mask(const Column& x, std::int64_t k) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(x[a]) > std::abs(x[b]); });
  std::vector<char> mask(x.size(), 0);
  for (std::int64_t i = 0; i < k; ++i) mask[order[static_cast<std::size_t>(i)]] = 1;
  return mask;
}

float mean_of(const Column& x) {
  float sum = 0;
  for (const float value : x) sum += value;
  return sum * static_cast<float>(1.0 / static_cast<double>(x.size()));
}

// numerics.md 4.7.
Column plain_fit(const Column& x, int level_count, int sweeps) {
  const float mean = mean_of(x);
  Column y;
  for (const float value : x) y.push_back(value - mean);
  float total = 0;
  for (const float value : y) total += value;
  Column sorted = y;
  std::sort(sorted.begin(), sorted.end());
  Column levels;
  for (int l = 0; l < level_count; ++l) {
    levels.push_back(
        sorted[static_cast<std::size_t>(first_sample(l, level_count, static_cast<std::int64_t>(x.size())))]);
  }
  for (int sweep = 0; sweep < std::max(sweeps, 1); ++sweep) {
    std::sort(levels.begin(), levels.end());
    const Column before = levels;
    float count_below = 0;
    float sum_below = 0;
    for (std::size_t l = 0; l < levels.size(); ++l) {
      float count = static_cast<float>(x.size());
      float sum = total;
      if (l + 1 < levels.size()) {
        const float middle = 0.5F * (before[l] + before[l + 1]);
        count = sum = 0;
        for (const float value : y) {
          if (value <= middle) sum += value, count += 1;
        }
      }
      if (count - count_below > 0) levels[l] = (sum - sum_below) / (count - count_below);
      count_below = count;
      sum_below = sum;
    }
  }
  std::sort(levels.begin(), levels.end());
  for (float& level : levels) level += mean;
  return levels;
}

void check_split(const NuqKernels& kernels, const Matrix& x, std::int64_t k) {
  std::vector<std::uint8_t> mask(x.padded_size(), 7);
  const Scratch<float> scratch(float_scratch(x.rows(), k));
  const Matrix filled(x.rows(), x.columns());
  std::vector<float> nth(static_cast<std::size_t>(x.stride()));
  kernels.mark_outliers(x.view(), k, mask.data(), scratch.get());
  kernels.fill_outliers(x.view(), mask.data(), filled.data());
  kernels.nth_largest(x.view(), k, nth.data(), scratch.get());
  for (std::int64_t c = 0; c < x.columns(); ++c) {
    const Column column = column_of(x, c);
    const std::vector<char> want = plain_mask(column, k);
    Column sorted = column;
    for (float& value : sorted) value = std::abs(value);
    std::sort(sorted.rbegin(), sorted.rend());
    ASSERT_EQ(nth[static_cast<std::size_t>(c)], sorted[static_cast<std::size_t>(k - 1)]);
    for (std::int64_t r = 0; r < x.rows(); ++r) {
      ASSERT_EQ(mask[static_cast<std::size_t>(r * x.stride() + c)], want[static_cast<std::size_t>(r)]);
      ASSERT_EQ(filled.row(r)[c], want[static_cast<std::size_t>(r)] != 0 ? mean_of(column) : x.row(r)[c]);
    }
  }
}

void check_levels(const NuqKernels& kernels, const Matrix& x, int bits, int sweeps) {
  const int level_count = 1 << bits;
  const Scratch<float> scratch(float_scratch(x.rows(), 0));
  const Matrix levels(level_count, x.columns());
  std::vector<std::uint8_t> codes(x.padded_size());
  kernels.fit(x.view(), level_count, sweeps, levels.data(), scratch.get());
  kernels.encode(x.view(), level_count, levels.data(), codes.data());
  for (std::int64_t c = 0; c < x.columns(); ++c) {
    const Column want = plain_fit(column_of(x, c), level_count, sweeps);
    for (int l = 0; l < level_count; ++l) ASSERT_EQ(levels.row(l)[c], want[static_cast<std::size_t>(l)]);
    for (std::int64_t r = 0; r < x.rows(); ++r) {
      int code = 0;
      for (std::size_t l = 0; l + 1 < want.size(); ++l) code += 0.5F * (want[l] + want[l + 1]) < x.row(r)[c] ? 1 : 0;
      ASSERT_EQ(codes[static_cast<std::size_t>(r * x.stride() + c)], code);
    }
  }
}

void check_slices(const NuqKernels& kernels, std::int64_t columns, int bits, std::mt19937& random) {
  const std::int64_t rows = 3;
  const std::int64_t stride = padded_columns(columns);
  const int level_count = 1 << bits;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * stride), 0);
  for (auto& code : codes) code = static_cast<std::uint8_t>(random() % static_cast<unsigned>(level_count));
  std::vector<std::uint8_t> slices(static_cast<std::size_t>(rows) * slice_bytes(columns, bits) + kSliceSlack, 0xFF);
  std::vector<std::uint32_t> wide(static_cast<std::size_t>(level_count * stride));
  for (auto& entry : wide) entry = static_cast<std::uint32_t>(random());
  const std::vector<std::uint16_t> narrow(wide.begin(), wide.end());
  for (std::int64_t r = 0; r < rows; ++r) {
    kernels.slice(codes.data() + r * stride, columns, bits,
                  slices.data() + static_cast<std::size_t>(r) * slice_bytes(columns, bits));
  }
  std::vector<std::uint32_t> out32(static_cast<std::size_t>(rows * stride));
  std::vector<std::uint16_t> out16(out32.size());
  std::vector<std::uint32_t> rows32(out32.size());
  std::vector<std::uint16_t> rows16(out32.size());
  kernels.look_up_32(slices.data(), rows, columns, bits, wide.data(), stride, out32.data(), stride);
  kernels.look_up_16(slices.data(), rows, columns, bits, narrow.data(), stride, out16.data(), stride);
  kernels.look_up_rows_32(slices.data(), rows, columns, bits, wide.data(), rows32.data(), stride);
  kernels.look_up_rows_16(slices.data(), rows, columns, bits, narrow.data(), rows16.data(), stride);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto at = static_cast<std::size_t>(r * stride + c);
      const std::size_t entry = static_cast<std::size_t>(codes[at] * stride + c);
      const std::size_t row_entry = static_cast<std::size_t>(r * level_count + codes[at]);
      ASSERT_EQ(out32[at], wide[entry]);
      ASSERT_EQ(out16[at], narrow[entry]);
      ASSERT_EQ(rows32[at], wide[row_entry]);
      ASSERT_EQ(rows16[at], narrow[row_entry]);
    }
  }
}

TEST(KvquantKernels, EverySetFollowsTheRules) {
  for (const NuqKernels& kernels : all_nuq_kernels()) {
    SCOPED_TRACE(kernels.name);
    std::mt19937 random(5);
    for (const std::int64_t rows : {1, 2, 3, 17, 64, 100, 257}) {
      for (const bool ties : {false, true}) {
        const Matrix x = random_matrix(rows, rows % 2 == 0 ? 33 : 20, ties, random);
        for (const std::int64_t k : {std::int64_t{1}, rows / 8, rows - 1}) {
          if (k == 0) continue;
          ASSERT_NO_FATAL_FAILURE(check_split(kernels, x, k)) << rows << " rows, " << k << " outliers";
        }
        for (const int bits : {1, 2, 3, 4, 6}) {
          ASSERT_NO_FATAL_FAILURE(check_levels(kernels, x, bits, bits == 3 ? 8 : 2)) << rows << " rows, " << bits;
        }
      }
    }
    for (const std::int64_t columns : {1, 7, 8, 9, 24, 31, 32, 33, 64, 100, 128, 300}) {
      for (int bits = 1; bits <= kMaxBits; ++bits) {
        ASSERT_NO_FATAL_FAILURE(check_slices(kernels, columns, bits, random)) << columns << " columns, " << bits;
      }
    }
  }
}

TEST(KvquantKernels, CountsOfOutliersAndFirstSamples) {
  EXPECT_EQ(outlier_count(50, .01), 1);
  EXPECT_EQ(outlier_count(150, .01), 2);
  EXPECT_EQ(outlier_count(250, .01), 2);
  EXPECT_EQ(outlier_count(350, .01), 4);
  EXPECT_EQ(outlier_count(1024, .01), 10);
  EXPECT_EQ(outlier_count(4096, .01), 41);
  EXPECT_EQ(outlier_count(10, .25), 2);
  EXPECT_EQ(outlier_count(2, .9), 1);
  EXPECT_EQ(outlier_count(12, 1e300), 11);
  EXPECT_EQ(outlier_count(1, .5), 0);
  EXPECT_EQ(outlier_count(12, -1), 0);
  const std::vector<std::int64_t> want = {4, 12, 20, 28, 36, 44, 52, 60};
  for (int l = 0; l < 8; ++l) EXPECT_EQ(first_sample(l, 8, 65), want[static_cast<std::size_t>(l)]);
}

}  // namespace
}  // namespace kvant::kvquant
