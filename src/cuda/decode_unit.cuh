// One warp, one unit (a page or half a page): scores, softmax and output on integer tensor cores straight from the
// codes. README.md explains the arithmetic; comments here say only what is easy to get wrong.
#pragma once

#include <cmath>

#include "cuda/decode_args.hpp"
#include "cuda/decode_config.cuh"
#include "cuda/ptx.cuh"

namespace kvant::cuda {

constexpr float kKeyMagic = 12582912.0F;   // 1.5 * 2^23: an int32 sum on top of its bits is a float for |sum| < 2^22
constexpr float kValueMagic = 8388608.0F;  // 2^23: the same for 0 <= sum < 2^23
constexpr float kMinusInfinity = -INFINITY;
constexpr float kLog2e = 1.4426950408889634F;

// A lane is 4g + t. It prepares vector g / 2 of each block of four (half of the channels: those with g % 2), and owns
// vector t of each block in scores, softmax and outputs.
struct Lane {
  int g, t, vector, half;
  __device__ Lane() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    g = lane / 4;
    t = lane % 4;
    vector = g / 2;
    half = g % 2;
  }
};

// The query of vector `vector` of a segment; null past the last one.
__device__ __forceinline__ const std::uint16_t* query_row(const DecodeArgs& args, const Segment& segment, int vector) {
  const int v = segment.vector0 + vector;
  if (v >= args.rows * args.group) return nullptr;
  const int row = v / args.group;
  const int head = segment.kv_head * args.group + v % args.group;
  return static_cast<const std::uint16_t*>(args.q) + segment.sequence * args.q_sequence + row * args.q_row +
         head * args.q_head;
}

template <class C>
struct WarpState {
  // Channels 32 step + 16 half + 4t + 0..3 of the prepared vector; sorted keys have their queries in shared memory.
  float q[C::n_tiles][C::sorted ? 1 : C::steps * 4];
  const std::uint16_t* query[C::n_tiles];  // the prepared vector in memory (set where channels are gathered)
  // Channels 16 tile + g + 8e of the owned vector; until settle() with the fields of lower positions still in them.
  float o[C::n_tiles][C::value_tiles][2];
  float maximum[C::n_tiles], sum[C::n_tiles];  // sum: this lane's tokens only
  float bias[C::n_tiles];                      // sum of weight * value minimum, this lane's tokens only
  float excess[C::n_tiles];                    // what the 2^23 in every integer sum added to o
  int first[C::n_tiles], last[C::n_tiles];     // visible positions [first, last) of the owned vector

  __device__ void reset() {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      maximum[n] = kMinusInfinity;
      sum[n] = bias[n] = excess[n] = 0;
#pragma unroll
      for (int j = 0; j < C::value_tiles; ++j) o[n][j][0] = o[n][j][1] = 0;
    }
  }

  // After the last coded unit: outputs of whole bytes to those of their fields, without the 2^23 of every sum and with
  // the values' minima.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      const float all = ptx::xor_sum<16>(ptx::xor_sum<8>(ptx::xor_sum<4>(bias[n])));
