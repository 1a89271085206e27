// Sealing a page on the device: one block per (page, KV head) ranks, fits, quantizes and packs. Sealed bytes are those
// of the CPU's encoder after conversion, but for the sign of an endpoint that is zero.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/seal.hpp"

namespace kvant::cuda {

template <class KeyValue>
struct SealConfig {
  static constexpr KeyFormat key = KeyValue::key;
  static constexpr ValueFormat value = KeyValue::value;
  static constexpr ExactFormat exact{key.dim, value.dim};
  static constexpr bool bfloat = KeyValue::bfloat;

  // Rows in shared memory, padded so that the 8 rows of a quad fall into different banks.
  static constexpr int key_stride = key.dim + 16;
  static constexpr int value_stride = value.dim + 16;
  // Statistics of keys: two channels a thread, tokens dealt out over the threads that are left.
  static constexpr int parts = key.dim <= 64 ? 16 : (key.dim <= 128 ? 8 : 4);
};

// One grid: minimum, step and its inverse (0 without a step: every code is then 0).
struct Grid {
  float min, step, inverse;

  __device__ static Grid of(float min, float max, int levels) {
    const float step = __fdiv_rn(max - min, static_cast<float>(levels));
    return {min, step, step > 0 ? __frcp_rn(step) : 0.0F};
  }
};

// floor((x - min) / step + 1/2) as the CPU rounds it.
static __device__ __noinline__ std::uint32_t divide_code(float difference, float step, int levels) {
  const float t = __fadd_rn(__fdiv_rn(difference, step), 0.5F);
  return static_cast<std::uint32_t>(fminf(fmaxf(floorf(t), 0.0F), static_cast<float>(levels)));
}

// Two codes. The product with the inverse is off by a few ulp at most: the division decides only near a half.
__device__ __forceinline__ std::uint32_t code_pair(float2 x, const Grid& a, const Grid& b, int levels_a, int levels_b) {
  constexpr float magic = 12582912.0F;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float da = __fsub_rn(x.x, a.min);
  const float db = __fsub_rn(x.y, b.min);
  const float ra = __fmaf_rn(da, a.inverse, magic);
  const float rb = __fmaf_rn(db, b.inverse, magic);
  const float rest_a = __fmaf_rn(da, a.inverse, magic - ra);
  const float rest_b = __fmaf_rn(db, b.inverse, magic - rb);
  if (!(fabsf(rest_a) <= 0.4999F && fabsf(rest_b) <= 0.4999F)) {  // also where the inverse overflowed
    return divide_code(da, a.step, levels_a) | divide_code(db, b.step, levels_b) << 16;
  }
  return __byte_perm(__float_as_uint(ra), __float_as_uint(rb), 0x5410);
}

template <class F>
struct SealShared {
  alignas(16) std::uint16_t keys[kPage * F::key_stride];  // rows, later codes
  alignas(16) std::uint16_t values[kPage * F::value_stride];
  double loudness[F::parts][F::key.dim];
  float low[F::parts][F::key.dim];
  float high[F::parts][F::key.dim];
  Grid key_grid[F::key.dim];
  std::uint8_t boosted[F::key.dim];
  std::uint8_t list[F::key.dim];  // boosted channels, ascending
};

// In what follows, loops first read a batch and then write: a read may not pass an earlier write to the same array.
constexpr int kBatch = 8;

// Fragments of an exact page to rows.
template <class F>
__device__ void load_rows(const std::uint8_t* exact, SealShared<F>& shared) {
  constexpr int per_tile = F::exact.tile_bytes() / 16;
  constexpr int count = per_tile * (kPage / kTile);
  static_assert(count % kSealThreads == 0);
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kBatch * kSealThreads) {
    uint4 batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + k * kSealThreads;
      if (i < count) batch[k] = reinterpret_cast<const uint4*>(exact)[i];
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + k * kSealThreads;
      if (i >= count) break;
      const std::uint32_t pairs[4] = {batch[k].x, batch[k].y, batch[k].z, batch[k].w};
      const int tile = i / per_tile;
      const int fragment = i % per_tile / 32;
      const int g = i % 32 / 4;
      const int t = i % 4;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = g + 8 * (r & 1);
        const int depth = 2 * t + 8 * (r >> 1);
        if (fragment < F::key.dim / 16) {  // rows are tokens
          *reinterpret_cast<std::uint32_t*>(shared.keys + (tile * 16 + row) * F::key_stride + fragment * 16 + depth) =
              pairs[r];
        } else {  // rows are channels
          std::uint16_t* out =
              shared.values + (tile * 16 + depth) * F::value_stride + (fragment - F::key.dim / 16) * 16 + row;
          out[0] = static_cast<std::uint16_t>(pairs[r]);
          out[F::value_stride] = static_cast<std::uint16_t>(pairs[r] >> 16);
        }
      }
    }
  }
}

