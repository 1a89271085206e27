#include "exact/sums.hpp"

#include <algorithm>
#include <cmath>

#include "exact/columns.hpp"

namespace kvant::exact {
namespace {

constexpr int kChains = 8;  // rows summed side by side: each sum is one dependent chain, eight fill the pipeline

}  // namespace

float sum(const float* x, std::int64_t n, std::int64_t stride) {
  float total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += x[i * stride];
  return total;
}

void column_sums(const float* x, std::int64_t rows, std::int64_t columns_count, float* sums) {
  std::fill_n(sums, columns_count, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) columns().add(x + r * columns_count, columns_count, sums);
}

void column_means(const float* x, std::int64_t rows, std::int64_t columns_count, float* means) {
  column_sums(x, rows, columns_count, means);
  columns().multiply(reciprocal(rows), columns_count, means);
}

void column_variances(const float* x, std::int64_t rows, std::int64_t columns_count, float* means, float* variances) {
  column_means(x, rows, columns_count, means);
  std::fill_n(variances, columns_count, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    columns().add_squared_differences(x + r * columns_count, means, columns_count, variances);
  }
  columns().multiply(reciprocal(rows), columns_count, variances);
}

void row_norms(const float* x, std::int64_t rows, std::int64_t columns_count, float* norms) {
  std::int64_t r = 0;
  for (; r + kChains <= rows; r += kChains) {
    float totals[kChains] = {};
    const float* block = x + r * columns_count;
    for (std::int64_t c = 0; c < columns_count; ++c) {
      for (int i = 0; i < kChains; ++i) {
        const float value = block[i * columns_count + c];
        totals[i] += value * value;
      }
    }
    for (int i = 0; i < kChains; ++i) norms[r + i] = std::sqrt(totals[i]);
  }
  for (; r < rows; ++r) {
    float total = 0;
    for (std::int64_t c = 0; c < columns_count; ++c) total += x[r * columns_count + c] * x[r * columns_count + c];
    norms[r] = std::sqrt(total);
  }
}

}  // namespace kvant::exact