#pragma unroll
      for (int j = C::value_tiles; j-- > 0;) {
        constexpr int bits = C::value_positions == 4 ? 2 : 4;
        const int position = j % C::value_positions;
        const float factor = 1.0F / static_cast<float>(1 << (bits * position));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float below = position == 0 ? excess[n] : o[n][j - (position > 0)][e];
          o[n][j][e] = fmaf(o[n][j][e] - below, factor, all);
        }
      }
      bias[n] = excess[n] = 0;
    }
  }

  // Turns outputs from rotated values into those of plain ones: the Hadamard transform of each block of `rotation`
  // channels, whose number is 16 tile + 8e + g. Pages hold the transform divided by the block, so this one needs no
  // factor.
  __device__ __forceinline__ void unrotate(const Lane& lane, int rotation) {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
      for (int bit = 1; bit < 8; bit *= 2) {
        const float sign = (lane.g & bit) != 0 ? -1.0F : 1.0F;
#pragma unroll
        for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            o[n][j][e] = fmaf(sign, o[n][j][e], __shfl_xor_sync(0xFFFFFFFFU, o[n][j][e], 4 * bit));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < C::value_tiles; ++j) add_and_subtract(o[n][j][0], o[n][j][1]);
#pragma unroll
      for (int span = 1; span < C::value_tiles; span *= 2) {
        if (span >= rotation / kTile) break;
#pragma unroll
        for (int j = 0; j < C::value_tiles; ++j) {
          if ((j & span) != 0 || j + span >= C::value_tiles) continue;
          add_and_subtract(o[n][j][0], o[n][j + span][0]);
          add_and_subtract(o[n][j][1], o[n][j + span][1]);
        }
      }
    }
  }

  __device__ static __forceinline__ void add_and_subtract(float& a, float& b) {
    const float difference = a - b;
    a += b;
    b = difference;
  }

  // Moves the running maximum of block n to at least `peak`; returns a finite stand-in for the new maximum.
  __device__ __forceinline__ float raise(int n, float peak) {
    const float next = fmaxf(maximum[n], peak);
    const float finite = next == kMinusInfinity ? 0.0F : next;
    if (__any_sync(0xFFFFFFFFU, next > maximum[n])) {
      const float alpha = ptx::exp2_fast(maximum[n] - finite);
      sum[n] *= alpha;
      bias[n] *= alpha;
      excess[n] *= alpha;
#pragma unroll
      for (int j = 0; j < C::value_tiles; ++j) {
        o[n][j][0] *= alpha;
        o[n][j][1] *= alpha;
      }
      maximum[n] = next;
    }
    return finite;
  }
};

// ---- operands

template <int Bits>
struct CodeWords {
  uint4 word[Bits == 3 ? 2 : 1];

  // `odd`: parity of the group, which decides where its bits lie in the 1-bit plane.
  __device__ __forceinline__ void load(const std::uint8_t* codes, const std::uint8_t* plane1, bool odd) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint4 w = *reinterpret_cast<const uint4*>(codes + lane * 16);
    if constexpr (Bits != 3) {
      word[0] = w;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(plane1 + lane * 16);
      word[0] = {join(w.x, odd ? v.x << 2 : v.x), join(w.y, odd ? v.y << 2 : v.y), join(w.z, odd ? v.z << 2 : v.z),
                 join(w.w, odd ? v.w << 2 : v.w)};
      word[1] = {join(w.x >> 2, odd ? v.x << 1 : v.x >> 1), join(w.y >> 2, odd ? v.y << 1 : v.y >> 1),
                 join(w.z >> 2, odd ? v.z << 1 : v.z >> 1), join(w.w >> 2, odd ? v.w << 1 : v.w >> 1)};
    }
  }

  // A fragment of the group's row tile: at most one AND per register; the factor 4^p or 16^p stays in the codes. With
  // Below also the fields of lower positions do, for sums that are told apart later: the highest needs no AND then.
  template <bool Below = false>
  __device__ __forceinline__ void fragment(int tile, std::uint32_t (&a)[4]) const {
    const uint4& w = word[Bits == 3 ? tile / 2 : 0];
    constexpr int width = Bits == 2 ? 2 : 4;
    const int position = tile % (8 / width);
    const std::uint32_t field = (Bits == 2 ? 0x03030303U : 0x0F0F0F0FU) << (width * position);
    const std::uint32_t mask = Below ? field | ((0x01010101U << (width * position)) - 0x01010101U) : field;
    a[0] = w.x & mask;
    a[1] = w.y & mask;
    a[2] = w.z & mask;
    a[3] = w.w & mask;
  }

 private:
  // Low two bits of each nibble from `low`, the third from `high`; the fourth stays clear.
  __device__ static __forceinline__ std::uint32_t join(std::uint32_t low, std::uint32_t high) {
    return (low & 0x33333333U) | (high & 0x44444444U);
  }
};

