// Loops over the columns of rows, one column per SIMD lane, compiled per instruction set (columns.cpp). Every lane does
// the reference's fp32 operations in the reference's order, so every instruction set gives the same bits: sums go
// through the rows in increasing order, divisions are divisions, nothing is fused.
#pragma once

#include <cstdint>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::exact {

// Rows of one type, wherever each of them lies; the channels of a row are contiguous.
struct ConstRows {
  const void* const* row = nullptr;
  std::int64_t count = 0;
  DType type = DType::f32;

  ConstRows part(std::int64_t first, std::int64_t n) const { return {row + first, n, type}; }
};
struct Rows {
  void* const* row = nullptr;
  std::int64_t count = 0;
  DType type = DType::f32;

  Rows part(std::int64_t first, std::int64_t n) const { return {row + first, n, type}; }
};

// What a reconstructed value goes through on its way to the output's type. The reference's Kitty rounds to fp16 first.
enum class Rounding { direct, through_half };

// Minimum, scale and highest code of every column of one group.
struct GridView {
  const float* min = nullptr;
  const float* scale = nullptr;
  const float* levels = nullptr;
};

struct ColumnKernels {
  const char* target = "";  // Highway's name of the instruction set

  // sum[c] += x[r][c], row after row
  void (*add)(const ConstRows& x, std::int64_t n, float* sum) = nullptr;
  // sum[c] += x[r][c] * x[r][c]
  void (*add_squares)(const ConstRows& x, std::int64_t n, float* sum) = nullptr;
  // sum[c] += (x[r][c] - mean[c])^2
  void (*add_squared_differences)(const ConstRows& x, const float* mean, std::int64_t n, float* sum) = nullptr;
  // x[c] *= factor
  void (*multiply)(float factor, std::int64_t n, float* x) = nullptr;

  // Minimum and maximum of every column over at least one row; NaN wins, the first of +0 and -0 stays.
  void (*min_max)(const ConstRows& x, std::int64_t n, float* min, float* max) = nullptr;
  // scale[c] = max((max[c] - min[c]) / levels[c], 1e-8), NaN kept
  void (*grid)(const float* min, const float* max, const float* levels, std::int64_t n, float* scale) = nullptr;
  // codes[r * stride + c] = clip(rint((x[r][c] - min[c]) / scale[c]), 0, levels[c]) for levels <= 255; NaN gives 0
  void (*encode)(const ConstRows& x, const GridView& grid, std::int64_t n, std::uint8_t* codes,
                 std::int64_t stride) = nullptr;
  // out[r][c] = codes[r * stride + c] * scale[c] + min[c], rounded once, or to fp16 before
  void (*decode)(const std::uint8_t* codes, std::int64_t stride, const GridView& grid, std::int64_t n, const Rows& out,
                 Rounding rounding) = nullptr;

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
