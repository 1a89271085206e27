// Scores of a page whose key channels have widths of their own (waterfill): channels lie by width class, every plane
// covers a run of them.
//
// One x = q * step per channel, in the order of the page, serves all planes: a plane's shift is the same for all of its
// channels and leaves with its factor. The bytes of x go through shared memory, where a plane finds its own from any
// four on.
#pragma once

#include "cuda/decode_unit.cuh"

namespace kvant::cuda {

// Fours of channels per class, and where the classes end in the order of the page.
struct SortedRuns {
  int six, four, five, one, three, two;

  __device__ __forceinline__ explicit SortedRuns(const std::uint8_t* counts) {
    // All lanes read the same words; reducing them tells the compiler so, and loops over runs need no care for lanes
    // that leave early.
    const uint2 c = *reinterpret_cast<const uint2*>(counts);
    const unsigned low = __reduce_or_sync(0xFFFFFFFFU, c.x);
    const unsigned high = __reduce_or_sync(0xFFFFFFFFU, c.y);
    six = static_cast<int>(low & 0xFFU);
    four = static_cast<int>(low >> 8 & 0xFFU);
    five = static_cast<int>(low >> 16 & 0xFFU);
    one = static_cast<int>(low >> 24);
    three = static_cast<int>(high & 0xFFU);
    two = static_cast<int>(high >> 8 & 0xFFU);
  }
  // 1 / the largest code as the planes hold it: codes of even width count double.
  __device__ __forceinline__ float rate(int at) const {
    float r = 1.0F / 6.0F;
    r = at < six + four + five + one + three ? 1.0F / 7.0F : r;
    r = at < six + four + five + one ? 1.0F : r;
    r = at < six + four + five ? 1.0F / 31.0F : r;
    r = at < six + four ? 1.0F / 30.0F : r;
    return at < six ? 1.0F / 126.0F : r;
  }
};

// The queries of a segment, on their way to the place that all warps read: fetched before the segment that comes first
// is merged, put down after its last barrier.
template <class C>
class SharedQueries {
 public:
  __device__ __forceinline__ void fetch(const DecodeArgs& args, const Segment& segment) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * C::threads;
      const std::uint16_t* q = i < kCount ? query_row(args, segment, i / C::key.dim) : nullptr;
      raw_[k] = q != nullptr ? q[i % C::key.dim] : std::uint16_t{0};
    }
  }
  __device__ __forceinline__ void store(std::uint8_t* shared) const {
    auto* to = reinterpret_cast<float*>(shared + C::query_offset);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * C::threads;
      if (i < kCount) to[i % C::key.dim * C::vectors + i / C::key.dim] = ptx::widen2<C::bfloat>(raw_[k]).x;
    }
    __syncthreads();
  }

 private:
  static constexpr int kCount = C::vectors * C::key.dim;
  static constexpr int kEach = (kCount + C::threads - 1) / C::threads;
  std::uint16_t raw_[kEach];
};

// Combines x[v] of vector v over all lanes; the result is that of this lane's owned vector, lane % 4.
template <class Combine>
__device__ __forceinline__ float combine_lanes(const float (&x)[4], const Combine& combine) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = (lane & 1) != 0;
  const bool upper = (lane & 2) != 0;
  const float a = combine(odd ? x[1] : x[0], __shfl_xor_sync(0xFFFFFFFFU, odd ? x[0] : x[1], 1));
  const float b = combine(odd ? x[3] : x[2], __shfl_xor_sync(0xFFFFFFFFU, odd ? x[2] : x[3], 1));
  float r = combine(upper ? b : a, __shfl_xor_sync(0xFFFFFFFFU, upper ? a : b, 2));
  r = combine(r, __shfl_xor_sync(0xFFFFFFFFU, r, 4));
  r = combine(r, __shfl_xor_sync(0xFFFFFFFFU, r, 8));
  return combine(r, __shfl_xor_sync(0xFFFFFFFFU, r, 16));
}

