// Sealing waterfill's pages on the device: widths by the ranges of the channels, rotated values, least-squares grids;
// the CPU's bytes where the CPU has seen no queries. One kernel for keys (a block per page and KV head), one for values
// (a block per half page and grid: all heads where they share grids).
//
// A thread's values wait in shared memory, so that loops over them stay loops: as in the other formats' kernel every
// instruction runs a few times only, and fetching it costs more than running it.
#pragma once

#include "cuda/seal_grid.cuh"

namespace kvant::cuda {

constexpr int kRowLanes = 8;                         // threads of a row
constexpr int kSealRows = kSealThreads / kRowLanes;  // rows that a block has under way
// Place of a width in the order of the page's classes: 6, 4, 5, 1, 3, 2 (src/cache/tile.hpp).
__device__ constexpr int kClassOf[7] = {-1, 3, 5, 4, 1, 2, 0};

template <class F>
struct SortedSealShared {
  static constexpr int dim = F::key.dim;
  static constexpr int fours = dim / kFour;
  static constexpr int stride = dim + 4;  // bytes of a token's codes

  float rows[kPage / kRowLanes * kSealThreads];    // [value][thread]
  alignas(16) std::uint8_t codes[kPage * stride];  // by place, as the CPU's planes hold them
  double energy[dim];
  std::uint8_t sorted[dim];  // channels by energy
  std::uint8_t widths[dim];  // by channel
  std::uint8_t classes[dim];
  std::uint8_t places[dim];  // of each channel in the page
  std::uint8_t four_width[fours];
  int counts[6];
};

// Bits to fours as allocate_widths gives them: always to the largest 4^-width * energy, the first on ties. One warp.
template <class F>
__device__ void give_bits(SortedSealShared<F>& shared, int low, int high, int budget) {
  using S = SortedSealShared<F>;
  constexpr int rounds = (S::fours + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double left[rounds];
  int width[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int four = 32 * r + lane;
    left[r] = 0;
    width[r] = four < S::fours ? low : high;
    for (int c = 0; four < S::fours && c < kFour; ++c) {
      left[r] = __dadd_rn(left[r], shared.energy[shared.sorted[four * kFour + c]]);
    }
  }
  for (int bits = budget - low * S::fours; bits > 0; --bits) {
    // Energies are not negative: their bits order as they do. 0 in the upper word: no bit may be added.
    unsigned upper = 0, lower = 0;
    int best = 0;
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const auto bits_of = static_cast<unsigned long long>(__double_as_longlong(left[r]));
      const unsigned u = width[r] < high ? static_cast<unsigned>(bits_of >> 32) + 1U : 0U;
      const auto l = static_cast<unsigned>(bits_of);
      if (u > upper || (u == upper && l > lower)) {
        upper = u;
        lower = l;
        best = r;
      }
    }
    const unsigned top = __reduce_max_sync(0xFFFFFFFFU, upper);
    if (top == 0) break;
    const unsigned rest = __reduce_max_sync(0xFFFFFFFFU, upper == top ? lower : 0U);
    const bool mine = upper == top && lower == rest;
    const unsigned four = __reduce_min_sync(0xFFFFFFFFU, mine ? static_cast<unsigned>(32 * best + lane) : 255U);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      if (four != static_cast<unsigned>(32 * r + lane)) continue;
      ++width[r];
      left[r] *= 0.25;
    }
  }
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    if (32 * r + lane < S::fours) shared.four_width[32 * r + lane] = static_cast<std::uint8_t>(width[r]);
  }
}

// Widths, counts and places from the energies.
template <class F>
__device__ void order_channels(SortedSealShared<F>& shared, const SealArgs& args) {
  constexpr int dim = F::key.dim;
  const int thread = static_cast<int>(threadIdx.x);
  int rank = 0;
  if (thread < dim) {
    const double mine = shared.energy[thread];
    for (int other = 0; other < dim; ++other) {
      const double theirs = shared.energy[other];
      rank += theirs > mine || (theirs == mine && other < thread) ? 1 : 0;
    }
    shared.sorted[rank] = static_cast<std::uint8_t>(thread);
  }
  if (thread < 6) shared.counts[thread] = 0;
  __syncthreads();
  if (thread < 32) give_bits<F>(shared, args.low, args.high, args.budget);
  __syncthreads();
  if (thread < dim) {
    shared.widths[thread] = shared.four_width[rank / kFour];
    shared.classes[thread] = static_cast<std::uint8_t>(kClassOf[shared.widths[thread]]);
  }
  if (thread < dim / kFour) atomicAdd(&shared.counts[kClassOf[shared.four_width[thread]]], 1);
  __syncthreads();
  if (thread < dim) {
    const int mine = shared.classes[thread];
    int place = 0;
    for (int other = 0; other < dim; ++other) {
      const int theirs = shared.classes[other];
      place += theirs < mine || (theirs == mine && other < thread) ? 1 : 0;
    }
    shared.places[thread] = static_cast<std::uint8_t>(place);
  }
  __syncthreads();
}

