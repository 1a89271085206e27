// Codes of block pages (block_format.hpp) as registers: the words of any planes, joined to bytes, and these to steps of
// the grid where a table says which.
//
// A thread takes a step: four row tiles, in each of them four registers of a row and four depth indices. Words hold
// several row tiles. Which rows and depth indices is a matter of who reads: FragmentWords or RowWords.
#pragma once

#include <type_traits>

#include "cuda/block_format.hpp"
#include "cuda/ptx.cuh"

namespace kvant::cuda {

// [row tile][register], a byte per code.
using StepCodes = std::uint32_t[4][4];

// Thread 4g + t: rows g and g + 8 at the four depth indices of `four`, then of four + 4. A row tile's registers are an
// A fragment of m16n8k32. four(r), row(r): how far register r's lie behind those that the thread is called with.
struct FragmentWords {
  static constexpr int four(int r) { return r / 2 * 4; }
  static constexpr int row(int r) { return r % 2 * 8; }
  // Of single bits a word has two fours.
  static constexpr int single_group(int r) { return r / 2 * 2; }
  static __device__ __forceinline__ int single_shift(int first_four, int /*r*/) { return 4 * (first_four & 1); }
  static constexpr bool paired = false;
  static __device__ __forceinline__ std::uint32_t keep(std::uint32_t x) { return x; }
};

// One row, at an even `four` and the next one, then at those four on: twice eight depth indices in a row.
struct RowWords {
  static constexpr int four(int r) { return r / 2 * 4 + r % 2; }
  static constexpr int row(int /*r*/) { return 0; }
  static constexpr int single_group(int r) { return r / 2 * 2; }
  static __device__ __forceinline__ int single_shift(int /*first_four*/, int r) { return 4 * (r % 2); }
  // Steps that came out of a table stay as they did (has_table): two row tiles' of two depth indices by turns in one
  // register, of the next two in the other tile's.
  static constexpr bool paired = true;
  static __device__ __forceinline__ std::uint32_t keep(std::uint32_t x) { return ptx::keep_in_register(x); }
};
// Which row tile shares registers with row tile j of a table's codes.
constexpr int pair_distance(BlockCodes codes) {
  return codes == BlockCodes::table4 ? 1 : 2;
}

__device__ __forceinline__ std::uint32_t load_word(const std::uint8_t* at) {
  return *reinterpret_cast<const std::uint32_t*>(at);
}
// Register r's word in a plane whose words of the first row and four are at `words`.
template <class Words>
__device__ __forceinline__ std::uint32_t load_word_of(const std::uint8_t* words, int r) {
  return load_word(words + Words::four(r) * kFourBytes + Words::row(r) * kFour);
}

// Codes below 16, a byte each, to their steps of the grid.
__device__ __forceinline__ std::uint32_t look_up(const BlockTile& tile, std::uint32_t codes) {
  const std::uint32_t selector = __byte_perm(codes | codes >> 4, 0, 0x4420);  // a nibble per code
  const std::uint32_t low = __byte_perm(tile.table[0], tile.table[1], selector & 0x7777U);
  if (tile.table_bits < 4) return low;
  const std::uint32_t high = __byte_perm(tile.table[2], tile.table[3], selector & 0x7777U);
  return __byte_perm(low, high, (selector >> 1 & 0x4444U) | 0x3210U);
}

// Nibbles of codes to their steps, four to a word: of the lower two bytes, low half first, and of the upper two. Bits:
// of a code.
template <int Bits, class Words>
class LevelTable {
 public:
  __device__ __forceinline__ explicit LevelTable(const BlockTile& tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) table_[i] = Words::keep(tile.table[i]);
  }

  // low, high: those of the bytes' low and high halves; Words::paired: as they come out.
  __device__ __forceinline__ void look_up(std::uint32_t nibbles, std::uint32_t& low, std::uint32_t& high) const {
    const std::uint32_t selector = Bits < 4 ? nibbles : nibbles & 0x77777777U;
    std::uint32_t x = ptx::permute(table_[0], table_[1], selector);
    std::uint32_t y = ptx::permute(table_[0], table_[1], selector >> 16);
    if constexpr (Bits == 4) {
      const std::uint32_t upper = (nibbles >> 1 & 0x44444444U) | 0x32103210U;  // bytes 0 to 3 of one table or the other
      x = ptx::permute(x, ptx::permute(table_[2], table_[3], selector), upper);
      y = ptx::permute(y, ptx::permute(table_[2], table_[3], selector >> 16), upper >> 16);
    }
    low = Words::paired ? x : __byte_perm(x, y, 0x6420);
    high = Words::paired ? y : __byte_perm(x, y, 0x7531);
  }

