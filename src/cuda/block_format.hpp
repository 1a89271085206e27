// Block pages: the device page of recipes without a tuned format (page_format.hpp) is the CPU's sealed block, byte for
// byte. A BlockFormat is PageLayout cut down to what kernels read, a parameter of the launch: nothing is compiled per
// recipe. The functions here say where things lie, for kernels, the reference and host tests alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/page_format.hpp"
#include "cuda/reference.hpp"
#include "kvant/layout.hpp"

namespace kvant::cuda {

constexpr int kBlockPlanes = 4;
constexpr int kTableStepsOnDevice = 254;  // steps of the grid that table entries count (src/cache/tile.hpp)

// PlaneLayout (src/tiles/plane.hpp has the bit order).
struct alignas(16) BlockPlane {
  std::int16_t bits = 0;
  std::int16_t shift = 0;
  std::int16_t first = 0;  // fours of depth indices
  std::int16_t fours = 0;
  std::int32_t depth = 0;   // depth indices; the last four may not be full
  std::int32_t offset = 0;  // bytes from the head's block

  KVANT_BOTH constexpr bool covers(int i) const { return i >= kFour * first && i < kFour * first + depth; }
  KVANT_BOTH constexpr int largest() const { return ((1 << bits) - 1) << shift; }
};

// Which short loop reads a tile's codes (block_codes.cuh).
enum class BlockCodes : std::int32_t {
  any,      // planes that cover parts, other widths
  table2,   // one width everywhere, to be looked up
  table3,   // the same: a plane of 2 bits and one of 1 above it
  table4,   // the same
  plain2,   // one plane, codes are steps
  plain4,   // the same
  last2,    // the last row tiles of plain2, fewer than four
  last4,    // the same of plain4
  layered,  // 2 bits, below 2 more for the first depth indices
};

// OutlierLayout. Offsets count from where those of the grid do.
struct BlockOutliers {
  std::int32_t per_vector = 0;  // slots of a key channel; 0: no list
  std::uint32_t inverse = 0;    // 2^20 / per_vector, rounded up
  std::int32_t slots = 0;
  std::int32_t value_offset = 0;
  std::int32_t row_offset = 0;    // 1 byte each: no dimension is above 256
  std::int32_t depth_offset = 0;  // shared lists
  std::int32_t start_offset = 0;
};

// TileLayout. Offsets are bytes from the head's block, but those of a shared grid and its outliers, which count from
// the page.
struct BlockTile {
  std::int32_t rows = 0;   // keys: tokens; values: channels
  std::int32_t depth = 0;  // keys: channels; values: tokens
  std::int32_t first = 0;  // keys: the place in the page of row 0
  std::int32_t plane_count = 0;
  BlockPlane planes[kBlockPlanes];  // where all pages have the same
  std::int32_t plane_offset = 0;
  std::int32_t min_offset = 0;
  std::int32_t max_offset = 0;
  std::int32_t order_offset = -1;   // a byte per depth index: its channel; -1: in order
  std::int32_t counts_offset = -1;  // -1: the planes above; else they follow from the counts of width classes
  std::int32_t factor_offset = -1;  // values: a factor per channel; -1: none
  std::int32_t rotation = 1;
  std::int32_t shared_grid = 0;
  std::int32_t levels = 0;  // steps of the grid; 0: depth indices differ
  float rate = 0;           // 1 / levels
  // One part of the range in a step of the grid, before depth index rate_change and from there on; 0: that follows from
  // the counts. With codes as `lift` has them read.
  float rates[2] = {};
  std::int32_t rate_change = 0;
  // Values with wider tokens: codes of depth indices from lift_from on are read `lift` bits up, so that all steps are
  // about as long. The product rounds weights relative to the longest.
  std::int32_t lift = 0;
  std::int32_t lift_from = 0;
  std::int32_t table_bits = 0;  // of a code that `table` turns into a step of the grid; 0: codes are steps
  BlockCodes codes = BlockCodes::any;
  std::int32_t wide = 0;  // 1: steps above 127 occur
  std::uint32_t table[4] = {};
  BlockOutliers outliers;
};

// Where the kernel for few vectors has a pair of channels: in a unit of 16 pairs, as one of the four of lanes with
// t = `lane`.
struct TurnPlace {
  int unit = 0;
  int lane = 0;
  int slot = 0;
  int first = 0;  // its channels
  int second = 0;
};

// The rotation of keys that pages hold as they were before RoPE (block_turn.hpp). Pair p is the channels p * step and
// that + distance; channels from 2 * pairs on are not turned.
struct BlockTurns {
  const double* turns = nullptr;   // [pairs] what part of a turn a pair moves per position
  const float* offsets = nullptr;  // [kTile][padded] cosine and sine of 0 to 15 positions
  // Cosine and sine at each token of a page, in the order of turn_entry(). Null: halves of a number of pairs that is no
  // multiple of 16, which few vectors have no kernel for.
  const float* places = nullptr;
  std::int32_t pairs = 0;   // 0: keys are those after RoPE, or the rotation is not known yet
  std::int32_t padded = 0;  // pairs, a multiple of four: those too many do not turn
  std::int32_t step = 1;
  std::int32_t distance = 1;
  float magnitude = 1;

