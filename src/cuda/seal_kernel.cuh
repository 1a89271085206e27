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
};

// One side of a page in shared memory, [rows][columns] with a range per column: keys [token][channel], values
// [channel][token]. Rows are padded so that the 8 rows of a quad fall into different banks.
template <int Rows, int Columns>
struct SealSide {
  static constexpr int rows = Rows;
  static constexpr int columns = Columns;
  static constexpr int stride = Columns + 16;
  // Two columns a thread; rows are dealt out over as many threads as are left.
  static constexpr int parts = Columns <= 64 ? 16 : (Columns <= 128 ? 8 : 4);
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
static __device__ __noinline__ std::uint32_t divide_code(float x, Grid grid, int levels) {
  const float t = __fadd_rn(__fdiv_rn(__fsub_rn(x, grid.min), grid.step), 0.5F);
  return grid.step > 0 ? static_cast<std::uint32_t>(fminf(fmaxf(floorf(t), 0.0F), static_cast<float>(levels))) : 0U;
}

// The same by the inverse, as a float whose low bits are the code; `rest` grows to the largest distance from a code.
// The product is off by a few ulp at most, so the code is right wherever the distance is clearly below a half.
__device__ __forceinline__ float round_code(float x, const Grid& grid, float& rest) {
  constexpr float magic = 12582912.0F;  // 1.5 * 2^23
  const float difference = __fsub_rn(x, grid.min);
  const float rounded = __fmaf_rn(difference, grid.inverse, magic);
  const float distance = fabsf(__fmaf_rn(difference, grid.inverse, magic - rounded));
  rest = distance <= rest ? rest : distance;  // a NaN stays
  return rounded;
}

template <class F>
struct SealShared {
  using Keys = SealSide<kPage, F::key.dim>;
  using Values = SealSide<F::value.dim, kPage>;

  alignas(16) std::uint16_t keys[Keys::rows * Keys::stride];  // rows, later codes
  alignas(16) std::uint16_t values[Values::rows * Values::stride];
  double loudness[Keys::parts][F::key.dim];
  float key_low[Keys::parts][F::key.dim], key_high[Keys::parts][F::key.dim];
  float value_low[Values::parts][kPage], value_high[Values::parts][kPage];
  Grid key_grid[F::key.dim];
  Grid value_grid[kPage];
  std::uint8_t boosted[F::key.dim];
  std::uint8_t list[F::key.dim];  // boosted channels, ascending
};

// In what follows, loops first read a batch and then write: a read may not pass an earlier write to the same array.
// They are not unrolled further: every instruction runs a few times only, and fetching it costs more than running it.
constexpr int kBatch = 4;

// Fragments of an exact page to rows.
template <class F>
__device__ void load_rows(const std::uint8_t* exact, SealShared<F>& shared) {
  using Keys = typename SealShared<F>::Keys;
  using Values = typename SealShared<F>::Values;
  constexpr int per_tile = F::exact.tile_bytes() / 16;
  constexpr int count = per_tile * (kPage / kTile);
  static_assert(count % kSealThreads == 0);
#pragma unroll 1
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
          *reinterpret_cast<std::uint32_t*>(shared.keys + (tile * 16 + row) * Keys::stride + fragment * 16 + depth) =
              pairs[r];
        } else {  // rows are channels
          const int channel = (fragment - F::key.dim / 16) * 16 + row;
          *reinterpret_cast<std::uint32_t*>(shared.values + channel * Values::stride + tile * 16 + depth) = pairs[r];
        }
      }
    }
  }
}

