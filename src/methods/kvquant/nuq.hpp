// Non-uniform quantization on dense fp32 matrices, one column per SIMD lane, compiled per instruction set (nuq.cpp).
// Every lane does the reference's fp32 operations in the reference's order (sums through the rows in increasing order,
// true divisions, nothing fused), so every instruction set gives the reference's bits.
//
// Matrices are [rows][stride]: stride is a multiple of kColumnPad, the columns up to it are readable and writable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvant::kvquant {

constexpr int kColumnPad = 32;  // lanes of the widest vector of 16-bit elements
constexpr int kMaxBits = 8;
constexpr int kMaxLevels = 1 << kMaxBits;

// A block of columns, all of the same length.
struct Columns {
  const float* x = nullptr;  // [rows][stride]
  std::int64_t rows = 0;
  std::int64_t stride = 0;
  std::int64_t columns = 0;  // those that count; the rest up to `stride` is padding
};

// Codes of rows as bit slices: plane b of a row holds bit b of its columns, (columns + 7) / 8 bytes; planes of a row
// follow each other. Readers may read up to kSliceSlack bytes beyond the last row.
constexpr std::size_t kSliceSlack = 8;
constexpr std::size_t slice_bytes(std::int64_t columns, int bits) {
  return static_cast<std::size_t>((columns + 7) / 8) * static_cast<std::size_t>(bits);
}

struct NuqKernels {
  std::string name;

  // mask[row * stride + column] = 1 for the k largest |x| of each column, ties to the lower row; 0 elsewhere.
  // 1 <= k <= rows. scratch: float_scratch(rows, k) floats.
  void (*mark_outliers)(const Columns& in, std::int64_t k, std::uint8_t* mask, float* scratch) = nullptr;
  // out[column] = the k-th largest |x| of the column
  void (*nth_largest)(const Columns& in, std::int64_t k, float* out, float* scratch) = nullptr;
  // out (may be x) = mask ? mean of the column : x
  void (*fill_outliers)(const Columns& in, const std::uint8_t* mask, float* out) = nullptr;
  // levels[l * in.stride + column], ascending. scratch as above (k = 0).
  void (*fit)(const Columns& in, int level_count, std::int64_t sweeps, float* levels, float* scratch) = nullptr;
  // codes[row * in.stride + column] = midpoints of adjacent levels strictly below x
  void (*encode)(const Columns& in, int level_count, const float* levels, std::uint8_t* codes) = nullptr;

  // One row of codes to and from bit slices. Codes are readable (writable) up to a multiple of kColumnPad.
  void (*slice)(const std::uint8_t* codes, std::int64_t columns, int bits, std::uint8_t* slices) = nullptr;
  void (*unslice)(const std::uint8_t* slices, std::int64_t columns, int bits, std::uint8_t* codes) = nullptr;

  // out[row * out_stride + column] = table[code][column], table is [levels][table_stride] (padded to kColumnPad)
  void (*look_up_16)(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits,
                     const std::uint16_t* table, std::int64_t table_stride, std::uint16_t* out,
                     std::int64_t out_stride) = nullptr;
  void (*look_up_32)(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits,
                     const std::uint32_t* table, std::int64_t table_stride, std::uint32_t* out,
                     std::int64_t out_stride) = nullptr;
  // The same with a table [rows][levels]: every row has its own levels for all of its columns.
  void (*look_up_rows_16)(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits,
                          const std::uint16_t* table, std::uint16_t* out, std::int64_t out_stride) = nullptr;
  void (*look_up_rows_32)(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits,
                          const std::uint32_t* table, std::uint32_t* out, std::int64_t out_stride) = nullptr;
};

// The best set for this CPU, and all sets that it can run (best first) for tests.
const NuqKernels& nuq_kernels();
const std::vector<NuqKernels>& all_nuq_kernels();

// Floats of scratch for mark_outliers (k > 0) and fit (k = 0) over `rows` rows.
std::size_t float_scratch(std::int64_t rows, std::int64_t k);

// Outliers per vector of n samples: min(max(1, round(n * fraction)), n - 1), 0 when fraction <= 0 or n < 2. Rounds half
// to even, in double.
std::int64_t outlier_count(std::int64_t n, double fraction);

// Sorted sample that level l of `level_count` starts from: clip(rint(fl(fl((l + .5) / L) * (n - 1))), 0, n - 1).
std::int64_t first_sample(int level, int level_count, std::int64_t n);

}  // namespace kvant::kvquant