// Rounds four floats to 16-bit integers by `factor` and gives their high and low bytes, one word each.
__device__ __forceinline__ void split_bytes(const float (&x)[4], float factor, std::uint32_t& high,
                                            std::uint32_t& low) {
  std::uint32_t r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = __float_as_uint(fmaf(x[i], factor, kKeyMagic + 128.0F));
  const std::uint32_t a = __byte_perm(r[0], r[1], 0x5140);
  const std::uint32_t b = __byte_perm(r[2], r[3], 0x5140);
  high = __byte_perm(a, b, 0x7632);
  low = __byte_perm(a, b, 0x5410) ^ 0x80808080U;  // the +128 above rounds the high byte; here it comes off again
}

template <class C>
struct KeyOperand {
  std::uint32_t x[C::n_tiles][C::all_steps][2];
  float descale[C::n_tiles];  // of the owned vector: integer score -> q . (step * code) * levels
  float zero[C::n_tiles];     // of the owned vector: q . min

  // tile: the key tile in shared memory.
  __device__ __forceinline__ void prepare(const WarpState<C>& state, const Lane& lane, const std::uint8_t* tile,
                                          int boosted) {
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
      float v[C::all_steps][4];
      float peak = 1e-30F;
      float offset = 0;
#pragma unroll
      for (int s = 0; s < C::steps; ++s) {
        const uint4 ends = *reinterpret_cast<const uint4*>(tile + s * 128 + lane.half * 64 + lane.t * 16);
        const float2 a[2] = {ptx::widen2<C::bfloat>(ends.x), ptx::widen2<C::bfloat>(ends.y)};
        const float2 b[2] = {ptx::widen2<C::bfloat>(ends.z), ptx::widen2<C::bfloat>(ends.w)};
        const float first[4] = {a[0].x, a[0].y, a[1].x, a[1].y};
        const float second[4] = {b[0].x, b[0].y, b[1].x, b[1].y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float q = state.q[n][s * 4 + i];
          float range = second[i] - first[i];
          if constexpr (C::key.high_steps > 0) range = fmaxf(range, range * -0.2F);  // max came first: step is range/15
          offset = fmaf(q, first[i], offset);
          v[s][i] = q * range;
          peak = fmaxf(peak, fabsf(v[s][i]));
        }
      }
#pragma unroll
      for (int s = C::steps; s < C::all_steps; ++s) {
        const int at = (s - C::steps) * kStep + lane.half * 16 + lane.t * 4;
        const std::uint32_t channels = *reinterpret_cast<const std::uint32_t*>(tile + C::key.index_offset() + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int channel = static_cast<int>(channels >> (8 * i) & 0xFFU);
          const auto* ends = reinterpret_cast<const std::uint16_t*>(tile + (channel & ~3) * 4 + (channel & 3) * 2);
          const float2 pair = ptx::widen2<C::bfloat>(ends[0] | static_cast<std::uint32_t>(ends[4]) << 16);
          const bool live = at + i < boosted && state.query[n] != nullptr;
          const float q = live ? ptx::widen2<C::bfloat>(__ldg(state.query[n] + channel)).x : 0.0F;
          const float rise = q * (pair.x - pair.y);
          offset -= rise;         // above, the maximum stood in for the minimum
          v[s][i] = rise * 0.8F;  // 4 steps of range / 15, in units of range / 3
          peak = fmaxf(peak, fabsf(v[s][i]));
        }
      }
      peak = ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(peak)));
      offset = ptx::xor_sum<4>(ptx::xor_sum<2>(ptx::xor_sum<1>(offset)));
      const float factor = 32512.0F * ptx::reciprocal(peak);  // high byte within +-127
#pragma unroll
      for (int s = 0; s < C::all_steps; ++s) {
        std::uint32_t high, low;
        split_bytes(v[s], factor, high, low);
        const std::uint32_t mine = lane.half ? low : high;
        const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, lane.half ? high : low, 4);
        x[n][s][0] = lane.half ? other : mine;
        x[n][s][1] = lane.half ? mine : other;
      }
      descale[n] = __shfl_sync(0xFFFFFFFFU, peak, lane.t * 8) * (1.0F / 32512.0F);
      zero[n] = __shfl_sync(0xFFFFFFFFU, offset, lane.t * 8);
    }
  }
};