// Ranges of two columns over the rows of this thread's part, from row `skip` on; with `loudness` the sums of
// magnitudes, which rank channels: 128 half-precision magnitudes are exact in binary64, whatever the order.
template <class Side, bool Bfloat, bool Loudness>
__device__ void measure(const std::uint16_t* data, int skip, float (*low)[Side::columns], float (*high)[Side::columns],
                        double (*loudness)[Side::columns]) {
  const int part = static_cast<int>(threadIdx.x) / (Side::columns / 2);
  const int c = static_cast<int>(threadIdx.x) % (Side::columns / 2) * 2;
  if (part >= Side::parts) return;
  float2 least{INFINITY, INFINITY};
  float2 most{-INFINITY, -INFINITY};
  double sum[2] = {0, 0};
#pragma unroll 4
  for (int i = 0; i < Side::rows / Side::parts; ++i) {
    const int own = i * Side::parts + part;
    const int row = max(own, skip);  // the place of a row left out is taken by the first that counts
    const float2 x = ptx::widen2<Bfloat>(*reinterpret_cast<const std::uint32_t*>(data + row * Side::stride + c));
    least = {fminf(least.x, x.x), fminf(least.y, x.y)};
    most = {fmaxf(most.x, x.x), fmaxf(most.y, x.y)};
    if constexpr (Loudness) {
      sum[0] += own >= skip ? fabsf(x.x) : 0.0F;
      sum[1] += own >= skip ? fabsf(x.y) : 0.0F;
    }
  }
  *reinterpret_cast<float2*>(&low[part][c]) = least;
  *reinterpret_cast<float2*>(&high[part][c]) = most;
  if constexpr (Loudness) {
    loudness[part][c] = sum[0];
    loudness[part][c + 1] = sum[1];
  }
}

// The `boosted` channels of the largest mean |k|, ties to the lower channel.
template <class F>
__device__ void choose_boosted(int boosted, SealShared<F>& shared) {
  for (int c = static_cast<int>(threadIdx.x); c < F::key.dim; c += kSealThreads) {
    for (int part = 1; part < SealShared<F>::Keys::parts; ++part) shared.loudness[0][c] += shared.loudness[part][c];
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

template <int Parts, int Columns>
__device__ float2 merge_range(const float (&low)[Parts][Columns], const float (&high)[Parts][Columns], int column) {
  float2 range{low[0][column], high[0][column]};
#pragma unroll
  for (int part = 1; part < Parts; ++part) {
    range = {fminf(range.x, low[part][column]), fmaxf(range.y, high[part][column])};
  }
  return range;
}

// Grids and stored endpoints: keys by the first half of the threads, values by the others.
template <class F>
__device__ void fit(int skip, SealShared<F>& shared, std::uint8_t* keys, std::uint8_t* values) {
  constexpr int half = kSealThreads / 2;
  const int i = static_cast<int>(threadIdx.x) % half;
  if (threadIdx.x < half) {
    if (i >= F::key.dim) return;
    const float2 range = merge_range(shared.key_low, shared.key_high, i);
    shared.key_grid[i] = Grid::of(range.x, range.y, key_levels<F>(shared, i));
    const bool swap = F::key.high_steps > 0 && shared.boosted[i] != 0;
    auto* ends = reinterpret_cast<std::uint16_t*>(keys + key_endpoint_offset(i));
    ends[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(swap ? range.y : range.x, 0));
    ends[4] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(swap ? range.x : range.y, 0));
  } else if (i < kPage) {
    float2 range = merge_range(shared.value_low, shared.value_high, i);
    if (i < skip) range = {0, 0};  // endpoints 0 and codes 0: never read, always the same bytes
    shared.value_grid[i] = Grid::of(range.x, range.y, (1 << F::value.bits) - 1);
    auto* ends = reinterpret_cast<std::uint16_t*>(values + value_endpoint_offset(F::value, i));
    ends[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(range.x, 0));
    ends[64] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(range.y, 0));
  }
}

// Codes in place of the rows; each thread keeps the two columns of measure(). Rows before `skip` become code 0.
template <class Side, bool Bfloat>
__device__ void quantize(std::uint16_t* data, const Grid* grid, int levels_a, int levels_b, int skip) {
  const int part = static_cast<int>(threadIdx.x) / (Side::columns / 2);
  const int c = static_cast<int>(threadIdx.x) % (Side::columns / 2) * 2;
  if (part >= Side::parts) return;
  const Grid a = grid[c];
  const Grid b = grid[c + 1];
  constexpr int count = Side::rows / Side::parts;
  constexpr int batch = kBatch;
  static_assert(count % batch == 0);
#pragma unroll 1
  for (int first = 0; first < count; first += batch) {
    float2 x[batch];
    std::uint32_t codes[batch];
    float rest = 0;
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int row = (first + k) * Side::parts + part;
      x[k] = ptx::widen2<Bfloat>(*reinterpret_cast<const std::uint32_t*>(data + row * Side::stride + c));
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      codes[k] = __byte_perm(__float_as_uint(round_code(x[k].x, a, rest)), __float_as_uint(round_code(x[k].y, b, rest)),
                             0x5410);
    }
    if (!(rest <= 0.4999F)) {
#pragma unroll
      for (int k = 0; k < batch; ++k)
        codes[k] = divide_code(x[k].x, a, levels_a) | divide_code(x[k].y, b, levels_b) << 16;
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int row = (first + k) * Side::parts + part;
      *reinterpret_cast<std::uint32_t*>(data + row * Side::stride + c) = row < skip ? 0 : codes[k];
    }
  }
}

