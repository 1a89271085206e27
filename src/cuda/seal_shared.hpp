// Shared memory of kernels that write pages, as host and device see it.
#pragma once

#include <cstdint>

#include "cuda/block_format.hpp"

namespace kvant::cuda {

// The choice of widths of up to MostDim channels (seal_widths.cuh).
template <int MostDim>
struct WidthShared {
  double energy[MostDim];  // not negative
  double four_energy[MostDim / kFour];
  int four_width[MostDim / kFour];
  int counts[6];                 // fours per class
  std::uint8_t sorted[MostDim];  // channels by energy
  std::uint8_t ranks[MostDim];   // and the inverse
  std::uint8_t widths[MostDim];  // by channel
  std::uint8_t places[MostDim];  // of each channel in the page
};

// ---- block pages (block_seal_*.cuh)

constexpr int kBlockSealThreads = 256;
constexpr int kBlockSealWarps = kBlockSealThreads / 32;
constexpr int kMostDim = 256;
// Places of a page whose values are coded in one step: no plane has a word with more of them.
constexpr int kBlockSealPlaces = 16;
constexpr int kMostGridTokens = 16;

// Behind each of these come arrays whose extents depend on the shape. Strides are odd in words, so that the threads of
// a warp meet different banks.

// uint16 keys[depth][kKeyStride], the tokens that are coded; then uint8 codes[rows][code_stride] by place of the
// channel.
struct alignas(16) BlockKeyShared {
  static constexpr int kKeyStride = kPage + 2;

  BlockPlane planes[kBlockPlanes];
  WidthShared<kMostDim> widths;
  float low[kMostDim], high[kMostDim];  // ends of each channel's grid
  std::uint8_t order[kMostDim];         // the channel of each place
  std::uint8_t nearest[kTableStepsOnDevice + 2];
  std::uint8_t position[kPage];  // of each token among those of the tile that are coded; 255: not among them
  std::uint8_t kept[kPage];      // the tile's row of each of them
  int count;                     // how many they are

  KVANT_BOTH static constexpr int code_stride(int depth) { return depth + kFour; }
  KVANT_BOTH static constexpr int keys_bytes(int depth) { return depth * kKeyStride * 2; }
  KVANT_BOTH static constexpr int bytes(int depth) {
    return static_cast<int>(sizeof(BlockKeyShared)) + keys_bytes(depth) + kPage * code_stride(depth);
  }
};

// float rows[tokens][row_stride], the values of each token under one grid; then int counts[heads] of their outliers.
struct alignas(16) BlockGridShared {
  static constexpr int kListed = 128;

  std::uint32_t lists[kBlockSealWarps][2][kListed];  // values that may be the ends of a row
  float ends[kMostGridTokens][2];

  KVANT_BOTH static constexpr int row_stride(int values) { return values + 8; }
  KVANT_BOTH static constexpr std::int64_t bytes(int tokens, int heads, int dim) {
    return static_cast<std::int64_t>(sizeof(BlockGridShared)) + std::int64_t{4} * tokens * row_stride(heads * dim) +
           std::int64_t{4} * heads;
  }
};

// float rows[warps][dim]; then uint8 codes[dim][kCodeStride].
struct alignas(16) BlockValueShared {
  static constexpr int kCodeStride = kBlockSealPlaces + kFour;

  BlockPlane planes[kBlockPlanes];
  std::uint32_t outliers[kBlockSealPlaces][kMostDim / 32];  // a bit per channel
  int counts[kBlockSealWarps];                              // of them, per warp that counts
  std::uint8_t nearest[kTableStepsOnDevice + 2];

  KVANT_BOTH static constexpr int bytes(int dim) {
    return static_cast<int>(sizeof(BlockValueShared)) + kBlockSealWarps * dim * 4 + dim * kCodeStride;
  }
};

}  // namespace kvant::cuda
