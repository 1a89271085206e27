// fp32 sums in the reference's order: increasing index, one accumulator, starting from 0.
#pragma once

#include <cstdint>
#include <span>

namespace kvant::exact {

// fp32(1/N): means multiply by it, they do not divide.
inline float reciprocal(std::int64_t n) {
  return static_cast<float>(1.0 / static_cast<double>(n));
}

// Sum of n values that are `stride` apart.
float sum(const float* x, std::int64_t n, std::int64_t stride = 1);

// Column sums and means of x [rows][columns] (dense).
void column_sums(const float* x, std::int64_t rows, std::int64_t columns, float* sums);
void column_means(const float* x, std::int64_t rows, std::int64_t columns, float* means);

// Population variance of every column in two passes: mean, then the mean of squared differences.
// `means` is scratch that holds the means afterwards. NaN when there are no rows.
void column_variances(const float* x, std::int64_t rows, std::int64_t columns, float* means, float* variances);

// sqrt of the sum of squares of every row of x [rows][columns].
void row_norms(const float* x, std::int64_t rows, std::int64_t columns, float* norms);

}  // namespace kvant::exact