// Rows of x: 8n + 2v is the high byte of vector 4n + v, the next one its low byte; a word per four.
template <class C>
struct SortedOperand {
  float descale[C::n_tiles];  // of the owned vector: integer score -> q . (step * code)
  float zero[C::n_tiles];     // of the owned vector: q . min

  __device__ __forceinline__ void prepare(const std::uint8_t* tile, const SortedRuns& runs, const float* queries,
                                          std::uint32_t* x) {
    constexpr int fours = C::key.dim / kFour;
    constexpr int rounds = (fours + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float v[rounds][C::vectors][4];
    float peak[C::n_tiles][4], offset[C::n_tiles][4];
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        peak[n][k] = 1e-30F;
        offset[n][k] = 0;
      }
    }
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int four = 32 * round + lane;
      const bool live = four < fours;
      uint4 ends{0, 0, 0, 0};
      std::uint32_t channels = 0;
      if (live) {
        ends = *reinterpret_cast<const uint4*>(tile + four * 16);
        channels = *reinterpret_cast<const std::uint32_t*>(tile + C::key.index_offset() + four * 4);
      }
      const float2 low[2] = {ptx::widen2<C::bfloat>(ends.x), ptx::widen2<C::bfloat>(ends.y)};
      const float2 high[2] = {ptx::widen2<C::bfloat>(ends.z), ptx::widen2<C::bfloat>(ends.w)};
      const float min[4] = {low[0].x, low[0].y, low[1].x, low[1].y};
      const float max[4] = {high[0].x, high[0].y, high[1].x, high[1].y};
      const float rate = runs.rate(four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float step = (max[i] - min[i]) * rate;
        const auto* q =
            reinterpret_cast<const float4*>(queries + static_cast<int>(channels >> (8 * i) & 0xFFU) * C::vectors);
#pragma unroll
        for (int n = 0; n < C::n_tiles; ++n) {
          const float4 four_queries = q[n];
          const float parts[4] = {four_queries.x, four_queries.y, four_queries.z, four_queries.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float product = parts[k] * step;
            v[round][4 * n + k][i] = product;
            peak[n][k] = fmaxf(peak[n][k], fabsf(product));
            offset[n][k] = fmaf(parts[k], min[i], offset[n][k]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      const float top = combine_lanes(peak[n], [](float a, float b) { return fmaxf(a, b); });
      zero[n] = combine_lanes(offset[n], [](float a, float b) { return a + b; });
      descale[n] = top * (1.0F / 32512.0F);
      const float factor = 32512.0F * ptx::reciprocal(top);  // high byte within +-127
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float f = __shfl_sync(0xFFFFFFFFU, factor, k);
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
          const int four = 32 * round + lane;
          std::uint32_t high, low;
          split_bytes(v[round][4 * n + k], f, high, low);
          if (four >= fours) continue;
          x[(8 * n + 2 * k) * C::x_stride + four] = high;
          x[(8 * n + 2 * k + 1) * C::x_stride + four] = low;
        }
      }
    }
    __syncwarp();
  }
};

// A lane's words of one half step (4 fours, of which lane t reads one) of a plane: 4, 2 or 1 bits, all 128 tokens, or
// those of one half of the page.
template <int Bits, bool Half>
struct SortedWords {
  static constexpr int positions = 8 / Bits;
  uint4 word[Bits == 4 && !Half ? 2 : 1];

