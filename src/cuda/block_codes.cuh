// Codes of block pages (block_format.hpp) as registers: the words of any planes, joined to bytes, and these to steps of
// the grid where a table says which.
//
// A thread 4g + t of a warp takes a step: rows g and g + 8 of four row tiles, at the four depth indices of `four` and
// of four + 4. Words hold several row tiles, and [row tile][register] is an A fragment of m16n8k32 as it comes out.
#pragma once

#include <type_traits>

#include "cuda/block_format.hpp"
#include "cuda/ptx.cuh"

namespace kvant::cuda {

// [row tile][rows g, g + 8 at four; rows g, g + 8 at four + 4], a byte per code.
using StepCodes = std::uint32_t[4][4];

__device__ __forceinline__ void load_words(const std::uint8_t* at, std::uint32_t& first, std::uint32_t& second) {
  first = *reinterpret_cast<const std::uint32_t*>(at);
  second = *reinterpret_cast<const std::uint32_t*>(at + 8 * kFour);
}

// Codes below 16, a byte each, to their steps of the grid.
__device__ __forceinline__ std::uint32_t look_up(const BlockTile& tile, std::uint32_t codes) {
  const std::uint32_t selector = __byte_perm(codes | codes >> 4, 0, 0x4420);  // a nibble per code
  const std::uint32_t low = __byte_perm(tile.table[0], tile.table[1], selector & 0x7777U);
  if (tile.table_bits < 4) return low;
  const std::uint32_t high = __byte_perm(tile.table[2], tile.table[3], selector & 0x7777U);
  const std::uint32_t upper = (codes >> 3 & 0x01010101U) * 0xFFU;
  return (low & ~upper) | (high & upper);
}

// Nibbles of codes below 8, to their steps: those in the low halves of the bytes, and those in the high halves.
__device__ __forceinline__ void look_up_nibbles(const BlockTile& tile, std::uint32_t nibbles, std::uint32_t& low,
                                                std::uint32_t& high) {
  const std::uint32_t x = __byte_perm(tile.table[0], tile.table[1], nibbles);
  const std::uint32_t y = __byte_perm(tile.table[0], tile.table[1], nibbles >> 16);
  low = __byte_perm(x, y, 0x6420);
  high = __byte_perm(x, y, 0x7531);
}

// Whole row blocks of codes of 2 or 3 bits with a table: row tiles p and p + 2 of a word are looked up together.
template <int Bits>
__device__ __forceinline__ void load_table_step(const BlockTile& tile, const std::uint8_t* head, int chunk, int g,
                                                int four, StepCodes& codes) {
  const int fours = tile.planes[0].fours;
  const std::uint8_t* words = head + tile.planes[0].offset + (chunk * fours + four) * kFourBytes + g * kFour;
  std::uint32_t w[4], v[4];
  load_words(words, w[0], w[1]);
  load_words(words + 4 * kFourBytes, w[2], w[3]);
  if constexpr (Bits == 3) {
    const int groups = (fours + 1) / 2;  // single bits: of two fours each
    const std::uint8_t* singles = head + tile.planes[1].offset + (chunk * groups + four / 2) * kFourBytes + g * kFour;
    load_words(singles, v[0], v[1]);
    load_words(singles + 2 * kFourBytes, v[2], v[3]);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    std::uint32_t single = 0;
    if constexpr (Bits == 3) single = v[r] >> (4 * (four & 1));
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      std::uint32_t nibbles = w[r] >> (2 * p) & 0x33333333U;
      if constexpr (Bits == 3) {
        nibbles |= single << (2 - p) & 0x04040404U;
        nibbles |= single << (4 - p) & 0x40404040U;
      }
      look_up_nibbles(tile, nibbles, codes[p][r], codes[p + 2][r]);
    }
  }
}

// Moves a word's fields `right` bits down (or up, below 0) to where `mask` is.
__device__ __forceinline__ std::uint32_t take_field(std::uint32_t word, int right, std::uint32_t mask) {
  return __funnelshift_r(word, word, static_cast<unsigned>(right)) & mask;
}

