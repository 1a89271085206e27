#include "cache/feedback.hpp"

#include <algorithm>
#include <numeric>

#include "tiles/kernels.hpp"

namespace kvant::cache {

using tiles::kernels;

namespace {

// Added to the diagonal, relative to it: queries to come are not those that were seen. Measured on keys and queries of
// SmolLM2 (divergence of attention, over that without feedback): 0.01: 0.94, 0.1: 0.90, 0.3: 0.88, 0.5: 0.87, 1: 0.87,
// 2: 0.89.
constexpr float kDamping = 0.5F;

// A moment's entry from its lower triangle.
float entry(const float* triangle, int i, int j) {
  return triangle[triangle_size(std::max(i, j)) + static_cast<std::size_t>(std::min(i, j))];
}

}  // namespace

void add_moments(const float* queries, int count, int channels, float* triangle) {
  std::vector<float> column(static_cast<std::size_t>(count));
  for (int i = 0; i < channels; ++i) {
    for (int t = 0; t < count; ++t) column[static_cast<std::size_t>(t)] = queries[std::ptrdiff_t{t} * channels + i];
    kernels().add_rows(queries, channels, column.data(), count, i + 1, triangle + triangle_size(i));
  }
}

// Whose errors weigh most comes first: all others can make up for it. By channel number it was 4 % worse, by step alone
// or by the pivots of the factorization as good.
ErrorFeedback::ErrorFeedback(const float* moment, const std::vector<float>& step)
    : channels_(static_cast<int>(step.size())), order_(step.size()), factors_(step.size() * step.size()) {
  std::vector<float> weight(step.size());
  for (std::size_t c = 0; c < step.size(); ++c) {
    weight[c] = entry(moment, static_cast<int>(c), static_cast<int>(c)) * step[c] * step[c];
  }
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    return weight[static_cast<std::size_t>(a)] > weight[static_cast<std::size_t>(b)];
  });
  factorize(moment);
}

// From the last channel to the first: its row of what is left of M is its own minus what those behind it explain.
void ErrorFeedback::factorize(const float* moment) {
  std::vector<float> pivots(order_.size()), taken(order_.size());
  for (int i = channels_ - 1; i >= 0; --i) {
    float* const row = factors_.data() + std::ptrdiff_t{i} * channels_;
    for (int j = 0; j <= i; ++j) row[j] = entry(moment, channel(i), channel(j));
    const float least = kDamping * row[i];
    row[i] += least;
    const float* const behind = row + channels_;
    const float* const pivots_behind = pivots.data() + i + 1;
    const int count = channels_ - 1 - i;
    for (int k = 0; k < count; ++k) {
      const float* const other = behind + std::ptrdiff_t{k} * channels_;
      taken[static_cast<std::size_t>(k)] = -pivots_behind[k] * other[i];
    }
    if (count > 0) kernels().add_rows(behind, channels_, taken.data(), count, i + 1, row);
    // What rounding, or moments of a forged image, may have made of it.
    const float pivot = std::max(row[i], least);
    pivots[static_cast<std::size_t>(i)] = pivot;
    for (int j = 0; j < i; ++j) row[j] = pivot > 0 ? row[j] / pivot : 0.0F;
  }
}

void ErrorFeedback::correct(int i, const float* errors, std::int64_t stride, int n, Endpoints grid, float* x) const {
  kernels().add_rows(errors, stride, factors_.data() + std::ptrdiff_t{i} * channels_, i, n, x);
  // No code lies beyond the grid; NaN, which only forged moments make, becomes its minimum.
  for (int t = 0; t < n; ++t) x[t] = x[t] > grid.min ? std::min(x[t], grid.max) : grid.min;
}

}  // namespace kvant::cache