 private:
  std::uint32_t table_[4];
};

// Whole row blocks of codes that one or two planes hold for all depth indices, with a table or without.

// Codes of 4 bits: a word has two row tiles.
template <bool Table, class Words>
__device__ __forceinline__ void load_four_bits(const BlockTile& tile, const std::uint8_t* head, int chunk, int row,
                                               int four, StepCodes& codes) {
  [[maybe_unused]] const LevelTable<4, Words> table(tile);
  const int fours = tile.planes[0].fours;
  const std::uint8_t* words = head + tile.planes[0].offset + (2 * chunk * fours + four) * kFourBytes + row * kFour;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t word = load_word_of<Words>(words + j / 2 * fours * kFourBytes, r);
      if constexpr (Table) {
        table.look_up(word, codes[j][r], codes[j + 1][r]);
      } else {
        codes[j][r] = word & 0x0F0F0F0FU;
        codes[j + 1][r] = word >> 4 & 0x0F0F0F0FU;
      }
    }
  }
}

// Of 2 or 3 bits: row tiles p and p + 2 of a word are nibbles of the same bytes, and are looked up together.
template <int Bits, bool Table, class Words>
__device__ __forceinline__ void load_few_bits(const BlockTile& tile, const std::uint8_t* head, int chunk, int row,
                                              int four, StepCodes& codes) {
  [[maybe_unused]] const LevelTable<Bits, Words> table(tile);
  const int fours = tile.planes[0].fours;
  const std::uint8_t* words = head + tile.planes[0].offset + (chunk * fours + four) * kFourBytes + row * kFour;
  std::uint32_t w[4], v[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) w[r] = load_word_of<Words>(words, r);
  if constexpr (Bits == 3) {
    const int groups = (fours + 1) / 2;
    const std::uint8_t* singles = head + tile.planes[1].offset + (chunk * groups + four / 2) * kFourBytes + row * kFour;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      v[r] = load_word(singles + Words::single_group(r) * kFourBytes + Words::row(r) * kFour);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    std::uint32_t single = 0;
    if constexpr (Bits == 3) single = v[r] >> Words::single_shift(four, r);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if constexpr (!Table) {
        codes[p][r] = w[r] >> (2 * p) & 0x03030303U;
        codes[p + 2][r] = w[r] >> (2 * p + 4) & 0x03030303U;
        continue;
      }
      std::uint32_t nibbles = w[r] >> (2 * p) & 0x33333333U;
      if constexpr (Bits == 3) {
        nibbles |= single << (2 - p) & 0x04040404U;
        nibbles |= single << (4 - p) & 0x40404040U;
      }
      table.look_up(nibbles, codes[p][r], codes[p + 2][r]);
    }
  }
}

// The last row tiles, fewer than four, of one plane without a table.
template <int Bits, class Words>
__device__ __forceinline__ void load_last_tiles(const BlockTile& tile, const std::uint8_t* head, int chunk, int row,
                                                int four, StepCodes& codes) {
  const int row_tiles = (tile.rows + kTile - 1) / kTile;
  const std::uint8_t* words = head + tile.planes[0].offset + row * kFour;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (4 * chunk + j >= row_tiles) break;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const BlockWord at = block_word(Bits, row_tiles, tile.planes[0].fours, 4 * chunk + j, 0, four + Words::four(r));
      codes[j][r] = load_word(words + at.byte + Words::row(r) * kFour) >> at.shift & 0x01010101U * ((1U << Bits) - 1);
    }
  }
}

// A mask of the bytes of `four` whose depth indices are below `end`.
__device__ __forceinline__ std::uint32_t bytes_below(int end, int four) {
  const int count = min(max(end - kFour * four, 0), kFour);
  return count == kFour ? 0xFFFFFFFFU : (1U << (8 * count)) - 1;
}

