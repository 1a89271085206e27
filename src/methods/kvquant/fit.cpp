#include "methods/kvquant/fit.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/threads.hpp"

namespace kvant::kvquant {

void FitRows::load(std::int64_t batch, std::int64_t head, Matrix& out) const {
  if (stored_rows > 0) {
    const std::int64_t heads = keys->extent[1];
    stored->decode_float(batch * heads + head, stored_first, stored_rows, stored_levels, out.data(), out.stride());
    for (std::int64_t r = 0; r < stored_rows; ++r) require_finite("stored keys", out.row(r), out.columns());
  }
  for (std::int64_t r = 0; r < rows; ++r) exact::row_of(*keys, batch, head, first + r).load(out.row(stored_rows + r));
}

namespace {

// Per channel the m-th largest magnitude of one head.
std::vector<float> head_bound(const Matrix& block, std::int64_t m) {
  const Scratch<float> scratch(float_scratch(block.rows(), m));
  std::vector<float> bound(static_cast<std::size_t>(block.stride()));
  nuq_kernels().nth_largest(block.view(), m, bound.data(), scratch.get());
  return bound;
}

// Adds every magnitude >= bound to its channel's list.
void collect(const Matrix& block, const std::vector<float>& bound, std::vector<std::vector<float>>& lists) {
  for (std::int64_t r = 0; r < block.rows(); ++r) {
    const float* row = block.row(r);
    for (std::int64_t first = 0; first < block.stride(); first += kColumnPad) {
      bool any = false;
      for (std::int64_t c = first; c < first + kColumnPad; ++c) {
        any |= std::abs(row[c]) >= bound[static_cast<std::size_t>(c)];
      }
      if (!any) continue;
      for (std::int64_t c = first; c < std::min(first + kColumnPad, block.columns()); ++c) {
        if (std::abs(row[c]) >= bound[static_cast<std::size_t>(c)]) {
          lists[static_cast<std::size_t>(c)].push_back(std::abs(row[c]));
        }
      }
    }
  }
}

}  // namespace

std::vector<float> fit_thresholds(const FitRows& rows, double fraction, int threads) {
  const std::int64_t heads = rows.keys->extent[1];
  const std::int64_t all_heads = rows.keys->extent[0] * heads;
  const std::int64_t channels = rows.keys->extent[3];
  const std::int64_t k = outlier_count(rows.total() * all_heads, fraction);
  if (k == 0) return {};
  // Every head has m values at or above its m-th largest, so at least k values reach the smallest of these bounds.
  const std::int64_t m = (k + all_heads - 1) / all_heads;
  std::vector<std::vector<float>> bounds(static_cast<std::size_t>(all_heads));
  base::parallel_for(all_heads, threads, [&](std::int64_t head, int) {
    Matrix block(rows.total(), channels);
    rows.load(head / heads, head % heads, block);
    bounds[static_cast<std::size_t>(head)] = head_bound(block, m);
  });
  std::vector<float> bound(static_cast<std::size_t>(padded_columns(channels)), std::numeric_limits<float>::infinity());
  for (const auto& own : bounds) {
    for (std::int64_t c = 0; c < channels; ++c) {
      bound[static_cast<std::size_t>(c)] =
          std::min(bound[static_cast<std::size_t>(c)], own[static_cast<std::size_t>(c)]);
    }
  }
  std::vector<std::vector<float>> lists(static_cast<std::size_t>(channels));
  Matrix block(rows.total(), channels);
  for (std::int64_t head = 0; head < all_heads; ++head) {
    rows.load(head / heads, head % heads, block);
    collect(block, bound, lists);
  }
  std::vector<float> thresholds(static_cast<std::size_t>(channels));
  for (std::size_t c = 0; c < lists.size(); ++c) {
    std::nth_element(lists[c].begin(), lists[c].begin() + (k - 1), lists[c].end(), std::greater<>());
    thresholds[c] = lists[c][static_cast<std::size_t>(k - 1)];
  }
  return thresholds;
}

std::vector<float> fit_key_levels(const FitRows& rows, int level_count, double fraction, std::int64_t sweeps,
                                  int threads) {
  const std::int64_t heads = rows.keys->extent[1];
  const std::int64_t channels = rows.keys->extent[3];
  const std::int64_t k = outlier_count(rows.total(), fraction);
  require_samples(rows.total());
  std::vector<float> levels(static_cast<std::size_t>(heads * level_count * channels));
  base::parallel_for(heads, threads, [&](std::int64_t head, int) {
    Matrix block(rows.total(), channels);
    rows.load(0, head, block);
    if (k > 0) {
      const Scratch<float> scratch(float_scratch(rows.total(), k));
      const Scratch<std::uint8_t> mask(block.padded_size());
      nuq_kernels().mark_outliers(block.view(), k, mask.get(), scratch.get());
      nuq_kernels().fill_outliers(block.view(), mask.get(), block.data());
    }
    const Scratch<float> scratch(float_scratch(rows.total(), 0));
    const Matrix fitted(level_count, channels);
    nuq_kernels().fit(block.view(), level_count, sweeps, fitted.data(), scratch.get());
    for (int l = 0; l < level_count; ++l) {
      std::copy_n(fitted.row(l), channels, levels.data() + (head * level_count + l) * channels);
    }
  });
  return levels;
}

}  // namespace kvant::kvquant