// ---- scores

// s[n][tile][e]: token 16 tile + g + 8e of the unit, owned vector, in units of log2.
template <class C>
__device__ __forceinline__ void score_unit(const KeyOperand<C>& key, const std::uint8_t* tile,
                                           const std::uint8_t* codes, float scale,
                                           float (&s)[C::n_tiles][C::token_tiles][2]) {
  constexpr int per_group = tiles_per_group(C::key.bits);
  constexpr float levels = 1.0F / static_cast<float>((1 << C::key.bits) - 1);
#pragma unroll
  for (int group = 0; group < C::token_tiles / per_group; ++group) {
#pragma unroll
    for (int chunk = 0; chunk < C::chunks; ++chunk) {
      std::int32_t c[C::n_tiles][per_group][4];
#pragma unroll
      for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
        for (int p = 0; p < per_group; ++p) {
#pragma unroll
          for (int i = 0; i < 4; ++i) c[n][p][i] = 0x4B400000;
        }
      }
      constexpr int size = (C::all_steps + C::chunks - 1) / C::chunks;
#pragma unroll
      for (int step = chunk * size; step < (chunk + 1) * size; ++step) {
        if (step >= C::all_steps) break;
        CodeWords<C::key.bits> words;
        words.load(codes + (group * C::all_steps + step) * kQuadBytes,
                   tile + C::key.plane1_offset() + step * kQuadBytes, group % 2 != 0);
#pragma unroll
        for (int p = 0; p < per_group; ++p) {
          std::uint32_t a[4];
          words.fragment(p, a);
#pragma unroll
          for (int n = 0; n < C::n_tiles; ++n) ptx::mma_bytes<true>(c[n][p], a, key.x[n][step][0], key.x[n][step][1]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
        for (int p = 0; p < per_group; ++p) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float high = __int_as_float(c[n][p][2 * e]) - kKeyMagic;
            const float value = fmaf(high, 256.0F, __int_as_float(c[n][p][2 * e + 1]));
            float& total = s[n][group * per_group + p][e];
            total = chunk == 0 ? value : total + value;
          }
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    const float base = key.descale[n] * (scale * kLog2e * levels);
    const float zero = key.zero[n] * (scale * kLog2e);
#pragma unroll
    for (int j = 0; j < C::token_tiles; ++j) {
      constexpr int bits = C::key_positions == 4 ? 2 : 4;
      const float factor = base * (1.0F / static_cast<float>(1 << (bits * (j % C::key_positions))));
      const float offset = fmaf(-factor, kKeyMagic * C::chunks, zero);
      s[n][j][0] = fmaf(s[n][j][0], factor, offset);
      s[n][j][1] = fmaf(s[n][j][1], factor, offset);
    }
  }
}

// c * tanh(s / c) with s and the result in units of log2.
__device__ __forceinline__ float cap_score(float s, const DecodeArgs& args) {
  const float e = ptx::exp2_fast(s * args.softcap_rate);
  return args.softcap * kLog2e * (1.0F - 2.0F * ptx::reciprocal(1.0F + e));
}

// ---- softmax and values

template <class C>
__device__ __forceinline__ void mix_unit(WarpState<C>& state, const Lane& lane, const std::uint8_t* tile,
                                         float (&s)[C::n_tiles][C::token_tiles][2]) {
  constexpr int halves = C::unit_tokens / 64;
  float low[C::token_tiles][2], range[C::token_tiles][2];
  float widest =
      C::bfloat ? 1e-20F : 1e-8F;  // below the least step of f16; weights over it must stay far from infinity
#pragma unroll
  for (int h = 0; h < halves; ++h) {
    const std::uint8_t* ends = tile + h * C::value.half_bytes() + lane.g * 16;
    const uint4 a = *reinterpret_cast<const uint4*>(ends);
    const uint4 b = *reinterpret_cast<const uint4*>(ends + 128);
    const std::uint32_t mins[4] = {a.x, a.y, a.z, a.w};
    const std::uint32_t maxs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 min = ptx::widen2<C::bfloat>(mins[j]);
      const float2 max = ptx::widen2<C::bfloat>(maxs[j]);
      low[4 * h + j][0] = min.x;
      low[4 * h + j][1] = min.y;
      range[4 * h + j][0] = max.x - min.x;
      range[4 * h + j][1] = max.y - min.y;
      widest = fmaxf(widest, fmaxf(range[4 * h + j][0], range[4 * h + j][1]));
    }
  }
  widest = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(widest)));
  // Weights are rounded relative to the unit's own maximum and widest value range, so they always use 16 bits.
  const float gain = ptx::log2_fast(65500.0F * ptx::reciprocal(widest));

  std::uint32_t x[C::n_tiles][C::token_tiles];
  float factor[C::n_tiles];
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    float peak = s[n][0][0];
#pragma unroll
    for (int j = 0; j < C::token_tiles; ++j) peak = fmaxf(peak, fmaxf(s[n][j][0], s[n][j][1]));
    peak = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(peak)));
    const float shift = gain - (peak == kMinusInfinity ? 0.0F : peak);
    float sum = 0;
    float bias = 0;