// Ranges of all channels, and the sums that rank them, over the part's tokens.
template <class F>
__device__ void measure_keys(int skip, SealShared<F>& shared) {
  const int part = static_cast<int>(threadIdx.x) / (F::key.dim / 2);
  const int c = static_cast<int>(threadIdx.x) % (F::key.dim / 2) * 2;
  if (part >= F::parts) return;
  float low[2] = {INFINITY, INFINITY};
  float high[2] = {-INFINITY, -INFINITY};
  double sum[2] = {0, 0};
#pragma unroll 8
  for (int i = 0; i < kPage / F::parts; ++i) {
    const int t = max(i * F::parts + part, skip);  // a sink's place is taken by the first token that counts
    const float2 x =
        ptx::widen2<F::bfloat>(*reinterpret_cast<const std::uint32_t*>(shared.keys + t * F::key_stride + c));
    low[0] = fminf(low[0], x.x);
    low[1] = fminf(low[1], x.y);
    high[0] = fmaxf(high[0], x.x);
    high[1] = fmaxf(high[1], x.y);
    if constexpr (F::key.high_steps > 0) {  // 128 half-precision magnitudes: exact in binary64, whatever the order
      const bool counts = i * F::parts + part >= skip;
      sum[0] += counts ? fabsf(x.x) : 0.0F;
      sum[1] += counts ? fabsf(x.y) : 0.0F;
    }
  }
  for (int e = 0; e < 2; ++e) {
    shared.low[part][c + e] = low[e];
    shared.high[part][c + e] = high[e];
    if constexpr (F::key.high_steps > 0) shared.loudness[part][c + e] = sum[e];
  }
}

// The `boosted` channels of the largest mean |k|, ties to the lower channel.
template <class F>
__device__ void choose_boosted(int boosted, SealShared<F>& shared) {
  for (int c = static_cast<int>(threadIdx.x); c < F::key.dim; c += kSealThreads) {
    for (int part = 1; part < F::parts; ++part) shared.loudness[0][c] += shared.loudness[part][c];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < F::key.dim; c += kSealThreads) {
    const double mine = shared.loudness[0][c];
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < F::key.dim; ++other) {
      const double theirs = shared.loudness[0][other];
      rank += theirs > mine || (theirs == mine && other < c) ? 1 : 0;
    }
    shared.boosted[c] = rank < boosted ? 1 : 0;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < F::key.dim; c += kSealThreads) {
    int place = 0;
#pragma unroll 8
    for (int other = 0; other < F::key.dim; ++other) place += other < c ? shared.boosted[other] : 0;
    if (shared.boosted[c] != 0) shared.list[place] = static_cast<std::uint8_t>(c);
  }
}

template <class F>
__device__ int key_levels(const SealShared<F>& shared, int channel) {
  if constexpr (F::key.high_steps > 0) return shared.boosted[channel] != 0 ? 15 : 3;
  return (1 << F::key.bits) - 1;
}

template <class F>
__device__ void fit_keys(SealShared<F>& shared, std::uint8_t* page) {
  for (int c = static_cast<int>(threadIdx.x); c < F::key.dim; c += kSealThreads) {
    float low = shared.low[0][c];
    float high = shared.high[0][c];
    for (int part = 1; part < F::parts; ++part) {
      low = fminf(low, shared.low[part][c]);
      high = fmaxf(high, shared.high[part][c]);
    }
    shared.key_grid[c] = Grid::of(low, high, key_levels<F>(shared, c));
    const bool swap = F::key.high_steps > 0 && shared.boosted[c] != 0;
    auto* ends = reinterpret_cast<std::uint16_t*>(page + key_endpoint_offset(c));
    ends[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(swap ? high : low, 0));
    ends[4] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(swap ? low : high, 0));
  }
}

