// Sixteen columns of an exact page (channels of the keys, tokens of the values) in one warp, over all their rows,
// straight from the fragments: a lane has four columns, 2t, 2t + 1, 2t + 8 and 2t + 9, and of each every eighth row
// from g on. So ranges, codes and code words stay in registers.
//
// Loops over row tiles stay loops: every instruction runs a few times only, and fetching it costs more than running it.
#pragma once

#include "cuda/seal_pack.cuh"

namespace kvant::cuda {

// Four columns of a lane as two pairs of halves: 2t and 2t + 1, 2t + 8 and 2t + 9.
struct ColumnPairs {
  std::uint32_t pair[2];
};

template <bool Bfloat>
__device__ __forceinline__ std::uint32_t packed_min(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  if constexpr (Bfloat) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}
template <bool Bfloat>
__device__ __forceinline__ std::uint32_t packed_max(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  if constexpr (Bfloat) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

// No minus zeros: which of two zeros is the smaller one is nobody's business, and pages never hold it.
template <bool Bfloat>
__device__ __forceinline__ std::uint32_t packed_plus_zero(std::uint32_t x) {
  std::uint32_t r;
  if constexpr (Bfloat) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x3F803F80U), "r"(0U));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x3C003C00U), "r"(0U));
  }
  return r;
}

// Sums of magnitudes, which rank channels. A half's exponent and fraction, moved to where a double has its own, are the
// magnitude times a power of two, subnormal or not; 128 of them sum up exactly, whatever the order.
template <bool Bfloat>
__device__ __forceinline__ void add_loudness(std::uint32_t pair, double& low, double& high) {
  constexpr int shift = Bfloat ? 13 : 10;
  low = __dadd_rn(low, __hiloint2double(static_cast<int>((pair & 0x7FFFU) << shift), 0));
  high = __dadd_rn(high, __hiloint2double(static_cast<int>((pair >> 16 & 0x7FFFU) << shift), 0));
}

// What a lane knows of its columns.
template <bool Bfloat>
struct ColumnRanges {
  static constexpr std::uint32_t infinity = Bfloat ? 0x7F807F80U : 0x7C007C00U;
  ColumnPairs low{{infinity, infinity}};
  ColumnPairs high{{infinity | 0x80008000U, infinity | 0x80008000U}};

  __device__ __forceinline__ void add(int k, std::uint32_t pair) {
    low.pair[k] = packed_min<Bfloat>(low.pair[k], pair);
    high.pair[k] = packed_max<Bfloat>(high.pair[k], pair);
  }
  // Over the lanes that share the columns.
  __device__ __forceinline__ void combine() {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        low.pair[k] = packed_min<Bfloat>(low.pair[k], __shfl_xor_sync(0xFFFFFFFFU, low.pair[k], bit));
        high.pair[k] = packed_max<Bfloat>(high.pair[k], __shfl_xor_sync(0xFFFFFFFFU, high.pair[k], bit));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      low.pair[k] = packed_plus_zero<Bfloat>(low.pair[k]);
      high.pair[k] = packed_plus_zero<Bfloat>(high.pair[k]);
    }
  }
};

// Row tiles first..count - 1 of 16 columns, `stride` fragments apart; rows before `skip` are left out. With Loudness
// sums[i] grows by the magnitudes of the lane's column i.
template <bool Bfloat, bool Loudness, int Count>
__device__ __forceinline__ ColumnRanges<Bfloat> measure_columns(const uint4* data, int stride, int skip,
                                                                double (&sums)[4]) {
  constexpr int batch = Count % 8 == 0 ? 8 : (Count % 6 == 0 ? 6 : 4);
  static_assert(Count % batch == 0);
  ColumnRanges<Bfloat> ranges;
  const auto add = [&](int r, std::uint32_t word) {
    ranges.add(r >> 1, word);
    if constexpr (Loudness) add_loudness<Bfloat>(word, sums[r & 2], sums[(r & 2) + 1]);
  };
  if (skip > 0) {  // the first page of a sequence
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll 1
    for (int i = skip / kTile; i < Count; ++i) {
      const uint4 rows = data[i * stride];
      if (i * kTile + g >= skip) {
        add(0, rows.x);
        add(2, rows.z);
      }
      if (i * kTile + g + 8 >= skip) {
        add(1, rows.y);
        add(3, rows.w);
      }
    }
  } else {
#pragma unroll 1
    for (int first = 0; first < Count; first += batch) {
      uint4 rows[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i) rows[i] = data[(first + i) * stride];
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        add(0, rows[i].x);
        add(1, rows[i].y);
        add(2, rows[i].z);
        add(3, rows[i].w);
      }
    }
  }
  ranges.combine();
  return ranges;
}

// The grids of a lane's columns as rounding uses them: 65536 steps to the code, off by a few ulp, which code_tile
// allows for.
struct ColumnGrids {
  float min[4], inverse[4];
  int levels[4];
  float max[4];