  KVANT_BOTH constexpr int first(int pair) const { return pair * step; }
  KVANT_BOTH constexpr int second(int pair) const { return pair * step + distance; }
  KVANT_BOTH constexpr bool adjacent() const { return step == 2; }
  // pair: below key_dim / 2; from `pairs` on of channels that do not turn.
  KVANT_BOTH constexpr TurnPlace place(int pair) const {
    const int in = pair % kTile;
    if (adjacent()) return {pair / kTile, in % 8 / 2, in / 8 * 2 + in % 2, 2 * pair, 2 * pair + 1};
    const int first = pair < pairs ? pair : 2 * pair - in;
    return {pair / kTile, in / kFour, in % kFour, first, first + (pair < pairs ? pairs : kTile)};
  }
};
// Where in BlockTurns::places a pair's cosine at a token of a page is; its sine is two on.
KVANT_BOTH constexpr int turn_entry(int key_dim, int token, const TurnPlace& place) {
  const int half = (token / kTile * (key_dim / 32) + place.unit) * 2 + token % kTile / 8;
  return ((2 * half + place.slot / 2) * 32 + 4 * (token % 8) + place.lane) * 4 + place.slot % 2;
}

struct BlockFormat {
  BlockTile key;
  BlockTile rest;  // keys of the tokens that are not salient; rows is 0 where a page has one key tile
  BlockTile value;
  std::int32_t head_bytes = 0;
  std::int32_t page_bytes = 0;
  std::int32_t kv_heads = 0;
  std::int32_t tokens_offset = -1;  // from the head's block: which token is in each place; -1: in order
  std::int32_t before_rope = 0;     // 1: keys are those before RoPE
  BlockTurns turns;