// Of 2 bits, and 4 for the first depth indices, whose upper bits are a plane of their own; the others are read 2 up.
template <class Words>
__device__ __forceinline__ void load_layered_bits(const BlockTile& tile, const std::uint8_t* head, int chunk, int row,
                                                  int four, StepCodes& codes) {
  const std::uint8_t* words =
      head + tile.planes[0].offset + (chunk * tile.planes[0].fours + four) * kFourBytes + row * kFour;
  const std::uint8_t* uppers =
      head + tile.planes[1].offset + (chunk * tile.planes[1].fours + four) * kFourBytes + row * kFour;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const std::uint32_t wide = bytes_below(tile.lift_from, four + Words::four(r));
    const std::uint32_t word = load_word_of<Words>(words, r);
    std::uint32_t upper = 0;
    if (four + Words::four(r) < tile.planes[1].fours) upper = load_word_of<Words>(uppers, r);
    const std::uint32_t low = word & wide;
    const std::uint32_t high = upper | (word & ~wide);
    const std::uint32_t even = (low & 0x33333333U) | (high << 2 & 0xCCCCCCCCU);
    const std::uint32_t odd = (low >> 2 & 0x33333333U) | (high & 0xCCCCCCCCU);
    codes[0][r] = even & 0x0F0F0F0FU;
    codes[1][r] = odd & 0x0F0F0F0FU;
    codes[2][r] = even >> 4 & 0x0F0F0F0FU;
    codes[3][r] = odd >> 4 & 0x0F0F0F0FU;
  }
}

// Moves a word's fields `right` bits down (or up, below 0) to where `mask` is.
__device__ __forceinline__ std::uint32_t take_field(std::uint32_t word, int right, std::uint32_t mask) {
  return __funnelshift_r(word, word, static_cast<unsigned>(right)) & mask;
}

// chunk: row tiles 4 chunk to 4 chunk + 3; those that the tile does not have become zeros. planes: of this page, in
// shared memory. RowTiles: of the tile; 0: not known to the compiler.
template <int RowTiles, class Words>
__device__ __forceinline__ void load_plane_step(const BlockTile& tile, const BlockPlane* planes,
                                                const std::uint8_t* head, int chunk, int row, int four,
                                                StepCodes& codes) {
  const int row_tiles = RowTiles > 0 ? RowTiles : (tile.rows + kTile - 1) / kTile;
  const bool whole = 4 * chunk + 4 <= row_tiles;
#pragma unroll
  for (int j = 0; j < 4; ++j) codes[j][0] = codes[j][1] = codes[j][2] = codes[j][3] = 0;
  const int count = tile.counts_offset >= 0 ? kBlockPlanes : tile.plane_count;
#pragma unroll 1
  for (int p = 0; p < count; ++p) {
    const BlockPlane plane = planes[p];
    if ((four & ~7) >= plane.first + plane.fours || (four | 7) < plane.first) continue;  // nothing of this step
    const int bits = plane.bits;
    const int shift = plane.shift;
    const std::uint8_t* from = head + plane.offset + row * kFour;
    // Of register r: its four in the plane, any where it has none, and the bits that it gets.
    const auto place = [&](int r) { return four + Words::four(r) - plane.first; };
    const auto inside = [&](int r) { return place(r) >= 0 && place(r) < plane.fours; };
    const auto four_of = [&](int r) { return inside(r) ? place(r) : 0; };
    const auto mask = [&](int r) { return inside(r) ? (((1U << bits) - 1) << shift) * 0x01010101U : 0U; };
    if (!whole) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * chunk + j >= row_tiles) break;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const BlockWord at = block_word(bits, row_tiles, plane.fours, 4 * chunk + j, 0, four_of(r));
          codes[j][r] |= take_field(load_word(from + at.byte + Words::row(r) * kFour), at.shift - shift, mask(r));
        }
      }
      continue;
    }
    const bool single = bits == 1;
    const int groups = single ? (plane.fours + 1) / 2 : static_cast<int>(plane.fours);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int k = four_of(r);
      const std::uint8_t* own = from + Words::row(r) * kFour;
      if (bits == 4) {  // two blocks of two row tiles
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const std::uint32_t word = load_word(own + ((2 * chunk + j / 2) * plane.fours + k) * kFourBytes);
          codes[j][r] |= take_field(word, -shift, mask(r));
          codes[j + 1][r] |= take_field(word, 4 - shift, mask(r));
        }
      } else {  // a block of four; single bits: of two fours
        const std::uint32_t word = load_word(own + (chunk * groups + (single ? k / 2 : k)) * kFourBytes);
        const int first = (single ? 4 * (k % 2) : 0) - shift;
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j][r] |= take_field(word, first + j * bits, mask(r));
      }
    }
  }
  if (tile.lift > 0) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t mask = bytes_below(tile.lift_from, four + Words::four(r));
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j][r] = (codes[j][r] & mask) | (codes[j][r] & ~mask) << tile.lift;
    }
  }
  if (tile.table_bits == 0) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int r = 0; r < 4; ++r) codes[j][r] = look_up(tile, codes[j][r]);
  }
}