  template <bool Bfloat>
  __device__ __forceinline__ static ColumnGrids of(const ColumnRanges<Bfloat>& ranges, const int (&levels)[4]) {
    ColumnGrids grids;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 low = ptx::widen2<Bfloat>(ranges.low.pair[k]);
      const float2 high = ptx::widen2<Bfloat>(ranges.high.pair[k]);
      grids.set(2 * k, low.x, high.x, levels[2 * k]);
      grids.set(2 * k + 1, low.y, high.y, levels[2 * k + 1]);
    }
    return grids;
  }

 private:
  __device__ __forceinline__ void set(int i, float low, float high, int count) {
    min[i] = low;
    max[i] = high;
    levels[i] = count;
    // Ranges beyond 2^126 (bfloat16) have no inverse: a NaN is near every border.
    const float rate = static_cast<float>(count << 16) * ptx::reciprocal(high - low);
    inverse[i] = high > low ? (rate > 0 ? rate : NAN) : 0.0F;
  }
};

// The place of a value (below) whose code the inverse cannot tell: that of the code which the CPU gives.
static __device__ __noinline__ std::uint32_t exact_place(float x, float min, float max, int levels) {
  return divide_code(x, Grid::of(min, max, levels), levels) << 16;
}

// Calls redo(p) for the tiles whose `closest` (code_tile) says that a place is too near a border of codes. One in a
// group of tiles is likely enough in some warp that all others wait for it: it must not take long.
template <int Count, class Redo>
__device__ __forceinline__ void redo_near_border(const std::uint32_t (&closest)[Count], const Redo& redo) {
  const auto is_near = [](std::uint32_t x) { return (x & 0xFFFFU) <= 2U || x >> 16 <= 2U; };
  std::uint32_t all = closest[0];
#pragma unroll
  for (int p = 1; p < Count; ++p) all = __vminu2(all, closest[p]);
  if (!is_near(all)) return;
  unsigned near = 0;
#pragma unroll
  for (int p = 0; p < Count; ++p) near |= is_near(closest[p]) ? 1U << p : 0U;
#pragma unroll 1
  for (; near != 0; near &= near - 1) redo(__ffs(static_cast<int>(near)) - 1);
}

// Codes of a lane's 8 values of a row tile, a byte each: columns 2t and 2t + 1 of row g, then of row g + 8; in the
// second word the same of columns 2t + 8 and 2t + 9.
//
// The place of a value is its code and a half in 65536ths, rounded to a whole number, in the low bits of a float: the
// code is the third byte. It is right to one (15 levels, of which inverse, difference and the CPU's quotient are off by
// an ulp or two: 0.4, and rounding 0.5), so the code is the CPU's where the lower bytes are not -1, 0 or 1: `closest`
// falls to the least of them, plus 1, of even and of odd columns. With Exact such places are found by division.
template <bool Bfloat, bool Exact>
__device__ __forceinline__ uint2 code_tile(const uint4& rows, const ColumnGrids& grids, std::uint32_t& closest) {
  constexpr float magic = 8388608.0F + 32768.0F;
  const std::uint32_t words[4] = {rows.x, rows.y, rows.z, rows.w};
  std::uint32_t places[8];
  closest = 0xFFFFFFFFU;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 both = ptx::widen2<Bfloat>(words[i / 2]);
    const float x = i % 2 == 0 ? both.x : both.y;
    const int column = i / 4 * 2 + i % 2;
    places[i] = __float_as_uint(__fmaf_rn(__fsub_rn(x, grids.min[column]), grids.inverse[column], magic));
    if constexpr (Exact) {
      if (((places[i] + 1U) & 0xFFFFU) <= 2U) {
        places[i] = exact_place(x, grids.min[column], grids.max[column], grids.levels[column]);
      }
    } else if (i % 2 != 0) {
      closest = __viaddmin_u16x2(__byte_perm(places[i - 1], places[i], 0x5410), 0x00010001U, closest);
    }
  }
  const auto third = [&](int i) {
    return __byte_perm(__byte_perm(places[i], places[i + 1], 0x0062), __byte_perm(places[i + 2], places[i + 3], 0x0062),
                       0x5410);
  };
  return {third(0), third(4)};
}

// Fields of the row tiles of a group, put together: two words of the main plane, and of the plane above it (3-bit
// codes: of single bits; boosted channels: of their upper two).
template <int Bits, bool Boosted>
struct GroupWords {
  std::uint32_t main[2] = {0, 0};
  std::uint32_t above[2] = {0, 0};

  // codes: a byte each. The same codes once more take them off again. group and position may be known at run time
  // only.
  __device__ __forceinline__ void add(int k, std::uint32_t codes, int group, int position) {
    if constexpr (Bits == 4) {
      main[k] ^= codes << (4 * position);
    } else if constexpr (Bits == 3) {
      main[k] ^= (codes & 0x03030303U) << (2 * position);
      above[k] ^= (codes >> 2 & 0x01010101U) << plane1_bit(group, position);
    } else {
      main[k] ^= (Boosted ? codes & 0x03030303U : codes) << (2 * position);
      if constexpr (Boosted) above[k] ^= (codes >> 2 & 0x03030303U) << (2 * position);
    }
  }
};

}  // namespace kvant::cuda