  KVANT_BOTH constexpr bool present() const { return page_bytes > 0; }
};

// Throws Error(invalid_argument) naming what block pages cannot hold: pages of other than 128 tokens, other head
// dimensions and types than the device's. `turns` is left to the caller.
BlockFormat make_block_format(const Recipe& recipe, const CacheShape& shape);

// ---- where things lie

// The codes of one row and four depth indices of a plane: byte b of the 4 bytes at `byte` (from the plane's start) has
// that of depth index 4 four + b at bit `shift`.
struct BlockWord {
  int byte = 0;
  int shift = 0;
};

// log2 of the fours that share a word group, for blocks of 1, 2 or 4 row tiles (kvant::tiles::group_shift).
KVANT_BOTH constexpr int block_group_shift(int bits, int tiles) {
  return 3 - (bits >> 1) - (tiles >> 1);
}
KVANT_BOTH constexpr int block_groups(int bits, int tiles, int fours) {
  const int shift = block_group_shift(bits, tiles);
  return (fours + (1 << shift) - 1) >> shift;
}

// tile: row tile of `row_tiles`; lane: row in it; four: of the plane's `fours`.
KVANT_BOTH constexpr BlockWord block_word(int bits, int row_tiles, int fours, int tile, int lane, int four) {
  const int most = bits == 4 ? 2 : 4;
  const int log = bits == 4 ? 1 : 2;
  const int whole = row_tiles >> log;  // blocks of the most row tiles; then one of 2, one of 1
  int tiles = most;
  int in = tile & (most - 1);
  int offset = (tile >> log) * block_groups(bits, most, fours);
  if (tile >= whole << log) {
    const int left = row_tiles - (whole << log);
    tiles = left >= 2 && in < 2 ? 2 : 1;
    if (left == 3 && in == 2) offset += block_groups(bits, 2, fours);
    if (tiles == 1) in = 0;
  }
  const int shift = block_group_shift(bits, tiles);
  return {(offset + (four >> shift)) * kFourBytes + lane * kFour, ((four & ((1 << shift) - 1)) * tiles + in) * bits};
}

// Fours of channels per width class of a page, in the order 6, 4, 5, 1, 3, 2 (src/cache/tile.hpp).
struct BlockCounts {
  int six, four, five, one, three, two;
};
// counts: six uint16.
KVANT_BOTH inline BlockCounts block_counts(const std::uint8_t* counts) {
  const auto at = [&](int i) { return counts[2 * i] | counts[2 * i + 1] << 8; };
  return {at(0), at(1), at(2), at(3), at(4), at(5)};
}

// The planes of a tile of one page; those that it does not have are empty. head: the head's block.
KVANT_BOTH inline void block_planes(const BlockTile& tile, const std::uint8_t* head,
                                    BlockPlane (&planes)[kBlockPlanes]) {
  if (tile.counts_offset < 0) {
    for (int i = 0; i < kBlockPlanes; ++i) planes[i] = tile.planes[i];
    return;
  }
  const BlockCounts n = block_counts(head + tile.counts_offset);
  const int runs[kBlockPlanes][4] = {{4, 1, 0, n.six + n.four + n.five},
                                     {1, 0, n.six + n.four, n.five + n.one + n.three},
                                     {2, 1, n.six + n.four + n.five + n.one, n.three + n.two},
                                     {2, 5, 0, n.six}};
  int offset = tile.plane_offset;
  for (int i = 0; i < kBlockPlanes; ++i) {
    const int bits = runs[i][0];
    const int fours = runs[i][3];
    planes[i].bits = static_cast<std::int16_t>(bits);
    planes[i].shift = static_cast<std::int16_t>(runs[i][1]);
    planes[i].first = static_cast<std::int16_t>(runs[i][2]);
    planes[i].fours = static_cast<std::int16_t>(fours);
    planes[i].depth = kFour * fours;
    planes[i].offset = offset;
    // Pages have 128 tokens: whole blocks only.
    offset += (kPage / kTile) / (bits == 4 ? 2 : 4) * block_groups(bits, bits == 4 ? 2 : 4, fours) * kFourBytes;
  }
}

// The grid's number of steps at a depth index.
KVANT_BOTH inline int block_levels(const BlockTile& tile, const BlockPlane (&planes)[kBlockPlanes], int i) {
  if (tile.table_bits > 0) return kTableStepsOnDevice;
  int levels = 0;
  for (const BlockPlane& plane : planes) levels += plane.covers(i) ? plane.largest() : 0;
  return levels;
}

// Bits by which kernels read the codes of a depth index up.
KVANT_BOTH constexpr int block_lift(const BlockTile& tile, int i) {
  return i >= tile.lift_from ? tile.lift : 0;
}

// Which channel a slot of a key tile's list belongs to.
KVANT_BOTH constexpr int block_slot_channel(const BlockOutliers& list, int slot) {
  return static_cast<int>(static_cast<std::uint32_t>(slot) * list.inverse >> 20);
}

// Where a depth index's endpoints lie among those of the tile: grids that heads share lie by token.
KVANT_BOTH inline int block_grid_index(const BlockFormat& format, const BlockTile& tile, const std::uint8_t* head,
                                       int i) {
  return tile.shared_grid != 0 && format.tokens_offset >= 0 ? head[format.tokens_offset + i] : i;
}

// Codes that say a step of the grid by a table of 4, 8 or 16.
KVANT_BOTH constexpr bool has_table(BlockCodes codes) {
  return codes == BlockCodes::table2 || codes == BlockCodes::table3 || codes == BlockCodes::table4;
}
KVANT_BOTH constexpr int block_table_entry(const BlockTile& tile, int code) {
  return static_cast<int>(tile.table[code / 4] >> (code % 4 * 8) & 0xFFU);
}

// The step of the grid that the code of (row, depth index) stands for.
KVANT_BOTH inline int block_step(const BlockTile& tile, const BlockPlane (&planes)[kBlockPlanes],
                                 const std::uint8_t* head, int row, int i) {
  int code = 0;
  for (const BlockPlane& plane : planes) {
    if (!plane.covers(i)) continue;
    const BlockWord word = block_word(plane.bits, (tile.rows + kTile - 1) / kTile, plane.fours, row / kTile,
                                      row % kTile, i / kFour - plane.first);
    const int byte = head[plane.offset + word.byte + i % kFour];
    code |= (byte >> word.shift & ((1 << plane.bits) - 1)) << plane.shift;
  }
  return tile.table_bits > 0 ? block_table_entry(tile, code) : code;
}

// The head's part of a list that heads share: its slots [begin, end).
struct BlockRange {
  int begin = 0;
  int end = 0;