// chunk: row tiles 4 chunk to 4 chunk + 3; those that the tile does not have become zeros. planes: of this page, in
// shared memory. RowTiles: of the tile; 0: not known to the compiler.
template <int RowTiles>
__device__ __forceinline__ void load_plane_step(const BlockTile& tile, const BlockPlane* planes,
                                                const std::uint8_t* head, int chunk, int g, int four,
                                                StepCodes& codes) {
  const int row_tiles = RowTiles > 0 ? RowTiles : (tile.rows + kTile - 1) / kTile;
  const bool whole = 4 * chunk + 4 <= row_tiles;
#pragma unroll
  for (int j = 0; j < 4; ++j) codes[j][0] = codes[j][1] = codes[j][2] = codes[j][3] = 0;
  const int count = tile.counts_offset >= 0 ? kBlockPlanes : tile.plane_count;
#pragma unroll 1
  for (int p = 0; p < count; ++p) {
    const BlockPlane plane = planes[p];
    const int bits = plane.bits;
    const std::uint8_t* from = head + plane.offset + g * kFour;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int k = four + 4 * h - plane.first;
      const bool inside = k >= 0 && k < plane.fours;
      const int shift = plane.shift;
      const std::uint32_t mask = inside ? (((1U << bits) - 1) << shift) * 0x01010101U : 0U;
      k = inside ? k : 0;
      std::uint32_t w[2];
      if (!whole) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (4 * chunk + j >= row_tiles) break;
          const BlockWord at = block_word(bits, row_tiles, plane.fours, 4 * chunk + j, 0, k);
          load_words(from + at.byte, w[0], w[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) codes[j][2 * h + e] |= take_field(w[e], at.shift - shift, mask);
        }
      } else if (bits == 4) {  // two blocks of two row tiles
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j % 2 == 0) load_words(from + ((2 * chunk + j / 2) * plane.fours + k) * kFourBytes, w[0], w[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) codes[j][2 * h + e] |= take_field(w[e], 4 * (j % 2) - shift, mask);
        }
      } else {  // a block of four; single bits: of two fours
        const bool single = bits == 1;
        const int groups = single ? (plane.fours + 1) / 2 : static_cast<int>(plane.fours);
        load_words(from + (chunk * groups + (single ? k / 2 : k)) * kFourBytes, w[0], w[1]);
        const int first = (single ? 4 * (k % 2) : 0) - shift;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) codes[j][2 * h + e] |= take_field(w[e], first + j * bits, mask);
        }
      }
    }
  }
  if (tile.lift > 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Bytes of depth indices below lift_from stay.
      const int stay = min(max(tile.lift_from - kFour * (four + 4 * h), 0), kFour);
      const std::uint32_t mask = stay == kFour ? 0xFFFFFFFFU : (1U << (8 * stay)) - 1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 2 * h; r < 2 * h + 2; ++r) {
          codes[j][r] = (codes[j][r] & mask) | (codes[j][r] & ~mask) << tile.lift;
        }
      }
    }
  }
  if (tile.table_bits == 0) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) codes[j][r] = look_up(tile, codes[j][r]);
  }
}

// Joined: what with_joined() says.
template <int Joined, int RowTiles>
__device__ __forceinline__ void load_step(const BlockTile& tile, const BlockPlane* planes, const std::uint8_t* head,
                                          int chunk, int g, int four, StepCodes& codes) {
  if constexpr (Joined > 0) {
    load_table_step<Joined>(tile, head, chunk, g, four, codes);
  } else {
    load_plane_step<RowTiles>(tile, planes, head, chunk, g, four, codes);
  }
}

// Calls body(2), body(3) or body(0), as constants: how load_step reads this chunk. Outside of loops over steps, which
// with short bodies can be unrolled: more code than the instruction caches hold costs more than it saves.
template <class Body>
__device__ __forceinline__ void with_joined(const BlockTile& tile, int chunk, const Body& body) {
  const bool whole = 4 * chunk + 4 <= (tile.rows + kTile - 1) / kTile;
  if (whole && tile.joined == 3) return body(std::integral_constant<int, 3>());
  if (whole && tile.joined == 2) return body(std::integral_constant<int, 2>());
  body(std::integral_constant<int, 0>());
}

}  // namespace kvant::cuda
