// The grid of one row, as src/cache/grid.cpp finds it: its range, or the least-squares line through the codes. Eight
// neighbouring threads share a row and take every eighth value each, which are the eight lanes of the CPU's sums: all
// additions happen in the same order, so that grids and codes are the CPU's, bit by bit.
#pragma once

#include "cuda/seal_pack.cuh"

namespace kvant::cuda {

constexpr int kRowLanes = 8;  // threads of a row

struct Ends {
  float min, max;
};

static __device__ __noinline__ std::uint32_t exact_row_code(float x, Grid grid, int levels) {
  return kRowMagicBits + divide_code(x, grid, levels);
}

// Codes of four values as divide_code gives them, each in the low bits of 1.5 * 2^23: from the inverse, or where that
// is not sure, by the division. Values far outside the grid (a fitted one is shorter than its row) are cut first.
__device__ __forceinline__ void row_codes(const float (&x)[4], const Grid& grid, int levels,
                                          std::uint32_t (&codes)[4]) {
  const auto top = static_cast<float>(levels);
  float rest = grid.inverse < INFINITY ? 0.0F : 1.0F;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float place = fminf(fmaxf(__fmul_rn(__fsub_rn(x[i], grid.min), grid.inverse), 0.0F), top);
    const float rounded = __fadd_rn(place, kRowMagic);
    rest = fmaxf(rest, fabsf(place - (rounded - kRowMagic)));
    codes[i] = __float_as_uint(rounded);
  }
  // The place is right to 5e-5 and the CPU's to 3e-5: at most 255 levels, and inverse, difference and product are off
  // by half an ulp each.
  if (rest > 0.4999F) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = exact_row_code(x[i], grid, levels);
  }
}

// Rounded to the cache's type, within what images accept.
template <bool Bfloat>
__device__ __forceinline__ float stored_end(double x) {
  constexpr double limit = Bfloat ? 3.3895313892515355e38 / 2 : 65504.0;
  const float cut = __double2float_rn(fmin(fmax(x, -limit), limit));
  return ptx::widen2<Bfloat>(ptx::narrow2<Bfloat>(cut, 0)).x;
}

// The same for an end of a row's range, which is never a minus zero.
template <bool Bfloat>
__device__ __forceinline__ float range_end(float x) {
  return __fadd_rn(stored_end<Bfloat>(x), 0.0F);
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

// The straight line from codes to values.
struct RowLine {
  int code = 0, square = 0;
  double value = 0, product = 0;

  __device__ __forceinline__ void add(std::uint32_t bits, double x) {
    const auto c = static_cast<int>(bits - kRowMagicBits);
    code += c;
    square += c * c;
    value = __dadd_rn(value, x);
    // The bits behind a double's 2^52 are a whole number. Code times value is exact, so one rounding is the CPU's.
    const double whole = __hiloint2double(0x43300000, static_cast<int>(bits)) - (0x1p52 + kRowMagicBits);
    product = __fma_rn(whole, x, product);
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

  __device__ __forceinline__ void add(std::uint32_t bits, double x, const Grid& grid) {
    const float code = __uint_as_float(bits) - kRowMagic;
    const double difference = __dsub_rn(x, __fadd_rn(grid.min, __fmul_rn(code, grid.step)));
    sum = __dadd_rn(sum, __dmul_rn(difference, difference));
  }
};

// Rows as floats: of halves, of floats.
template <bool Bfloat>
struct HalfRow {
  const std::uint16_t* data;
  __device__ __forceinline__ float operator()(int i) const { return ptx::widen2<Bfloat>(data[i]).x; }
};
struct FloatRow {
  const float* data;
  __device__ __forceinline__ float operator()(int i) const { return data[i]; }
};

// A thread's values of a row: value k is row(k * stride), 0 <= k < count.
template <class Row>
struct RowValues {
  Row row;
  int stride;
  int count;

  // visit(first, four values, how many of them there are).
  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll 1
    for (int first = 0; first < count; first += 4) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = row(min(first + i, count - 1) * stride);
      visit(first, x, min(4, count - first));
    }
  }
};

// The better of two grids. `range` is that of the whole row, `count` how many values it has; all threads of a warp take
// part.
template <bool Bfloat, class Row>
__device__ __forceinline__ Ends fit_row(const RowValues<Row>& values, int count, int levels, bool least_squares,
                                        Ends range) {
  range = {range_end<Bfloat>(range.min), range_end<Bfloat>(range.max)};
  if (!least_squares) return range;
  const Grid first = Grid::of(range.min, range.max, levels);
  RowLine line;
  RowError before, after;
  values.each([&](int, const float(&x)[4], int live) {
    std::uint32_t codes[4];
    row_codes(x, first, levels, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= live) break;
      line.add(codes[i], x[i]);
      before.add(codes[i], x[i], first);
    }
  });
  __syncwarp();
  line.combine();
  const Ends fitted = line.fit<Bfloat>(count, levels, range);
  const Grid second = Grid::of(fitted.min, fitted.max, levels);
  values.each([&](int, const float(&x)[4], int live) {
    std::uint32_t codes[4];
    row_codes(x, second, levels, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= live) break;
      after.add(codes[i], x[i], second);
    }
  });
  __syncwarp();
  return add_lanes(after.sum) < add_lanes(before.sum) ? fitted : range;
}

}  // namespace kvant::cuda