  KVANT_BOTH constexpr int count() const { return end - begin; }
};
KVANT_BOTH inline BlockRange block_outlier_range(const BlockFormat& format, const std::uint8_t* page, int head) {
  const auto* starts = reinterpret_cast<const std::uint32_t*>(page + format.value.outliers.start_offset);
  return {static_cast<int>(starts[head]), static_cast<int>(starts[head + 1])};
}

// What a kernel keeps of a page: a head's block, then the grid that heads share.
KVANT_BOTH constexpr int block_slot_bytes(const BlockFormat& format) {
  return format.head_bytes + (format.value.shared_grid != 0 ? kPage * 4 : 0);
}
// The larger of its two parts: keys; values and what follows them.
KVANT_BOTH constexpr int block_half_bytes(const BlockFormat& format) {
  const int keys = format.value.plane_offset;
  const int values = block_slot_bytes(format) - keys;
  return keys > values ? keys : values;
}

// What a kernel with teams of warps needs to know before it asks for its first page: which pages of a sequence are
// coded. It comes with the launch where sequences are few, since reading it from memory takes as long as reading the
// page.
struct TeamLayout {
  static constexpr int kSequences = 32;
  ReferenceArgs memory;  // of more sequences; of fewer, null pointers
  std::int32_t first_page[kSequences] = {};
  std::int32_t coded_pages[kSequences] = {};
  std::int32_t sinks[kSequences] = {};
};

// Of keys before RoPE: float2 per 16 tokens of a page and pair of channels.
KVANT_BOTH constexpr int block_angle_bytes(int key_dim) {
  return kPage / kTile * (key_dim / 2) * 8;
}

// What kernels for many vectors have of a page beside its bytes, offsets in shared memory.
struct BlockWork {
  int grids = 0;  // float2 per depth index: 256 of key, 256 of rest, 128 of value
  int planes = 0;
  int tokens = 0;
  int end = 0;

  KVANT_BOTH constexpr explicit BlockWork(int begin) {
    grids = begin;
    planes = grids + (256 + 256 + kPage) * 8;
    tokens = planes + 3 * kBlockPlanes * 16;
    end = tokens + kPage;
  }
};

// Shared memory of block_kernel.cuh, offsets in bytes. Queries come first, then the tiles of 64 tokens.
struct BlockShared : BlockWork {
  int keys = 0;
  int values = 0;
  int raw = 0;
  int angles = 0;  // of keys before RoPE
  int bytes = 0;

  KVANT_BOTH constexpr BlockShared(const BlockFormat& format, int vectors)
      : BlockWork((vectors * format.key.depth + kPage / 2 * (format.key.depth + format.value.rows)) * 2) {
    keys = vectors * format.key.depth * 2;
    values = keys + kPage / 2 * format.key.depth * 2;
    raw = end;
    angles = raw + block_slot_bytes(format);
    bytes = angles + (format.before_rope != 0 ? block_angle_bytes(format.key.depth) : 0);
  }
};

}  // namespace kvant::cuda