// The planes, word by word: byte c of a word is channel c of a four. What the widths leave of the budget is zeros.
template <class F>
__device__ void pack_sorted(const SortedSealShared<F>& shared, std::uint8_t* codes, int bytes) {
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
    for (int i = static_cast<int>(threadIdx.x); i < fours * per_four; i += kSealThreads) {
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
            shared.codes + token * SortedSealShared<F>::stride + (first + k) * kFour);
        word |= (quad >> shift & field) << (bits * p);
      }
      words[begin + i] = word;
    }
    begin += fours * per_four;
  }
  for (int i = begin + static_cast<int>(threadIdx.x); i < bytes / 4; i += kSealThreads) words[i] = 0;
}

template <class F>
__global__ void __launch_bounds__(kSealThreads) seal_sorted_keys(const SealArgs args) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<SortedSealShared<F>*>(memory);
  constexpr int dim = F::key.dim;
  constexpr ExactFormat format{F::key.dim, F::value.dim};
  const SealJob job = args.jobs[blockIdx.x];
  const auto head = static_cast<std::int64_t>(blockIdx.y);
  const std::uint8_t* exact = args.exact + job.exact_page * args.exact_stride + head * F::exact.page_bytes();
  std::uint8_t* keys = args.pages + job.page * args.page_stride + head * (args.key_bytes + F::value.bytes());
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int first = static_cast<int>(threadIdx.x) / kRowLanes;
  const int count = kPage - job.skip;
  // This thread's tokens of a channel, the first `skip` of the page left out.
  float* x = shared.rows + threadIdx.x;
  const auto load = [&](int channel) {
#pragma unroll 8
    for (int m = 0; m < kPage / kRowLanes; ++m) {
      const int token = job.skip + lane + kRowLanes * m;
      if (token >= kPage) continue;
      const auto raw = *reinterpret_cast<const std::uint16_t*>(exact + format.key_at(token, channel));
      x[m * kSealThreads] = ptx::widen2<F::bfloat>(raw).x;
    }
  };
  const auto each = [&](const auto& visit) {
#pragma unroll 4
    for (int m = 0; lane + kRowLanes * m < count; ++m) visit(x[m * kSealThreads]);
    __syncwarp();
  };

  for (int channel = first; channel < dim; channel += kSealRows) {
    load(channel);
    RowRange range;
    each([&](float value) { range.add(value); });
    range.combine();
    const double width = __dsub_rn(range.high, range.low);
    if (lane == 0) shared.energy[channel] = __dmul_rn(width, width);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kPage * SortedSealShared<F>::stride / 4; i += kSealThreads) {
    reinterpret_cast<std::uint32_t*>(shared.codes)[i] = 0;
  }
  __syncthreads();
  order_channels<F>(shared, args);
  for (int channel = first; channel < dim; channel += kSealRows) {
    load(channel);
    const int width = shared.widths[channel];
    const int place = shared.places[channel];
    const int levels = (1 << width) - 1;
    const Ends ends = fit_row<F::bfloat>(count, levels, args.key_least_squares != 0, each);
    const Grid grid = Grid::of(ends.min, ends.max, levels);
    const int shift = width % 2 == 0 ? 1 : 0;
#pragma unroll 1
    for (int m = 0; lane + kRowLanes * m < count; ++m) {
      shared.codes[(job.skip + lane + kRowLanes * m) * SortedSealShared<F>::stride + place] =
          static_cast<std::uint8_t>(row_code(x[m * kSealThreads], grid, levels) << shift);
    }
    if (lane != 0) continue;
    auto* to = reinterpret_cast<std::uint16_t*>(keys + place / kFour * 16 + place % kFour * 2);
    to[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.min, 0));
    to[4] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.max, 0));
    keys[F::key.index_offset() + place] = static_cast<std::uint8_t>(channel);
  }
  if (threadIdx.x < 16) {
    keys[F::key.counts_offset() + threadIdx.x] =
        threadIdx.x < 6 ? static_cast<std::uint8_t>(shared.counts[threadIdx.x]) : std::uint8_t{0};
  }
  __syncthreads();
  pack_sorted<F>(shared, keys + F::key.codes_offset(), args.key_bytes - F::key.codes_offset());
}