// Words of one lane of a quad from code4(row tile's position, row in tile, depth in step): the codes of four depth
// indices from a multiple of four on, one per byte, masked and shifted to their lowest bits.
template <int Positions, class Code4>
__device__ __forceinline__ uint4 make_quad(int lane, const Code4& code4) {
  uint4 words{0, 0, 0, 0};
#pragma unroll 1
  for (int p = 0; p < Positions; ++p) {
    const int shift = 8 / Positions * p;
    const int row = lane / 4;
    const int depth = 4 * (lane % 4);
    words.x |= code4(p, row, depth) << shift;
    words.y |= code4(p, row + 8, depth) << shift;
    words.z |= code4(p, row, depth + 16) << shift;
    words.w |= code4(p, row + 8, depth + 16) << shift;
  }
  return words;
}

// One lane's words of a quad of the main plane: nibbles for 4-bit codes, two low bits else.
template <int Bits, class CodesAt>
__device__ __forceinline__ uint4 make_codes(int group, int lane, const CodesAt& codes_at) {
  return make_quad < Bits == 4 ? 2 : 4 > (lane, [&](int p, int row, int depth) {
                                       const std::uint32_t codes =
                                           codes_at(tile_of(Bits, group, p) * kTile + row, depth);
                                       return Bits == 3 ? codes & 0x03030303U : codes;
                                     });
}

// One lane's words of the 1-bit plane that serves groups 2 * pair and 2 * pair + 1.
template <class CodesAt>
__device__ __forceinline__ uint4 make_plane1(int pair, int lane, const CodesAt& codes_at) {
  return make_quad<8>(lane, [&](int bit, int row, int depth) {
    // The inverse of plane1_bit.
    const int group = 2 * pair + (bit % 4 < 2 ? 1 : 0);
    return codes_at(tile_of(3, group, bit / 4 * 2 + bit % 2) * kTile + row, depth) >> 2 & 0x01010101U;
  });
}

// `thread` of `threads`.
template <class F>
__device__ void pack_keys(int boosted, const SealShared<F>& shared, std::uint8_t* page, int thread, int threads) {
  constexpr int stride = SealShared<F>::Keys::stride;
  constexpr std::uint32_t low_bits = F::key.high_steps > 0 ? 0x03030303U : 0x0F0F0F0FU;  // boosted codes have four
  const auto codes = [&](int token, int channel) -> std::uint32_t {
    const uint2 pairs = *reinterpret_cast<const uint2*>(shared.keys + token * stride + channel);
    return __byte_perm(pairs.x, pairs.y, 0x6420) & low_bits;
  };
  constexpr int per_group = F::key.quads_per_group();
  for (int i = thread; i < F::key.groups() * per_group * 32; i += threads) {
    const int group = i / 32 / per_group;
    const int step = i / 32 % per_group;
    uint4 words;
    if (step < F::key.steps()) {
      words = make_codes<F::key.bits>(group, i % 32,
                                      [&](int token, int depth) { return codes(token, step * kStep + depth); });
    } else {
      words = make_codes<2>(group, i % 32, [&](int token, int depth) {
        std::uint32_t high = 0;
        for (int b = 0; b < 4; ++b) {
          const int entry = (step - F::key.steps()) * kStep + depth + b;
          if (entry < boosted) {
            high |= static_cast<std::uint32_t>(shared.keys[token * stride + shared.list[entry]] >> 2) << (8 * b);
          }
        }
        return high;
      });
    }
    reinterpret_cast<uint4*>(page + F::key.codes_offset())[i] = words;
  }
  if constexpr (F::key.bits == 3) {
    for (int i = thread; i < F::key.steps() * 32; i += threads) {
      reinterpret_cast<uint4*>(page + F::key.plane1_offset())[i] =
          make_plane1(0, i % 32, [&](int token, int depth) { return codes(token, i / 32 * kStep + depth); });
    }
  }
  for (int i = thread; i < F::key.high_steps * kStep; i += threads) {
    page[F::key.index_offset() + i] = i < boosted ? shared.list[i] : 0;
  }
}