  // The lane's part of the plane's four t; four 4i + t is 4i * Bits * kFourBytes further.
  __device__ __forceinline__ static const std::uint8_t* place(const std::uint8_t* plane, int half, const Lane& lane) {
    const int inside = Bits == 1 ? (lane.g ^ ((lane.t & 2) << 1)) * 8 : (lane.g ^ (lane.t << 1)) * 16;
    const int group = Bits == 4 ? 128 * half : (Bits == 2 ? 8 * half : 0);
    return plane + lane.t * (Bits * kFourBytes) + inside + group;
  }
  __device__ __forceinline__ void load(const std::uint8_t* at, int half) {
    if constexpr (Bits == 1 || (Bits == 2 && Half)) {
      const uint2 w = *reinterpret_cast<const uint2*>(at);
      const int shift = Bits == 1 ? 4 * half : 0;  // single bits: the half's four positions
      word[0].x = w.x >> shift;
      word[0].y = w.y >> shift;
    } else {
      word[0] = *reinterpret_cast<const uint4*>(at);
      if constexpr (Bits == 4 && !Half) word[1] = *reinterpret_cast<const uint4*>(at + 128);
    }
  }
  // Registers of rows g and g + 8 of a row tile: the fields of this and of all lower positions, which the lower tiles'
  // sums take off again. So the highest position needs no mask.
  __device__ __forceinline__ uint2 fragment(int tile) const {
    const int group = tile / positions;
    const int bits = Bits * (tile % positions + 1);
    const uint4& w = word[group / 2];
    const uint2 pair = group % 2 == 0 ? uint2{w.x, w.y} : uint2{w.z, w.w};
    if (bits == 8) return pair;
    const std::uint32_t mask = ((1U << bits) - 1) * 0x01010101U;
    return {pair.x & mask, pair.y & mask};
  }
};

// Sums of the fields of one plane.
template <int Bits, class C>
struct SortedSums {
  static constexpr int positions = 8 / Bits;
  static constexpr int steps = (1 << 22) / (255 * 128 * kStep);  // whose sums stay exact in a float's mantissa
  static_assert(steps >= 4);
  std::int32_t c[C::n_tiles][C::token_tiles][4];

  // One step: 8 fours, or 4 with Whole false; the first one (Fresh) clears the sums. at, x: the lane's part of the
  // first; `left`: how many of them there are. Where a four is missing, x is zero and the codes are those of another
  // one.
  template <bool Whole, bool Fresh>
  __device__ __forceinline__ void add(const std::uint8_t* at, const std::uint32_t* x, int left, int half,
                                      const Lane& lane) {
    constexpr int bytes = Bits * kFourBytes;
    const bool live = lane.t + (Whole ? 4 : 0) < left;
    SortedWords<Bits, C::half> words[2];
    std::uint32_t b[C::n_tiles][2];
    words[0].load(Whole || live ? at : at - lane.t * bytes, half);
    if constexpr (Whole) words[1].load(live ? at + 4 * bytes : at, half);
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      const std::uint32_t* row = x + 8 * n * C::x_stride;
      b[n][0] = Whole || live ? row[0] : 0U;
      b[n][1] = Whole && live ? row[4] : 0U;
    }
#pragma unroll
    for (int j = 0; j < C::token_tiles; ++j) {
      const uint2 lower = words[0].fragment(j);
      if constexpr (Whole) {
        const uint2 upper = words[1].fragment(j);
        const std::uint32_t a[4] = {lower.x, lower.y, upper.x, upper.y};
#pragma unroll
        for (int n = 0; n < C::n_tiles; ++n) {
          if constexpr (Fresh) {
            ptx::mma_bytes_from<true>(0x4B400000, c[n][j], a, b[n][0], b[n][1]);
          } else {
            ptx::mma_bytes<true>(c[n][j], a, b[n][0], b[n][1]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < C::n_tiles; ++n) {
          if constexpr (Fresh) {
            ptx::mma_half_step_from(0x4B400000, c[n][j], lower.x, lower.y, b[n][0]);
          } else {
            ptx::mma_half_step(c[n][j], lower.x, lower.y, b[n][0]);
          }
        }
      }
    }
  }
  // weight: of a field, owned vector.
  __device__ __forceinline__ void flush(const float (&weight)[C::n_tiles],
                                        float (&s)[C::n_tiles][C::token_tiles][2]) const {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
      for (int j = 0; j < C::token_tiles; ++j) {
        const float factor = weight[n] * (1.0F / static_cast<float>(1 << (Bits * (j % positions))));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool lowest = j % positions == 0;
          const float high =
              __int_as_float(c[n][j][2 * e]) - (lowest ? kKeyMagic : __int_as_float(c[n][j - !lowest][2 * e]));
          const float low =
              __int_as_float(c[n][j][2 * e + 1]) - (lowest ? kKeyMagic : __int_as_float(c[n][j - !lowest][2 * e + 1]));
          s[n][j][e] = fmaf(fmaf(high, 256.0F, low), factor, s[n][j][e]);
        }
      }
    }
  }
};

