// fp32 sums in the reference's order: increasing index, one accumulator, starting from 0.
#pragma once

#include <cstdint>
#include <span>

#include "exact/columns.hpp"

namespace kvant::exact {

// fp32(1/N): means multiply by it, they do not divide.
inline float reciprocal(std::int64_t n) {
  return static_cast<float>(1.0 / static_cast<double>(n));
}

// Sum of n values that are `stride` apart.
float sum(const float* x, std::int64_t n, std::int64_t stride = 1);

// Means of every column.
void column_means(const ConstRows& x, std::int64_t columns, float* means);

// Population variance of every column in two passes: mean, then the mean of squared differences.
// `means` is scratch that holds the means afterwards. NaN when there are no rows.
void column_variances(const ConstRows& x, std::int64_t columns, float* means, float* variances);

// sqrt of the sum of squares of every row.
void row_norms(const ConstRows& x, std::int64_t columns, float* norms);

}  // namespace kvant::exact