// Every eighth channel of a token, rotated and divided by the block as the CPU does it: the same additions. Value m
// goes to to[m * kSealThreads].
template <class F, int Rotation>
__device__ __noinline__ void load_rotated(const std::uint8_t* exact, int token, int lane, float* to) {
  constexpr int count = F::value.dim / kRowLanes;
  constexpr ExactFormat format{F::key.dim, F::value.dim};
  float x[count];
#pragma unroll
  for (int m = 0; m < count; ++m) {
    const auto raw = *reinterpret_cast<const std::uint16_t*>(exact + format.value_at(token, lane + kRowLanes * m));
    x[m] = ptx::widen2<F::bfloat>(raw).x;
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
#pragma unroll
  for (int m = 0; m < count; ++m) to[m * kSealThreads] = x[m] * (1.0F / Rotation);
}

template <class F>
struct RotatedSealShared {
  static constexpr int stride = SealSide<F::value.dim, kPage>::stride;
  alignas(16) std::uint16_t codes[F::value.dim * stride];  // [channel][token]
  float rows[F::value.dim / kRowLanes * kSealThreads];     // [value][thread]
};

template <class F, int Rotation>
__global__ void __launch_bounds__(kSealThreads) seal_rotated_values(const SealArgs args) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<RotatedSealShared<F>*>(memory);
  constexpr int levels = (1 << F::value.bits) - 1;
  constexpr int per_head = F::value.dim / kRowLanes;
  const SealJob job = args.jobs[blockIdx.x];
  const int heads = args.kv_heads / static_cast<int>(gridDim.y);  // under one grid
  const int first_head = static_cast<int>(blockIdx.y) * heads;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int first = static_cast<int>(threadIdx.x) / kRowLanes;
  const auto exact_of = [&](int head) {
    return args.exact + job.exact_page * args.exact_stride +
           static_cast<std::int64_t>(first_head + head) * F::exact.page_bytes();
  };
  float* x = shared.rows + threadIdx.x;
  const int half = static_cast<int>(blockIdx.z);
  const int token = half * kSealRows + first;
  static_assert(kSealRows == kPage / 2);
  if (heads == 1) load_rotated<F, Rotation>(exact_of(0), token, lane, x);
  const auto each = [&](const auto& visit) {
    for (int head = 0; head < heads; ++head) {
      if (heads > 1) load_rotated<F, Rotation>(exact_of(head), token, lane, x);
#pragma unroll 4
      for (int m = 0; m < per_head; ++m) visit(x[m * kSealThreads]);
    }
  };
  Ends ends = fit_row<F::bfloat>(heads * F::value.dim, levels, args.value_least_squares != 0, each);
  if (token < job.skip) ends = {0, 0};  // and codes 0: never read, always the same bytes
  const Grid grid = Grid::of(ends.min, ends.max, levels);
  for (int head = 0; head < heads; ++head) {
    std::uint8_t* values = args.pages + job.page * args.page_stride +
                           static_cast<std::int64_t>(first_head + head) * (args.key_bytes + F::value.bytes()) +
                           args.key_bytes;
    if (heads > 1) load_rotated<F, Rotation>(exact_of(head), token, lane, x);
#pragma unroll 1
    for (int m = 0; m < per_head; ++m) {
      shared.codes[(lane + kRowLanes * m) * RotatedSealShared<F>::stride + token] =
          static_cast<std::uint16_t>(row_code(x[m * kSealThreads], grid, levels));
    }
    if (lane == 0) {
      auto* to = reinterpret_cast<std::uint16_t*>(values + value_endpoint_offset(F::value, token));
      to[0] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.min, 0));
      to[64] = static_cast<std::uint16_t>(ptx::narrow2<F::bfloat>(ends.max, 0));
    }
    __syncthreads();
    pack_values<F>(shared.codes, values, half, half + 1, static_cast<int>(threadIdx.x), kSealThreads);
    __syncthreads();
  }
}

}  // namespace kvant::cuda