// Adds the fields of one plane over the fours first..first + count - 1, count > 0, to the scores.
template <int Bits, class C>
__device__ __forceinline__ void add_plane(const std::uint8_t* plane, const std::uint32_t* x, int first, int count,
                                          int half, const Lane& lane, const float (&weight)[C::n_tiles],
                                          float (&s)[C::n_tiles][C::token_tiles][2]) {
  using Sums = SortedSums<Bits, C>;
  constexpr int step_bytes = 8 * Bits * kFourBytes;
  constexpr bool several = C::steps > Sums::steps;  // a plane may be too long for one sum
  Sums sums;
  const std::uint8_t* at = SortedWords<Bits, C::half>::place(plane, half, lane);
  x += lane.g * C::x_stride + first + lane.t;
  int left = count;
  const auto advance = [&] {
    at += step_bytes;
    x += 8;
    left -= 8;
  };
  if (left > 4) {
    sums.template add<true, true>(at, x, left, half, lane);
  } else {
    sums.template add<false, true>(at, x, left, half, lane);
  }
  advance();
#pragma unroll 1
  for (int step = 1; left > 4; ++step) {
    if (several && step % Sums::steps == 0) {
      sums.flush(weight, s);
      sums.template add<true, true>(at, x, left, half, lane);
    } else {
      sums.template add<true, false>(at, x, left, half, lane);
    }
    advance();
  }
  if (left > 0) {
    if constexpr (several) sums.flush(weight, s);
    sums.template add<false, several>(at, x, left, half, lane);
  }
  sums.flush(weight, s);
}

// s[n][tile][e] as score_unit has it.
template <class C>
__device__ __forceinline__ void score_sorted(float scale, const std::uint8_t* tile, std::uint8_t* shared, int half,
                                             const Lane& lane, float (&s)[C::n_tiles][C::token_tiles][2]) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto* x = reinterpret_cast<std::uint32_t*>(shared + C::merge_offset) + warp * C::vectors * C::merge_stride;
  const SortedRuns runs(tile + C::key.counts_offset());
  float base[C::n_tiles], twice[C::n_tiles];
  {
    SortedOperand<C> operand;
    operand.prepare(tile, runs, reinterpret_cast<const float*>(shared + C::query_offset), x);
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      base[n] = operand.descale[n] * (scale * kLog2e);
      twice[n] = 2.0F * base[n];
#pragma unroll
      for (int j = 0; j < C::token_tiles; ++j) s[n][j][0] = s[n][j][1] = operand.zero[n] * (scale * kLog2e);
    }
  }
  const int fours = runs.six + runs.four + runs.five;
  const int ones = runs.five + runs.one + runs.three;
  const int twos = runs.three + runs.two;
  const std::uint8_t* plane = tile + C::key.codes_offset();
  if (fours > 0) add_plane<4, C>(plane, x, 0, fours, half, lane, twice, s);
  plane += fours * (4 * kFourBytes);
  if (ones > 0) add_plane<1, C>(plane, x, runs.six + runs.four, ones, half, lane, base, s);
  plane += ones * kFourBytes;
  if (twos > 0) add_plane<2, C>(plane, x, fours + runs.one, twos, half, lane, twice, s);
  if (runs.six > 0) {
    plane += twos * (2 * kFourBytes);
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) base[n] *= 32.0F;
    add_plane<2, C>(plane, x, 0, runs.six, half, lane, base, s);
  }
}

}  // namespace kvant::cuda
