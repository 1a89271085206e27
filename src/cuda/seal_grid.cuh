// The grid of one row, as src/cache/grid.cpp finds it: its range, or the least-squares line through the codes. Eight
// neighbouring threads share a row and take every eighth value each, which are the eight lanes of the CPU's sums: all
// additions happen in the same order, so that grids and codes are the CPU's, bit by bit.
#pragma once

#include "cuda/seal_kernel.cuh"

namespace kvant::cuda {

struct Ends {
  float min, max;
};

// A code as divide_code gives it, from the inverse where that is sure: far enough from a half, and not so far outside
// the grid (a fitted one is shorter than its row) that the integer would not be in the float's low bits.
__device__ __forceinline__ int row_code(float x, const Grid& grid, int levels) {
  float rest = 0;
  const float rounded = round_code(x, grid, rest);
  const int code = static_cast<int>(__float_as_uint(rounded) - 0x4B400000U);
  if (!(rest <= 0.4999F) || abs(code) > (1 << 20)) return static_cast<int>(divide_code(x, grid, levels));
  return min(max(code, 0), levels);
}

// Rounded to the cache's type, within what images accept.
template <bool Bfloat>
__device__ __forceinline__ float stored_end(double x) {
  constexpr double limit = Bfloat ? 3.3895313892515355e38 / 2 : 65504.0;
  const float cut = __double2float_rn(fmin(fmax(x, -limit), limit));
  return ptx::widen2<Bfloat>(ptx::narrow2<Bfloat>(cut, 0)).x;
}

// Sums over the eight threads of a row, in the order of the CPU's add_lanes; every thread gets the result.
__device__ __forceinline__ double add_lanes(double x) {
  x = __dadd_rn(x, __shfl_xor_sync(0xFFFFFFFFU, x, 4));
  x = __dadd_rn(x, __shfl_xor_sync(0xFFFFFFFFU, x, 2));
  return __dadd_rn(x, __shfl_xor_sync(0xFFFFFFFFU, x, 1));
}
__device__ __forceinline__ int add_lanes(int x) {
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 4);
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 2);
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, 1);
}

// What one thread sees of a row while it is measured.
struct RowRange {
  float low = INFINITY, high = -INFINITY;

  __device__ __forceinline__ void add(float x) {
    low = fminf(low, x);
    high = fmaxf(high, x);
  }
  __device__ __forceinline__ void combine() {
    low = ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(-low)));
    low = -low;
    high = ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(high)));
  }
};

// The straight line from codes to values.
struct RowLine {
  int code = 0, square = 0;
  double value = 0, product = 0;

  __device__ __forceinline__ void add(int c, float x) {
    code += c;
    square += c * c;
    value = __dadd_rn(value, x);
    product = __dadd_rn(product, __dmul_rn(c, x));
  }
  __device__ __forceinline__ void combine() {
    code = add_lanes(code);
    square = add_lanes(square);
    value = add_lanes(value);
    product = add_lanes(product);
  }
  // The ends of the line over codes 0..levels; `range` where there is none.
  template <bool Bfloat>
  __device__ __forceinline__ Ends fit(int count, int levels, Ends range) const {
    const double codes = code;
    const double variance = __dsub_rn(__dmul_rn(count, square), __dmul_rn(codes, codes));
    if (variance == 0) return range;
    const double step = __ddiv_rn(__dsub_rn(__dmul_rn(count, product), __dmul_rn(codes, value)), variance);
    const double base = __ddiv_rn(__dsub_rn(value, __dmul_rn(step, codes)), count);
    const Ends line{stored_end<Bfloat>(base), stored_end<Bfloat>(__dadd_rn(base, __dmul_rn(levels, step)))};
    return line.max > line.min ? line : range;
  }
};

// Squared error of a row on a grid.
struct RowError {
  double sum = 0;

  __device__ __forceinline__ void add(float x, const Grid& grid, int levels) {
    const auto code = static_cast<float>(row_code(x, grid, levels));
    const double difference = __dsub_rn(x, __fadd_rn(grid.min, __fmul_rn(code, grid.step)));
    sum = __dadd_rn(sum, __dmul_rn(difference, difference));
  }
};

// The better of the two grids. each(visit) calls visit(x) for this thread's values of the row, in order; all threads of
// a warp take part, `count` is the number of values of the row.
template <bool Bfloat, class Each>
__device__ __forceinline__ Ends fit_row(int count, int levels, bool least_squares, const Each& each) {
  RowRange measured;
  each([&](float x) { measured.add(x); });
  measured.combine();
  const Ends range{stored_end<Bfloat>(measured.low), stored_end<Bfloat>(measured.high)};
  if (!least_squares) return range;
  const Grid first = Grid::of(range.min, range.max, levels);
  RowLine line;
  each([&](float x) { line.add(row_code(x, first, levels), x); });
  line.combine();
  const Ends fitted = line.fit<Bfloat>(count, levels, range);
  const Grid second = Grid::of(fitted.min, fitted.max, levels);
  RowError before, after;
  each([&](float x) {
    before.add(x, first, levels);
    after.add(x, second, levels);
  });
  return add_lanes(after.sum) < add_lanes(before.sum) ? fitted : range;
}

}  // namespace kvant::cuda