// rows: codes as [channel][SealSide::stride]. Of the tokens 64 * first_half..64 * end_half - 1.
template <class F>
__device__ void pack_values(const std::uint16_t* rows, std::uint8_t* page, int first_half, int end_half, int thread,
                            int threads) {
  // depth: the first of four slots of the 32-token step `step`, tokens k, k + 8, k + 1 and k + 9 of their sixteen.
  // Groups may reach past the last channel: codes 0 there.
  const auto codes = [&](int channel, int step, int depth) -> std::uint32_t {
    if (channel >= F::value.dim) return 0U;
    const std::uint16_t* row = rows + channel * SealSide<F::value.dim, kPage>::stride + step * kStep + (depth & 16);
    const std::uint32_t low = *reinterpret_cast<const std::uint32_t*>(row + (depth & 15) / 2);
    const std::uint32_t high = *reinterpret_cast<const std::uint32_t*>(row + (depth & 15) / 2 + 8);
    return __byte_perm(low, high, 0x6240);
  };
  constexpr int per_half = F::value.groups() * 2 * 32;
  for (int i = first_half * per_half + thread; i < end_half * per_half; i += threads) {
    const int half = i / per_half;
    const int step = 2 * half + i / 32 % 2;
    const uint4 words = make_codes<F::value.bits>(i % per_half / 64, i % 32,
                                                  [&](int channel, int depth) { return codes(channel, step, depth); });
    reinterpret_cast<uint4*>(page + half * F::value.half_bytes() + F::value.codes_offset())[i % per_half] = words;
  }
  if constexpr (F::value.bits == 3) {
    constexpr int ones = F::value.plane1_groups() * 2 * 32;
    for (int i = first_half * ones + thread; i < end_half * ones; i += threads) {
      const int half = i / ones;
      const int step = 2 * half + i / 32 % 2;
      reinterpret_cast<uint4*>(page + half * F::value.half_bytes() + F::value.plane1_offset())[i % ones] =
          make_plane1(i % ones / 64, i % 32, [&](int channel, int depth) { return codes(channel, step, depth); });
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
  using Keys = typename SealShared<F>::Keys;
  using Values = typename SealShared<F>::Values;
  measure<Keys, F::bfloat, (F::key.high_steps > 0)>(shared.keys, job.skip, shared.key_low, shared.key_high,
                                                    shared.loudness);
  measure<Values, F::bfloat, false>(shared.values, 0, shared.value_low, shared.value_high, nullptr);
  __syncthreads();
  if constexpr (F::key.high_steps > 0) {
    choose_boosted<F>(args.boosted, shared);
    __syncthreads();
  }
  fit<F>(job.skip, shared, keys, values);
  __syncthreads();
  const int c = static_cast<int>(threadIdx.x) % (F::key.dim / 2) * 2;
  quantize<Keys, F::bfloat>(shared.keys, shared.key_grid, key_levels<F>(shared, c), key_levels<F>(shared, c + 1),
                            job.skip);
  constexpr int value_levels = (1 << F::value.bits) - 1;
  quantize<Values, F::bfloat>(shared.values, shared.value_grid, value_levels, value_levels, 0);
  __syncthreads();
  // Half of the warps each.
  const int thread = static_cast<int>(threadIdx.x) % (kSealThreads / 2);
  if (threadIdx.x < kSealThreads / 2) {
    pack_keys<F>(args.boosted, shared, keys, thread, kSealThreads / 2);
  } else {
    pack_values<F>(shared.values, values, 0, 2, thread, kSealThreads / 2);
  }
}

}  // namespace kvant::cuda