// A warp per token: range, endpoints, and codes in place of the row; a few tokens at once, so that their shuffles
// overlap.
template <class F>
__device__ void encode_values(int skip, SealShared<F>& shared, std::uint8_t* page) {
  constexpr int pairs = (F::value.dim + 63) / 64;
  constexpr int levels = (1 << F::value.bits) - 1;
  constexpr int warps = kSealThreads / 32;
  constexpr int batch = F::value.dim > 128 ? 2 : 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = static_cast<int>(threadIdx.x) / 32; first < kPage; first += batch * warps) {
    float2 x[batch][pairs];
    float low[batch], high[batch];
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const auto* row = reinterpret_cast<const std::uint32_t*>(shared.values + (first + k * warps) * F::value_stride);
      low[k] = INFINITY;
      high[k] = -INFINITY;
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        if (lane + 32 * i >= F::value.dim / 2) continue;
        x[k][i] = ptx::widen2<F::bfloat>(row[lane + 32 * i]);
        low[k] = fminf(low[k], fminf(x[k][i].x, x[k][i].y));
        high[k] = fmaxf(high[k], fmaxf(x[k][i].x, x[k][i].y));
      }
    }
#pragma unroll
    for (int bit = 16; bit > 0; bit >>= 1) {
#pragma unroll
      for (int k = 0; k < batch; ++k) {
        low[k] = fminf(low[k], __shfl_xor_sync(0xFFFFFFFFU, low[k], bit));
        high[k] = fmaxf(high[k], __shfl_xor_sync(0xFFFFFFFFU, high[k], bit));
      }
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int t = first + k * warps;
      if (t < skip) low[k] = high[k] = 0;  // endpoints 0 and codes 0: never read, always the same bytes
      const Grid grid = Grid::of(low[k], high[k], levels);
      auto* row = reinterpret_cast<std::uint32_t*>(shared.values + t * F::value_stride);
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        if (lane + 32 * i >= F::value.dim / 2) continue;
        row[lane + 32 * i] = t < skip ? 0 : code_pair(x[k][i], grid, grid, levels, levels);
      }
      if (lane == 0) {
        auto* ends = reinterpret_cast<std::uint16_t*>(page + value_endpoint_offset(F::value, t));
        ends[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(low[k], 0));
        ends[64] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(high[k], 0));
      }
    }
  }
}

// Codes in place of the keys; each thread keeps its two channels, as in measure_keys.
template <class F>
__device__ void quantize_keys(int skip, SealShared<F>& shared) {
  const int part = static_cast<int>(threadIdx.x) / (F::key.dim / 2);
  const int c = static_cast<int>(threadIdx.x) % (F::key.dim / 2) * 2;
  if (part >= F::parts) return;
  const Grid a = shared.key_grid[c];
  const Grid b = shared.key_grid[c + 1];
  const int levels_a = key_levels<F>(shared, c);
  const int levels_b = key_levels<F>(shared, c + 1);
  for (int first = part; first < kPage; first += kBatch * F::parts) {
    std::uint32_t raw[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      raw[k] = *reinterpret_cast<const std::uint32_t*>(shared.keys + (first + k * F::parts) * F::key_stride + c);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int t = first + k * F::parts;
      *reinterpret_cast<std::uint32_t*>(shared.keys + t * F::key_stride + c) =
          t < skip ? 0 : code_pair(ptx::widen2<F::bfloat>(raw[k]), a, b, levels_a, levels_b);
    }
  }
}

// Words of one lane of a quad: code(position, row in tile, depth in step).
template <int Positions, class Code>
__device__ __forceinline__ uint4 make_quad(int lane, const Code& code) {
  std::uint32_t words[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int p = 0; p < Positions; ++p) {
        word |= code(p, lane / 4 + 8 * (r & 1), 16 * (r >> 1) + 4 * (lane % 4) + b) << (8 * b + 8 / Positions * p);
      }
    }
    words[r] = word;
  }
  return {words[0], words[1], words[2], words[3]};
}

// One lane's words of a quad of the main plane: nibbles for 4-bit codes, two low bits else.
template <int Bits, class CodeAt>
__device__ __forceinline__ uint4 make_codes(int group, int lane, const CodeAt& code_at) {
  return make_quad < Bits == 4 ? 2 : 4 > (lane, [&](int p, int row, int depth) {
                                       return code_at(tile_of(Bits, group, p) * kTile + row, depth) &
                                              (Bits == 4 ? 15U : 3U);
                                     });
}

// One lane's words of the 1-bit plane that serves groups 2 * pair and 2 * pair + 1.
template <class CodeAt>
__device__ __forceinline__ uint4 make_plane1(int pair, int lane, const CodeAt& code_at) {
  return make_quad<8>(lane, [&](int bit, int row, int depth) {
    // The inverse of plane1_bit.
    const int group = 2 * pair + (bit % 4 < 2 ? 1 : 0);
    return code_at(tile_of(3, group, bit / 4 * 2 + bit % 2) * kTile + row, depth) >> 2;
  });
}