// How load_step reads a chunk.
template <BlockCodes Codes, int RowTiles, class Words = FragmentWords>
__device__ __forceinline__ void load_step(const BlockTile& tile, const BlockPlane* planes, const std::uint8_t* head,
                                          int chunk, int row, int four, StepCodes& codes) {
  if constexpr (Codes == BlockCodes::any) {
    load_plane_step<RowTiles, Words>(tile, planes, head, chunk, row, four, codes);
  } else if constexpr (Codes == BlockCodes::layered) {
    load_layered_bits<Words>(tile, head, chunk, row, four, codes);
  } else if constexpr (Codes == BlockCodes::last2 || Codes == BlockCodes::last4) {
    load_last_tiles<Codes == BlockCodes::last2 ? 2 : 4, Words>(tile, head, chunk, row, four, codes);
  } else if constexpr (Codes == BlockCodes::plain4 || Codes == BlockCodes::table4) {
    load_four_bits<Codes == BlockCodes::table4, Words>(tile, head, chunk, row, four, codes);
  } else {
    load_few_bits<Codes == BlockCodes::table3 ? 3 : 2, Codes != BlockCodes::plain2, Words>(tile, head, chunk, row, four,
                                                                                           codes);
  }
}

constexpr bool has_four_tiles(BlockCodes codes) {
  return codes != BlockCodes::any && codes != BlockCodes::last2 && codes != BlockCodes::last4;
}
// Steps in a row. More code than the instruction caches hold costs more than it saves: short bodies only.
constexpr int unrolled_steps(BlockCodes codes) {
  return codes == BlockCodes::plain2 || codes == BlockCodes::plain4 || codes == BlockCodes::layered ? 4 : 1;
}

// Calls body with how the chunk's codes are read, as a constant. Outside of loops over steps, which with short bodies
// can be unrolled: more code than the instruction caches hold costs more than it saves.
template <class Body>
__device__ __forceinline__ void with_codes(const BlockTile& tile, int chunk, const Body& body) {
  const bool whole = 4 * chunk + 4 <= (tile.rows + kTile - 1) / kTile;
  if (!whole && tile.codes == BlockCodes::plain2) return body(std::integral_constant<BlockCodes, BlockCodes::last2>());
  if (!whole && tile.codes == BlockCodes::plain4) return body(std::integral_constant<BlockCodes, BlockCodes::last4>());
  switch (whole ? tile.codes : BlockCodes::any) {
    case BlockCodes::table2:
      return body(std::integral_constant<BlockCodes, BlockCodes::table2>());
    case BlockCodes::table3:
      return body(std::integral_constant<BlockCodes, BlockCodes::table3>());
    case BlockCodes::table4:
      return body(std::integral_constant<BlockCodes, BlockCodes::table4>());
    case BlockCodes::plain2:
      return body(std::integral_constant<BlockCodes, BlockCodes::plain2>());
    case BlockCodes::plain4:
      return body(std::integral_constant<BlockCodes, BlockCodes::plain4>());
    case BlockCodes::layered:
      return body(std::integral_constant<BlockCodes, BlockCodes::layered>());
    default:
      return body(std::integral_constant<BlockCodes, BlockCodes::any>());
  }
}

}  // namespace kvant::cuda
