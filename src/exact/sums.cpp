#include "exact/sums.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tiles/kernels.hpp"

namespace kvant::exact {
namespace {

constexpr int kChains = 8;  // rows summed side by side: each sum is one dependent chain, eight fill the pipeline

}  // namespace

float sum(const float* x, std::int64_t n, std::int64_t stride) {
  float total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += x[i * stride];
  return total;
}

void column_means(const ConstRows& x, std::int64_t columns_count, float* means) {
  std::fill_n(means, columns_count, 0.0F);
  columns().add(x, columns_count, means);
  columns().multiply(reciprocal(x.count), columns_count, means);
}

void column_variances(const ConstRows& x, std::int64_t columns_count, float* means, float* variances) {
  column_means(x, columns_count, means);
  std::fill_n(variances, columns_count, 0.0F);
  columns().add_squared_differences(x, means, columns_count, variances);
  columns().multiply(reciprocal(x.count), columns_count, variances);
}

void row_norms(const ConstRows& x, std::int64_t columns_count, float* norms) {
  std::vector<float> block(static_cast<std::size_t>(kChains * columns_count));
  for (std::int64_t first = 0; first < x.count; first += kChains) {
    const int rows = static_cast<int>(std::min<std::int64_t>(kChains, x.count - first));
    for (int i = 0; i < rows; ++i) {
      tiles::kernels().widen(x.row[first + i], x.type, block.data() + i * columns_count, columns_count);
    }
    float totals[kChains] = {};
    for (std::int64_t c = 0; c < columns_count; ++c) {
      for (int i = 0; i < kChains; ++i) {
        const float value = block[static_cast<std::size_t>(i * columns_count + c)];
        totals[i] += value * value;
      }
    }
    for (int i = 0; i < rows; ++i) norms[first + i] = std::sqrt(totals[i]);
  }
}

}  // namespace kvant::exact
