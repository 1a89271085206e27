// Sealing waterfill's pages on the device: widths by the ranges of the channels, rotated values, least-squares grids;
// the CPU's bytes where the CPU has seen no queries. One kernel: blocks of the keys of a page and KV head, and of the
// values of some tokens (of all heads where they share grids).
//
// Sums in the CPU's order leave eight threads to a row, and the time is that of their chains. Everything around them is
// spread over all threads, and the values wait in shared memory.
#pragma once

#include "cuda/seal_columns.cuh"
#include "cuda/seal_grid.cuh"
#include "cuda/seal_widths.cuh"

namespace kvant::cuda {

constexpr int kSortedThreads = 512;

template <class F>
struct SortedKeyShared : WidthShared<F::key.dim> {
  static constexpr int dim = F::key.dim;
  static constexpr int stride = dim + 4;  // bytes of a token's codes

  float rows[kPage / kRowLanes * kSortedThreads];  // [value][thread]
  alignas(16) std::uint8_t codes[kPage * stride];  // by place, as the CPU's planes hold them
  float low[dim], high[dim];
};

// Ranges and energies, rows before `skip` left out.
template <class F>
__device__ void measure_channels(const std::uint8_t* exact, int skip, SortedKeyShared<F>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  if (warp >= F::key.dim / kTile) return;
  double none[4];
  const auto* data = reinterpret_cast<const uint4*>(exact) + warp * 32 + lane;
  const ColumnRanges<F::bfloat> ranges =
      measure_columns<F::bfloat, false, kPage / kTile>(data, F::exact.tile_bytes() / 16, skip, none);
  if (g >= 4) return;
  const float2 low = ptx::widen2<F::bfloat>(g < 2 ? ranges.low.pair[0] : ranges.low.pair[1]);
  const float2 high = ptx::widen2<F::bfloat>(g < 2 ? ranges.high.pair[0] : ranges.high.pair[1]);
  const int channel = warp * kTile + g / 2 * 8 + lane % 4 * 2 + g % 2;
  shared.low[channel] = g % 2 == 0 ? low.x : low.y;
  shared.high[channel] = g % 2 == 0 ? high.x : high.y;
  const double width = __dsub_rn(shared.high[channel], shared.low[channel]);
  shared.energy[channel] = __dmul_rn(width, width);
}

// The planes, word by word: byte c of a word is channel c of a four. What the widths leave of the budget is zeros.
template <class F>
__device__ void pack_sorted(const SortedKeyShared<F>& shared, std::uint8_t* codes, int bytes) {
  const int six = shared.counts[0], four = shared.counts[1], five = shared.counts[2];
  const int one = shared.counts[3], three = shared.counts[4], two = shared.counts[5];
  const int planes[4][4] = {{4, 1, 0, six + four + five},
                            {1, 0, six + four, five + one + three},
                            {2, 1, six + four + five + one, three + two},
                            {2, 5, 0, six}};
  auto* words = reinterpret_cast<std::uint32_t*>(codes);
  int begin = 0;
#pragma unroll 1
  for (const auto& [bits, shift, first, fours] : planes) {
    const int per_four = bits * (kFourBytes / 4);
    for (int i = static_cast<int>(threadIdx.x); i < fours * per_four; i += kSortedThreads) {
      const int k = i / per_four;
      const int row = i % 2;
      std::uint32_t word = 0;
      // The inverse of sorted_place.
      int group = 0;
      int g = 0;
      if (bits == 1) {
        g = i % per_four / 2 ^ ((k & 2) << 1);
      } else {
        group = i % per_four / 32 * 2 + i / 2 % 2;
        g = i / 4 % 8 ^ ((k & 3) << 1);
      }
      const int positions = 8 / bits;
      const std::uint32_t field = static_cast<std::uint32_t>((1 << bits) - 1) * 0x01010101U;
      for (int p = 0; p < positions; ++p) {
        const int token = (group * positions + p) * kTile + row * 8 + g;
        const std::uint32_t quad = *reinterpret_cast<const std::uint32_t*>(
            shared.codes + token * SortedKeyShared<F>::stride + (first + k) * kFour);
        word |= (quad >> shift & field) << (bits * p);
      }
      words[begin + i] = word;
    }
    begin += fours * per_four;
  }
  for (int i = begin + static_cast<int>(threadIdx.x); i < bytes / 4; i += kSortedThreads) words[i] = 0;
}

// This thread's tokens of a channel, every eighth from `skip` on. Value k goes to to[k * kSortedThreads].
template <class F>
__device__ __forceinline__ void load_channel(const std::uint8_t* exact, int channel, int skip, int lane, int count,
                                             float* to) {
  if (skip == 0) {  // tokens lane and lane + 8 of each tile lie side by side
    const auto* from = reinterpret_cast<const uint2*>(exact + channel / 16 * kQuadBytes + lane * 64 +
                                                      channel % 8 / 2 * 16 + channel % 16 / 8 * 8);
    uint2 pairs[kPage / kTile];
#pragma unroll
    for (int tile = 0; tile < kPage / kTile; ++tile) pairs[tile] = from[tile * (F::exact.tile_bytes() / 8)];
#pragma unroll
    for (int tile = 0; tile < kPage / kTile; ++tile) {
      const float2 a = ptx::widen2<F::bfloat>(pairs[tile].x);
      const float2 b = ptx::widen2<F::bfloat>(pairs[tile].y);
      to[2 * tile * kSortedThreads] = channel % 2 == 0 ? a.x : a.y;
      to[(2 * tile + 1) * kSortedThreads] = channel % 2 == 0 ? b.x : b.y;
    }
    return;
  }
  constexpr ExactFormat format{F::key.dim, F::value.dim};
#pragma unroll 4
  for (int k = 0; k < count; ++k) {
    const auto raw =
        *reinterpret_cast<const std::uint16_t*>(exact + format.key_at(skip + lane + kRowLanes * k, channel));
    to[k * kSortedThreads] = ptx::widen2<F::bfloat>(raw).x;
  }
}

template <class F>
__device__ void seal_sorted_keys(const SealArgs& args, const SealJob& job, int head, std::uint8_t* memory) {
  auto& shared = *reinterpret_cast<SortedKeyShared<F>*>(memory);
  const std::uint8_t* exact =
      args.exact + job.exact_page * args.exact_stride + static_cast<std::int64_t>(head) * F::exact.page_bytes();
  std::uint8_t* keys =
      args.pages + job.page * args.page_stride + static_cast<std::int64_t>(head) * (args.key_bytes + F::value.bytes());
  const int thread = static_cast<int>(threadIdx.x);
  if (job.skip > 0) {  // codes of sinks are 0
    for (int i = thread; i < kPage * SortedKeyShared<F>::stride / 4; i += kSortedThreads) {
      reinterpret_cast<std::uint32_t*>(shared.codes)[i] = 0;
    }
  }
  measure_channels<F>(exact, job.skip, shared);
  __syncthreads();
  choose_widths<F::key.dim>(shared, F::key.dim, kSortedThreads, args.low, args.high, args.budget);
  const int lane = thread % kRowLanes;
  const int tokens = kPage - job.skip;
  float* x = shared.rows + thread;
  for (int channel = thread / kRowLanes; channel < F::key.dim; channel += kSortedThreads / kRowLanes) {
    const RowValues<FloatRow> values{{x}, kSortedThreads, (tokens - lane + kRowLanes - 1) / kRowLanes};
    load_channel<F>(exact, channel, job.skip, lane, values.count, x);
    const int width = shared.widths[channel];
    const int place = shared.places[channel];
    const int levels = (1 << width) - 1;
    const Ends ends = fit_row<F::bfloat>(values, tokens, levels, args.key_least_squares != 0,
                                         {shared.low[channel], shared.high[channel]});
    const Grid grid = Grid::of(ends.min, ends.max, levels);
    const int shift = width % 2 == 0 ? 1 : 0;
    std::uint8_t* to = shared.codes + (job.skip + lane) * SortedKeyShared<F>::stride + place;
    values.each([&](int first, const float(&four)[4], int live) {
      std::uint32_t codes[4];
      row_codes(four, grid, levels, codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= live) break;
        to[(first + i) * (kRowLanes * SortedKeyShared<F>::stride)] = static_cast<std::uint8_t>(codes[i] << shift);
      }
    });
    __syncwarp();
    if (lane != 0) continue;
    auto* out = reinterpret_cast<std::uint16_t*>(keys + place / kFour * 16 + place % kFour * 2);
    out[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.min, 0));
    out[4] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.max, 0));
    keys[F::key.index_offset() + place] = static_cast<std::uint8_t>(channel);
  }
  if (thread < 16) {
    keys[F::key.counts_offset() + thread] =
        thread < 6 ? static_cast<std::uint8_t>(shared.counts[thread]) : std::uint8_t{0};
  }
  __syncthreads();
  pack_sorted<F>(shared, keys + F::key.codes_offset(), args.key_bytes - F::key.codes_offset());
}

