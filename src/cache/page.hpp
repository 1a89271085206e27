// One page: unwritten, open (rows) or sealed (an immutable block).
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned.hpp"
#include "cache/rows.hpp"
#include "kvant/layout.hpp"

namespace kvant::cache {

constexpr int kMaxPage = 256;  // tokens; Recipe allows 32, 64, 128 and 256
using CellSet = std::bitset<kMaxPage>;

// Rows that stay unquantized beside a sealed block: the sinks of a page. Slot i holds the page's cell cells[i].
struct ExactRows {
  std::vector<std::uint8_t> cells;
  int capacity = 0;  // cells.size() rounded up to 16
  base::AlignedBytes rows;
};

struct SealedPage {
  base::AlignedBytes block;
  ExactRows exact;
};

struct Page {
  base::AlignedBytes open;                   // RowsLayout(shape, page); null unless open
  std::shared_ptr<const SealedPage> sealed;  // null unless sealed
  CellSet key_written;
  CellSet value_written;
  CellSet exact;                // cells that are never quantized
  std::int64_t last_write = 0;  // the store's row count when a row of this page was last written

  bool is_empty() const { return !open && !sealed; }
  CellSet written() const { return key_written & value_written; }
};

// ---- src/cache/codec.cpp: between open rows and sealed blocks

// Encodes one head of an open page into its part of the block; cells in `skip` are left out of every statistic.
void encode_head(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, std::byte* block);

// Copies the cells of `which` (key and value) from an open page into exact rows.
ExactRows copy_exact(const CacheShape& shape, int page_tokens, const std::byte* open, const CellSet& which);

// The inverse of both: fills an open page from a sealed one.
void decode_page(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const SealedPage& page,
                 std::byte* open);

// Decodes one head's tile as float [depth][stride], stride = rows padded to 16 (not rounded to the cache's type).
void decode_tile(const PageLayout& layout, const TileLayout& tile, DType dtype, const std::byte* block, int head,
                 float* out);

// Widths (bits of the code) per depth index of a sealed tile.
void tile_widths(const TileLayout& tile, const std::uint16_t* index, std::vector<int>& widths);
// Minimum and step per depth index, as float; `widths` is scratch.
void load_grid(const TileLayout& tile, DType dtype, const std::byte* head_block, std::vector<int>& widths, float* min,
               float* step);

inline const std::uint16_t* tile_index(const TileLayout& tile, const std::byte* head_block) {
  return tile.index_count == 0 ? nullptr : reinterpret_cast<const std::uint16_t*>(head_block + tile.index_offset);
}

}  // namespace kvant::cache
