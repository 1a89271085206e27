// The format of a bit plane: codes of 1, 2 or 4 bits for a matrix [depth][rows], stored in the order that an integer
// dot product with one row per SIMD lane reads them.
//
// Rows come in row tiles of 16 (the lanes of a 64-byte register), depth in quads of 4 (the bytes of a 32-bit lane). A
// word group is 64 bytes = 16 lanes x 4 bytes; a byte has 8 / bits positions. A row block is R row tiles (R = 4, or 2,
// or 1 at the end of the rows; R <= 8 / bits) and needs Q = (8 / bits) / R quads to fill the positions:
//
//   group g of a block, lane l, byte b, position p (bits p*bits .. p*bits+bits-1)
//     row   = block_first_row + 16 * (p % R) + l
//     depth = 4 * (g * Q + p / R) + b
//
// Why: one AND with a constant mask turns a group into 16 lanes x 4 codes scaled by 2^(p*bits); the scale is the same
// for a whole row tile and leaves the sum with one shift. Groups of a block follow each other, blocks follow each
// other, so a product reads the plane once, front to back. Missing rows and depth indices hold code 0.
#pragma once

#include <cstddef>

#include "base/checked.hpp"

namespace kvant::tiles {

constexpr int kLanes = 16;       // rows of a row tile
constexpr int kQuad = 4;         // depth indices of a lane
constexpr int kGroupBytes = 64;  // 16 lanes x 4 bytes
constexpr int kDepthPad = 64;    // x is padded with zeros to this many depth indices: Q <= 8 quads, steps of AMX

// Everything here is a power of two, and products ask often: shifts instead of divisions. Positions of a byte for codes
// of 1, 2 or 4 bits:
constexpr int positions_of(int bits) {
  return 8 >> (bits >> 1);
}

// Row tiles of the next block when `left` row tiles remain.
constexpr int block_tiles(int bits, int left) {
  const int positions = positions_of(bits);
  int tiles = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
  return tiles > positions ? positions : tiles;
}

// log2 of the quads of a group, for blocks of 1, 2 or 4 row tiles.
constexpr int group_shift(int bits, int tiles) {
  return 3 - (bits >> 1) - (tiles >> 1);
}
constexpr int quads_per_group(int bits, int tiles) {
  return 1 << group_shift(bits, tiles);
}

constexpr int row_tiles(int rows) {
  return (rows + kLanes - 1) / kLanes;
}
constexpr int quads(int depth) {
  return (depth + kQuad - 1) / kQuad;
}
constexpr int groups(int bits, int tiles, int depth) {
  const int shift = group_shift(bits, tiles);
  return (quads(depth) + (1 << shift) - 1) >> shift;
}

// Calls body(first_row_tile, tiles, byte_offset) for each row block of a plane and returns the plane's size in bytes.
template <typename Body>
constexpr std::size_t for_each_block(int bits, int rows, int depth, const Body& body) {
  std::size_t offset = 0;
  for (int tile = 0; tile < row_tiles(rows);) {
    const int tiles = block_tiles(bits, row_tiles(rows) - tile);
    body(tile, tiles, offset);
    offset += static_cast<std::size_t>(groups(bits, tiles, depth)) * kGroupBytes;
    tile += tiles;
  }
  return offset;
}

// Byte offset of the row block that starts at row tile `first`.
constexpr std::size_t block_offset(int bits, int rows, int depth, int first) {
  std::size_t offset = 0;
  for (int tile = 0; tile < first;) {
    const int tiles = block_tiles(bits, row_tiles(rows) - tile);
    offset += static_cast<std::size_t>(groups(bits, tiles, depth)) * kGroupBytes;
    tile += tiles;
  }
  return offset;
}

constexpr std::size_t plane_bytes(int bits, int rows, int depth) {
  return for_each_block(bits, rows, depth, [](int, int, std::size_t) {});
}

static_assert(plane_bytes(2, 128, 64) == 128 * 64 * 2 / 8);
static_assert(plane_bytes(1, 128, 64) == 128 * 64 * 1 / 8);
static_assert(plane_bytes(4, 80, 128) == 80 * 128 * 4 / 8);
static_assert(plane_bytes(2, 80, 128) == 80 * 128 * 2 / 8);

}  // namespace kvant::tiles
