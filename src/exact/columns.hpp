// Loops over the columns of a row, one column per SIMD lane, compiled per instruction set (columns.cpp). Every lane
// does the reference's fp32 operations in the reference's order, so every instruction set gives the same bits: sums go
// through the rows in increasing order, divisions are divisions, nothing is fused.
#pragma once

#include <cstdint>
#include <vector>

namespace kvant::exact {

struct ColumnKernels {
  const char* target = "";  // Highway's name of the instruction set

  // sum[c] += x[c]
  void (*add)(const float* x, std::int64_t n, float* sum) = nullptr;
  // sum[c] += x[c] * x[c]
  void (*add_squares)(const float* x, std::int64_t n, float* sum) = nullptr;
  // sum[c] += (x[c] - mean[c])^2
  void (*add_squared_differences)(const float* x, const float* mean, std::int64_t n, float* sum) = nullptr;
  // x[c] *= factor
  void (*multiply)(float factor, std::int64_t n, float* x) = nullptr;

  // Minimum and maximum of every column over n_rows >= 1 rows; NaN wins, the first of +0 and -0 stays.
  void (*min_max)(const float* const* rows, std::int64_t n_rows, std::int64_t n, float* min, float* max) = nullptr;
  // scale[c] = max((max[c] - min[c]) / levels[c], 1e-8), NaN kept
  void (*grid)(const float* min, const float* max, const float* levels, std::int64_t n, float* scale) = nullptr;
  // codes[c] = clip(rint((x[c] - min[c]) / scale[c]), 0, levels[c]) for levels <= 255; NaN gives 0
  void (*encode)(const float* x, const float* min, const float* scale, const float* levels, std::int64_t n,
                 std::uint8_t* codes) = nullptr;
  // x[c] = codes[c] * scale[c] + min[c]
  void (*decode)(const std::uint8_t* codes, const float* min, const float* scale, std::int64_t n, float* x) = nullptr;

  // planes[b][c], b < bits: bit r is bit `shift + b` of rows[r][c], r < 8 (missing rows: zero rows).
  void (*slice)(const std::uint8_t* rows, std::int64_t row_stride, int shift, int bits, std::int64_t n,
                std::uint8_t* planes, std::int64_t plane_stride) = nullptr;
  // The inverse of slice: with shift 0 it writes 8 rows, else it ORs the bits into them.
  void (*unslice)(const std::uint8_t* planes, std::int64_t plane_stride, int shift, int bits, std::int64_t n,
                  std::uint8_t* rows, std::int64_t row_stride) = nullptr;
};

// The table for this CPU.
const ColumnKernels& columns();

// The tables of every instruction set of this CPU, for tests. Not thread-safe.
std::vector<ColumnKernels> all_columns();

}  // namespace kvant::exact
