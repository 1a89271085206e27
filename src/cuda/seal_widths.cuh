// Channels by energy, their widths and their places in a page: the choice of waterfill (src/methods/waterfill), and the
// order of channels that every sorted tile has.
#pragma once

#include "cuda/seal_pack.cuh"
#include "cuda/seal_shared.hpp"

namespace kvant::cuda {

// Place of a width in the order of the page's classes: 6, 4, 5, 1, 3, 2 (src/cache/tile.hpp).
__device__ constexpr int kClassOf[7] = {-1, 3, 5, 4, 1, 2, 0};

// In the functions below dim is the number of channels, threads that of the block.

// Channels by energy, ties to the lower one.
template <int MostDim>
__device__ __forceinline__ void rank_channels(WidthShared<MostDim>& shared, int dim, int threads) {
  const int parts = threads / dim >= 4 ? 4 : (threads / dim >= 2 ? 2 : 1);  // threads of a channel
  const int channel = static_cast<int>(threadIdx.x) / parts;
  const int part = static_cast<int>(threadIdx.x) % parts;
  int rank = 0;
  if (channel < dim) {
    const long long mine = __double_as_longlong(shared.energy[channel]);  // bits order as the numbers do
#pragma unroll 8
    for (int other = part; other < dim; other += parts) {
      rank += __double_as_longlong(shared.energy[other]) > (other < channel ? mine - 1 : mine) ? 1 : 0;
    }
  }
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    if (bit < parts) rank += __shfl_xor_sync(0xFFFFFFFFU, rank, bit);
  }
  if (part != 0 || channel >= dim) return;
  shared.sorted[rank] = static_cast<std::uint8_t>(channel);
  shared.ranks[channel] = static_cast<std::uint8_t>(rank);
}

// Bits to fours as allocate_widths gives them: always to the largest 4^-width * energy, the first on ties. Bit j of a
// four is given if fewer than the budget come before it: bits of larger energies, and of earlier fours among equals.
template <int MostDim>
__device__ __forceinline__ void give_bits(WidthShared<MostDim>& shared, int dim, int threads, int low, int high,
                                          int budget) {
  const int fours = dim / kFour;
  const int choices = high - low;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < fours * choices; i += threads) {
    const int four = i / choices;
    const int j = i % choices;
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
}

// Counts per class and places of all channels, whose widths width_of(channel) says.
template <int MostDim, class WidthOf>
__device__ __forceinline__ void place_channels(WidthShared<MostDim>& shared, int dim, const WidthOf& width_of) {
  constexpr int rounds = MostDim / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= dim / 32) return;
  int classes[rounds];
  int own = 0, width = 0;
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    if (r >= dim / 32) break;
    const int w = width_of(32 * r + lane);
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
      if (r >= dim / 32) break;
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

// Widths low..high that sum to the budget over the fours, by the energies. All threads of the block.
template <int MostDim>
__device__ __forceinline__ void choose_widths(WidthShared<MostDim>& shared, int dim, int threads, int low, int high,
                                              int budget) {
  const int thread = static_cast<int>(threadIdx.x);
  rank_channels(shared, dim, threads);
  __syncthreads();
  if (thread < dim / kFour) {
    double sum = 0;
    for (int c = 0; c < kFour; ++c) sum = __dadd_rn(sum, shared.energy[shared.sorted[thread * kFour + c]]);
    shared.four_energy[thread] = sum;
    shared.four_width[thread] = low;
  }
  __syncthreads();
  give_bits(shared, dim, threads, low, high, budget);
  __syncthreads();
  place_channels(shared, dim, [&](int channel) { return shared.four_width[shared.ranks[channel] / kFour]; });
  __syncthreads();
}

}  // namespace kvant::cuda