#pragma unroll
    for (int j = 0; j < C::token_tiles; ++j) {
      std::uint32_t r[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float p = ptx::exp2_fast(s[n][j][e] + shift);
        sum += p;
        bias = fmaf(p, low[j][e], bias);
        r[e] = __float_as_uint(fmaf(p, range[j][e], kValueMagic));
      }
      // High bytes of tokens g and g + 8 in column 2t, low bytes in column 2t + 1.
      x[n][j] = ptx::transpose(__byte_perm(r[0], r[1], 0x4051));
    }
    const float finite = state.raise(n, peak);
    const float beta = ptx::exp2_fast(peak - finite - gain);
    state.sum[n] = fmaf(beta, sum, state.sum[n]);
    state.bias[n] = fmaf(beta, bias, state.bias[n]);
    factor[n] = beta * (1.0F / static_cast<float>((1 << C::value.bits) - 1));
    state.excess[n] = fmaf(factor[n], kValueMagic, state.excess[n]);
  }

  constexpr int per_group = tiles_per_group(C::value.bits);
#pragma unroll
  for (int group = 0; group < C::value.groups(); ++group) {
    std::int32_t c[C::n_tiles][per_group][4];
#pragma unroll
    for (int step = 0; step < C::unit_tokens / kStep; ++step) {
      const std::uint8_t* part = tile + step / 2 * C::value.half_bytes();
      CodeWords<C::value.bits> words;
      words.load(part + C::value.codes_offset() + (group * 2 + step % 2) * kQuadBytes,
                 part + C::value.plane1_offset() + (group / 2 * 2 + step % 2) * kQuadBytes, group % 2 != 0);
#pragma unroll
      for (int p = 0; p < per_group; ++p) {
        if (group * per_group + p >= C::value_tiles) break;
        std::uint32_t a[4];
        words.template fragment<true>(p, a);
#pragma unroll
        for (int n = 0; n < C::n_tiles; ++n) {
          if (step == 0) {
            ptx::mma_bytes_from<false>(0x4B000000, c[n][p], a, x[n][0], x[n][1]);
          } else {
            ptx::mma_bytes<false>(c[n][p], a, x[n][2 * step], x[n][2 * step + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
      for (int p = 0; p < per_group; ++p) {
        if (group * per_group + p >= C::value_tiles) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float high = __int_as_float(c[n][p][2 * e]) - kValueMagic;
          const float value = fmaf(high, 256.0F, __int_as_float(c[n][p][2 * e + 1]));
          float& o = state.o[n][group * per_group + p][e];
          o = fmaf(factor[n], value, o);
        }
      }
    }
  }
}

}  // namespace kvant::cuda