// ---- values

// Tokens of a page in the order in which blocks take them: those of a code word, 2t, 2t + 1, 2t + 8 and 2t + 9 of a
// tile, follow each other.
__device__ __forceinline__ int token_of(int number) {
  return number / 16 * 16 + number % 16 / 4 * 2 + number % 2 + number % 4 / 2 * 8;
}

// Every eighth channel of a token, divided by the block and rotated as the CPU does it: the same additions. Value m
// goes to to[m * stride]; returns the thread's range.
template <class F, int Rotation>
__device__ __forceinline__ float2 load_rotated(const std::uint8_t* exact, int number, int lane, float* to, int stride) {
  constexpr int count = F::value.dim / kRowLanes;
  const auto* from = reinterpret_cast<const uint2*>(exact + number / 16 * F::exact.tile_bytes() + F::exact.key_bytes() +
                                                    lane * 64 + number % 16 / 4 * 16 + number % 4 / 2 * 8);
  float x[count];
  {
    uint2 pairs[count / 2];  // channels lane and lane + 8 of each sixteen
#pragma unroll
    for (int m = 0; m < count / 2; ++m) pairs[m] = from[m * (kQuadBytes / 8)];
#pragma unroll
    for (int m = 0; m < count / 2; ++m) {
      const float2 a = ptx::widen2<F::bfloat>(pairs[m].x);
      const float2 b = ptx::widen2<F::bfloat>(pairs[m].y);
      x[2 * m] = (number % 2 == 0 ? a.x : a.y) * (1.0F / Rotation);
      x[2 * m + 1] = (number % 2 == 0 ? b.x : b.y) * (1.0F / Rotation);
    }
  }
#pragma unroll
  for (int bit = 1; bit < kRowLanes; bit *= 2) {
    const float sign = (lane & bit) != 0 ? -1.0F : 1.0F;
#pragma unroll
    for (int m = 0; m < count; ++m) x[m] = __fmaf_rn(sign, x[m], __shfl_xor_sync(0xFFFFFFFFU, x[m], bit));
  }
#pragma unroll
  for (int span = 1; span < Rotation / kRowLanes; span *= 2) {
#pragma unroll
    for (int m = 0; m < count; ++m) {
      if ((m & span) != 0) continue;
      const float difference = __fsub_rn(x[m], x[m + span]);
      x[m] = __fadd_rn(x[m], x[m + span]);
      x[m + span] = difference;
    }
  }
  float2 range{INFINITY, -INFINITY};
#pragma unroll
  for (int m = 0; m < count; ++m) {
    to[m * stride] = x[m];
    range = {fminf(range.x, x[m]), fmaxf(range.y, x[m])};
  }
  return range;
}

