// The per-column forms: nearest level by distance, levels of the sweeps unsorted. The cache does not use them; they are
// written for their rules, not for speed.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/half.hpp"
#include "kvant/kvquant.hpp"
#include "methods/kvquant/arguments.hpp"
#include "methods/kvquant/matrix.hpp"

namespace kvant::kvquant {
namespace {

// argmin over |x - level|, the lowest index among equals.
int nearest(float x, const std::vector<float>& levels) {
  int best = 0;
  float distance = std::abs(x - levels[0]);
  for (std::size_t l = 1; l < levels.size(); ++l) {
    const float other = std::abs(x - levels[l]);
    if (other < distance) {
      distance = other;
      best = static_cast<int>(l);
    }
  }
  return best;
}

std::vector<float> column_of(const Matrix& matrix, std::int64_t column) {
  std::vector<float> values(static_cast<std::size_t>(matrix.rows()));
  for (std::int64_t r = 0; r < matrix.rows(); ++r) values[static_cast<std::size_t>(r)] = matrix.row(r)[column];
  return values;
}

std::vector<float> fit_column(const std::vector<float>& samples, int level_count, std::int64_t sweeps) {
  std::vector<float> sorted = samples;
  std::stable_sort(sorted.begin(), sorted.end());
  std::vector<float> levels(static_cast<std::size_t>(level_count));
  const auto n = static_cast<std::int64_t>(samples.size());
  for (int l = 0; l < level_count; ++l) {
    levels[static_cast<std::size_t>(l)] = sorted[static_cast<std::size_t>(first_sample(l, level_count, n))];
  }
  std::vector<float> sums(levels.size());
  std::vector<float> counts(levels.size());
  for (std::int64_t sweep = 0; sweep < std::max<std::int64_t>(sweeps, 1); ++sweep) {
    std::fill(sums.begin(), sums.end(), 0.0F);
    std::fill(counts.begin(), counts.end(), 0.0F);
    for (const float x : samples) {
      const auto l = static_cast<std::size_t>(nearest(x, levels));
      sums[l] += x;
      counts[l] += 1.0F;
    }
    for (std::size_t l = 0; l < levels.size(); ++l) {
      if (counts[l] > 0) levels[l] = sums[l] / counts[l];  // an empty level keeps its place
    }
  }
  std::stable_sort(levels.begin(), levels.end());
  return levels;
}

Matrix load(const char* name, const ConstArray& x) {
  const BlockShape shape = block_shape(name, x, 2);
  Matrix block(shape.rows, shape.columns);
  load_rows(name, x, 0, 0, block);
  return block;
}

Matrix load_level_table(const ConstArray& x, const ConstArray& levels) {
  require_levels(levels, 2, block_shape("x", x, 2));
  Matrix table(levels.extent[0], levels.extent[1]);
  for (std::int64_t l = 0; l < table.rows(); ++l) exact::row_of(levels, 0, 0, l).load(table.row(l));
  return table;
}

float through_half(float x) {
  return base::half_to_float(base::float_to_half(x));
}

}  // namespace

void fit_nuq_levels(const ConstArray& x, std::int64_t bits, std::int64_t n_iters, const Strided<float>& levels) {
  const BlockShape shape = block_shape("x", x, 2);
  exact::require_bits("bits", bits);
  require_samples(shape.rows);
  const int level_count = 1 << bits;
  require_block("levels", levels, 2, {1, level_count, shape.columns});
  const Matrix block = load("x", x);
  for (std::int64_t c = 0; c < shape.columns; ++c) {
    const std::vector<float> fitted = fit_column(column_of(block, c), level_count, n_iters);
    for (int l = 0; l < level_count; ++l) {
      levels.data[l * levels.stride[0] + c * levels.stride[1]] = fitted[static_cast<std::size_t>(l)];
    }
  }
}

void quantize_nuq(const ConstArray& x, const ConstArray& levels, const Strided<std::int32_t>& codes) {
  const BlockShape shape = block_shape("x", x, 2);
  require_block("codes", codes, 2, shape);
  const Matrix table = load_level_table(x, levels);
  const Matrix block = load("x", x);
  for (std::int64_t c = 0; c < shape.columns; ++c) {
    const std::vector<float> column = column_of(table, c);
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      codes.data[r * codes.stride[0] + c * codes.stride[1]] = nearest(block.row(r)[c], column);
    }
  }
}

void nuq_quant_dequant(const ConstArray& x, std::int64_t bits, double outlier_fraction, std::int64_t lloyd_iters,
                       const Array& out) {
  const BlockShape shape = block_shape("x", x, 2);
  require_block("out", out, 2, shape);
  exact::require_bits("bits", bits);
  require_fraction("outlier_fraction", outlier_fraction);
  require_samples(shape.rows);
  const Matrix block = load("x", x);
  const std::int64_t k = kvquant::outlier_count(shape.rows, outlier_fraction);
  const Matrix inliers(shape.rows, shape.columns);
  std::copy_n(block.data(), block.padded_size(), inliers.data());
  std::vector<std::uint8_t> marked(block.padded_size(), 0);
  if (k > 0) {
    const Scratch<float> scratch(float_scratch(shape.rows, k));
    nuq_kernels().mark_outliers(block.view(), k, marked.data(), scratch.get());
    nuq_kernels().fill_outliers(block.view(), marked.data(), inliers.data());
  }
  for (std::int64_t c = 0; c < shape.columns; ++c) {
    const std::vector<float> levels = fit_column(column_of(inliers, c), 1 << bits, lloyd_iters);
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      const bool outlier = marked[static_cast<std::size_t>(r * block.stride() + c)] != 0;
      float& cell = inliers.row(r)[c];
      cell = through_half(outlier ? block.row(r)[c] : levels[static_cast<std::size_t>(nearest(cell, levels))]);
    }
  }
  for (std::int64_t r = 0; r < shape.rows; ++r) exact::row_of(out, 0, 0, r).store(inliers.row(r));
}

double nuq_distortion(const ConstArray& x, const ConstArray& levels) {
  const BlockShape shape = block_shape("x", x, 2);
  const Matrix table = load_level_table(x, levels);
  const Matrix block = load("x", x);
  require_samples(shape.rows * shape.columns);
  std::vector<std::vector<float>> columns;
  for (std::int64_t c = 0; c < shape.columns; ++c) columns.push_back(column_of(table, c));
  float sum = 0;
  for (std::int64_t r = 0; r < shape.rows; ++r) {
    for (std::int64_t c = 0; c < shape.columns; ++c) {
      const std::vector<float>& own = columns[static_cast<std::size_t>(c)];
      const float value = block.row(r)[c];
      const float error = value - through_half(own[static_cast<std::size_t>(nearest(value, own))]);
      sum += error * error;
    }
  }
  return sum * static_cast<float>(1.0 / static_cast<double>(shape.rows * shape.columns));
}

}  // namespace kvant::kvquant
