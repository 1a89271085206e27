// Ranges, widths and places of the key channels of a waterfill page.
#pragma once

#include "cuda/seal_columns.cuh"
#include "cuda/seal_grid.cuh"

namespace kvant::cuda {

constexpr int kSortedThreads = 512;
// Place of a width in the order of the page's classes: 6, 4, 5, 1, 3, 2 (src/cache/tile.hpp).
__device__ constexpr int kClassOf[7] = {-1, 3, 5, 4, 1, 2, 0};

template <class F>
struct SortedKeyShared {
  static constexpr int dim = F::key.dim;
  static constexpr int fours = dim / kFour;
  static constexpr int stride = dim + 4;  // bytes of a token's codes

  float rows[kPage / kRowLanes * kSortedThreads];  // [value][thread]
  alignas(16) std::uint8_t codes[kPage * stride];  // by place, as the CPU's planes hold them
  double energy[dim];
  double four_energy[fours];
  float low[dim], high[dim];
  int four_width[fours];
  int counts[6];             // fours per class
  std::uint8_t sorted[dim];  // channels by energy
  std::uint8_t ranks[dim];   // and the inverse
  std::uint8_t widths[dim];  // by channel
  std::uint8_t places[dim];  // of each channel in the page
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

// Channels by energy, ties to the lower one.
template <class F>
__device__ void rank_channels(SortedKeyShared<F>& shared) {
  constexpr int parts = kSortedThreads / F::key.dim >= 4 ? 4 : 2;  // threads of a channel
  const int channel = static_cast<int>(threadIdx.x) / parts;
  const int part = static_cast<int>(threadIdx.x) % parts;
  int rank = 0;
  if (channel < F::key.dim) {
    const long long mine = __double_as_longlong(shared.energy[channel]);  // not negative: bits order as they do
#pragma unroll 8
    for (int other = part; other < F::key.dim; other += parts) {
      rank += __double_as_longlong(shared.energy[other]) > (other < channel ? mine - 1 : mine) ? 1 : 0;
    }
  }
#pragma unroll
  for (int bit = 1; bit < parts; bit *= 2) rank += __shfl_xor_sync(0xFFFFFFFFU, rank, bit);
  if (part != 0 || channel >= F::key.dim) return;
  shared.sorted[rank] = static_cast<std::uint8_t>(channel);
  shared.ranks[channel] = static_cast<std::uint8_t>(rank);
}

// Bits to fours as allocate_widths gives them: always to the largest 4^-width * energy, the first on ties. Bit j of a
// four is given if fewer than the budget come before it: bits of larger energies, and of earlier fours among equals.
template <class F>
__device__ void give_bits(SortedKeyShared<F>& shared, int low, int high, int budget) {
  constexpr int fours = SortedKeyShared<F>::fours;
  const int choices = high - low;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= fours * choices) return;
  const int four = thread / choices;
  const int j = thread % choices;
  const long long mine = __double_as_longlong(shared.four_energy[four]);
  // A quarter takes 2 off the exponent. Zeros stay zero.
  const long long wanted = mine == 0 ? 0 : mine - (static_cast<long long>(j) << 53);
  int before = 0;
#pragma unroll 4
  for (int other = 0; other < fours; ++other) {
    const long long theirs = __double_as_longlong(shared.four_energy[other]);
    const auto steps = static_cast<int>((theirs - wanted - (other < four ? 0 : 1)) >> 53) + 1;
    const int equal = other < four ? choices : (other == four ? j : 0);
    before += theirs == 0 && wanted == 0 ? equal : min(max(steps, 0), choices);
  }
  if (before < budget - low * fours) atomicAdd(&shared.four_width[four], 1);
}

// Widths, counts per class and places of all channels, from the widths of the fours.
template <class F>
__device__ void place_channels(SortedKeyShared<F>& shared) {
  constexpr int rounds = F::key.dim / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= rounds) return;
  int classes[rounds];
  int own = 0, width = 0;
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int w = shared.four_width[shared.ranks[32 * r + lane] / kFour];
    classes[r] = kClassOf[w];
    if (r == warp) {
      own = classes[r];
      width = w;
    }
  }
  int place = 0;
#pragma unroll
  for (int c = 0; c < 6; ++c) {
    int count = 0;
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const unsigned members = __ballot_sync(0xFFFFFFFFU, classes[r] == c);
      count += __popc(members);
      const unsigned earlier = r < warp ? members : (r == warp ? members & ((1U << lane) - 1U) : 0U);
      if (c == own) place += __popc(earlier);
    }
    if (c < own) place += count;
    if (static_cast<int>(threadIdx.x) == c) shared.counts[c] = count / kFour;
  }
  shared.widths[32 * warp + lane] = static_cast<std::uint8_t>(width);
  shared.places[32 * warp + lane] = static_cast<std::uint8_t>(place);
}

template <class F>
__device__ void choose_widths(SortedKeyShared<F>& shared, const SealArgs& args) {
  const int thread = static_cast<int>(threadIdx.x);
  rank_channels<F>(shared);
  __syncthreads();
  if (thread < SortedKeyShared<F>::fours) {
    double sum = 0;
    for (int c = 0; c < kFour; ++c) sum = __dadd_rn(sum, shared.energy[shared.sorted[thread * kFour + c]]);
    shared.four_energy[thread] = sum;
    shared.four_width[thread] = args.low;
  }
  __syncthreads();
  give_bits<F>(shared, args.low, args.high, args.budget);
  __syncthreads();
  place_channels<F>(shared);
  __syncthreads();
}

}  // namespace kvant::cuda