// Shared memory of a block of values, its parts one behind the other.
template <class F>
struct RotatedShared {
  int heads;   // under one grid
  int tokens;  // of the block

  __device__ int threads() const { return tokens * kRowLanes; }  // one per token and lane
  __device__ float* rows(std::uint8_t* memory) const { return reinterpret_cast<float*>(memory); }
  __device__ float2* ranges(std::uint8_t* memory) const {
    return reinterpret_cast<float2*>(memory + heads * tokens * F::value.dim * 4);
  }
  // [value of a row][four tokens][lane][slot]
  __device__ std::uint8_t* codes(std::uint8_t* memory) const {
    return reinterpret_cast<std::uint8_t*>(ranges(memory) + heads * tokens);
  }
};

// Code words of the block's tokens. Word i of a head and plane: row half i % 2, then four tokens, row g, group.
template <class F>
__device__ void pack_rotated(const RotatedShared<F>& shared, const std::uint8_t* codes, int first_number,
                             std::uint8_t* pages, std::int64_t head_bytes) {
  constexpr int per_head = F::value.dim / kRowLanes;
  constexpr int tiles = F::value.dim / kTile;
  constexpr int bits = F::value.bits;
  constexpr int positions = tiles_per_group(bits);
  constexpr int above = F::value.plane1_groups();
  const int fours = shared.tokens / 4;
  const int per_group = 16 * fours;
  const int per_page = (F::value.groups() + above) * per_group;
  for (int i = static_cast<int>(threadIdx.x); i < shared.heads * per_page; i += kSortedThreads) {
    const int head = i / per_page;
    const int row = i % 2;
    const int four = i / 2 % fours;
    const int g = i / 2 / fours % 8;
    const int plane = i % per_page / per_group;  // a group of the main plane, or a pair of them of the one above
    const auto field = [&](int tile) -> std::uint32_t {
      if (tile >= tiles) return 0;
      const int value = head * per_head + 2 * tile + row;
      return *reinterpret_cast<const std::uint32_t*>(codes + ((value * fours + four) * kRowLanes + g) * 4);
    };
    std::uint32_t word = 0;
    if (plane < F::value.groups()) {
#pragma unroll
      for (int p = 0; p < positions; ++p) {
        const std::uint32_t four_codes = field(tile_of(bits, plane, p));
        word |= (bits == 3 ? four_codes & 0x03030303U : four_codes) << (8 / positions * p);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2 * positions; ++k) {
        const int group = 2 * (plane - F::value.groups()) + k / positions;
        word |= (field(tile_of(bits, group, k % positions)) >> 2 & 0x01010101U) << plane1_bit(group, k % positions);
      }
    }
    const int number = first_number + 4 * four;
    const int tile = number / 16;
    const int offset = plane < F::value.groups()
                           ? F::value.codes_offset() + plane * (2 * kQuadBytes)
                           : F::value.plane1_offset() + (plane - F::value.groups()) * (2 * kQuadBytes);
    std::uint8_t* to = pages + head * head_bytes + tile / 4 * F::value.half_bytes() + offset +
                       tile / 2 % 2 * kQuadBytes + (4 * g + number % 16 / 4) * 16 + (tile % 2 * 2 + row) * 4;
    *reinterpret_cast<std::uint32_t*>(to) = word;
  }
}