// `thread` of `threads`.
template <class F>
__device__ void pack_keys(int boosted, const SealShared<F>& shared, std::uint8_t* page, int thread, int threads) {
  const auto code = [&](int token, int channel) -> std::uint32_t {
    return shared.keys[token * F::key_stride + channel];
  };
  constexpr int per_group = F::key.quads_per_group();
  for (int i = thread; i < F::key.groups() * per_group * 32; i += threads) {
    const int group = i / 32 / per_group;
    const int step = i / 32 % per_group;
    uint4 words;
    if (step < F::key.steps()) {
      words = make_codes<F::key.bits>(group, i % 32,
                                      [&](int token, int depth) { return code(token, step * kStep + depth); });
    } else {
      words = make_codes<2>(group, i % 32, [&](int token, int depth) {
        const int entry = (step - F::key.steps()) * kStep + depth;
        return entry < boosted ? code(token, shared.list[entry]) >> 2 : 0U;
      });
    }
    reinterpret_cast<uint4*>(page + F::key.codes_offset())[i] = words;
  }
  if constexpr (F::key.bits == 3) {
    for (int i = thread; i < F::key.steps() * 32; i += threads) {
      reinterpret_cast<uint4*>(page + F::key.plane1_offset())[i] =
          make_plane1(0, i % 32, [&](int token, int depth) { return code(token, i / 32 * kStep + depth); });
    }
  }
  for (int i = thread; i < F::key.high_steps * kStep; i += threads) {
    page[F::key.index_offset() + i] = i < boosted ? shared.list[i] : 0;
  }
}

template <class F>
__device__ void pack_values(const SealShared<F>& shared, std::uint8_t* page, int thread, int threads) {
  // depth: a slot of the 32-token step `step`. Groups may reach past the last channel: codes 0 there.
  const auto code = [&](int channel, int step, int depth) -> std::uint32_t {
    const int token = step * kStep + (depth & 16) + (depth >> 1 & 7) + 8 * (depth & 1);
    return channel < F::value.dim ? shared.values[token * F::value_stride + channel] : 0U;
  };
  constexpr int per_half = F::value.groups() * 2 * 32;
  for (int i = thread; i < 2 * per_half; i += threads) {
    const int half = i / per_half;
    const int step = 2 * half + i / 32 % 2;
    const uint4 words = make_codes<F::value.bits>(i % per_half / 64, i % 32,
                                                  [&](int channel, int depth) { return code(channel, step, depth); });
    reinterpret_cast<uint4*>(page + half * F::value.half_bytes() + F::value.codes_offset())[i % per_half] = words;
  }
  if constexpr (F::value.bits == 3) {
    constexpr int ones = F::value.plane1_groups() * 2 * 32;
    for (int i = thread; i < 2 * ones; i += threads) {
      const int half = i / ones;
      const int step = 2 * half + i / 32 % 2;
      reinterpret_cast<uint4*>(page + half * F::value.half_bytes() + F::value.plane1_offset())[i % ones] =
          make_plane1(i % ones / 64, i % 32, [&](int channel, int depth) { return code(channel, step, depth); });
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kSealThreads) seal_kernel(const SealArgs args) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<SealShared<F>*>(memory);
  const SealJob job = args.jobs[blockIdx.x];
  const auto head = static_cast<std::int64_t>(blockIdx.y);
  std::uint8_t* keys = args.pages + job.page * args.page_stride + head * (F::key.bytes() + F::value.bytes());
  std::uint8_t* values = keys + F::key.bytes();
  load_rows<F>(args.exact + job.exact_page * args.exact_stride + head * F::exact.page_bytes(), shared);
  __syncthreads();
  measure_keys<F>(job.skip, shared);
  encode_values<F>(job.skip, shared, values);
  __syncthreads();
  if constexpr (F::key.high_steps > 0) {
    choose_boosted<F>(args.boosted, shared);
    __syncthreads();
  }
  fit_keys<F>(shared, keys);
  __syncthreads();
  quantize_keys<F>(job.skip, shared);
  __syncthreads();
  // Half of the warps each.
  const int thread = static_cast<int>(threadIdx.x) % (kSealThreads / 2);
  if (threadIdx.x < kSealThreads / 2) {
    pack_keys<F>(args.boosted, shared, keys, thread, kSealThreads / 2);
  } else {
    pack_values<F>(shared, values, thread, kSealThreads / 2);
  }
}

}  // namespace kvant::cuda