// Tokens part * args.value_tokens and following (in the order of token_of) of the heads under grid `grid`.
template <class F, int Rotation>
__device__ void seal_rotated_values(const SealArgs& args, const SealJob& job, int grid_number, int part,
                                    std::uint8_t* memory) {
  constexpr int levels = (1 << F::value.bits) - 1;
  constexpr int per_head = F::value.dim / kRowLanes;
  const RotatedShared<F> shared{args.shared_grids != 0 ? args.kv_heads : 1, args.value_tokens};
  const int first_head = grid_number * shared.heads;
  const int threads = shared.threads();
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const std::int64_t head_bytes = args.key_bytes + F::value.bytes();
  const std::uint8_t* exact =
      args.exact + job.exact_page * args.exact_stride + static_cast<std::int64_t>(first_head) * F::exact.page_bytes();
  std::uint8_t* pages = args.pages + job.page * args.page_stride + first_head * head_bytes + args.key_bytes;
  float* rows = shared.rows(memory);
  float2* ranges = shared.ranges(memory);
  std::uint8_t* codes = shared.codes(memory);
  for (int i = static_cast<int>(threadIdx.x); i < shared.heads * threads; i += kSortedThreads) {
    const int head = i / threads;
    const int row = i % threads / kRowLanes;
    float2 range = load_rotated<F, Rotation>(exact + static_cast<std::int64_t>(head) * F::exact.page_bytes(),
                                             part * shared.tokens + row, lane,
                                             rows + head * per_head * threads + i % threads, threads);
    range.x = -ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(-range.x)));
    range.y = ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(range.y)));
    if (lane == 0) ranges[head * shared.tokens + row] = range;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < threads) {
    const int row = static_cast<int>(threadIdx.x) / kRowLanes;
    const int number = part * shared.tokens + row;
    float2 range = ranges[row];
    for (int head = 1; head < shared.heads; ++head) {
      const float2 other = ranges[head * shared.tokens + row];
      range = {fminf(range.x, other.x), fmaxf(range.y, other.y)};
    }
    const RowValues<FloatRow> values{{rows + threadIdx.x}, threads, shared.heads * per_head};
    Ends ends = fit_row<F::bfloat>(values, shared.heads * F::value.dim, levels, args.value_least_squares != 0,
                                   {range.x, range.y});
    const int token = token_of(number);
    if (token < job.skip) ends = {0, 0};  // and codes 0: never read, always the same bytes
    const Grid grid = Grid::of(ends.min, ends.max, levels);
    std::uint8_t* to = codes + (row / 4 * kRowLanes + lane) * 4 + (row % 2 * 2 + row % 4 / 2);
    values.each([&](int first, const float(&x)[4], int live) {
      std::uint32_t four[4];
      row_codes(x, grid, levels, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < live) to[(first + i) * threads] = static_cast<std::uint8_t>(four[i]);
      }
    });
    for (int head = lane; head < shared.heads; head += kRowLanes) {
      auto* out = reinterpret_cast<std::uint16_t*>(pages + head * head_bytes + value_endpoint_offset(F::value, token));
      out[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.min, 0));
      out[64] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.max, 0));
    }
  }
  __syncthreads();
  pack_rotated<F>(shared, codes, part * shared.tokens, pages, head_bytes);
}

// Grid: pages; keys of each head, then the parts of the values of each grid.
template <class F, int Rotation>
__global__ void __launch_bounds__(kSortedThreads, 2) seal_sorted(const __grid_constant__ SealBatch batch) {
  const SealArgs& args = batch.args;
  extern __shared__ __align__(16) std::uint8_t memory[];
  const SealJob job = batch.jobs[blockIdx.x];
  const int block = static_cast<int>(blockIdx.y);
  if (block < args.kv_heads) {
    seal_sorted_keys<F>(args, job, block, memory);
  } else {
    const int parts = kPage / args.value_tokens;
    seal_rotated_values<F, Rotation>(args, job, (block - args.kv_heads) / parts, (block - args.kv_heads) % parts,
                                     memory);
  }
}

}  // namespace kvant::cuda
