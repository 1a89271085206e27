// One page: unwritten, open (rows) or sealed (an immutable block).
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned.hpp"
#include "cache/rotation.hpp"
#include "cache/rows.hpp"
#include "cache/tile.hpp"
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
  // Recipes with probes, open pages: the store's row count when each cell's key was written, 0 before it was last
  // opened.
  std::unique_ptr<std::int64_t[]> clocks;
  // Recipes with keys before RoPE: the position of each key, [page]; null while the page is empty. Not part of the
  // sealed block, which copies share: a context shift moves positions of one copy.
  std::unique_ptr<std::int32_t[]> positions;
  // Until the page is sealed, of each observed cell, as bfloat16 [kv_heads][key_dim]: the squares of its queries,
  // summed over the heads of a group; with feedback also one query of each group, that of head cell % group. Null:
  // none. Kept per cell, so that a cell that is forgotten leaves no trace.
  std::unique_ptr<std::uint16_t[]> queries;
  CellSet observed;

  bool is_empty() const { return !open && !sealed; }
  CellSet written() const { return key_written & value_written; }
  bool has_queries() const { return queries && (observed & key_written).any(); }
};

// ---- src/cache/encode.cpp and decode.cpp: between open rows and sealed blocks

// Where keys are stored before RoPE: what turns them, and the position of each token of the page. Else both are null.
struct KeyTurns {
  const Rotation* rotation = nullptr;
  const std::int32_t* positions = nullptr;
};

// What a page is encoded with of this head's queries so far; null where none was seen.
struct QuerySums {
  const double* squares = nullptr;  // [key_dim]
  const float* moment = nullptr;    // with feedback: lower triangle of the sum of q q' (cache/feedback.hpp)
};

// Encode the keys of one head and the values of `heads` heads (one, or all of them where they share a grid) of an open
// page into its block, which is zeros before but for its order of tokens. Cells in `skip` are left out of every
// statistic.
void encode_keys(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, const QuerySums& queries, KeyTurns turns, std::byte* block);
void encode_values(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                   int first_head, int heads, const CellSet& skip, std::byte* block);

// Copies the cells of `which` (key and value) from an open page into exact rows.
ExactRows copy_exact(const CacheShape& shape, int page_tokens, const std::byte* open, const CellSet& which);

// The inverse of all: fills an open page from a sealed one.
void decode_page(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const SealedPage& page,
                 KeyTurns turns, std::byte* open);

// Decodes one head's keys as float [key_dim][page], or its values as [page][value_dim padded to 16] (the padding is
// left alone), tokens in cell order, keys turned as the host did, values rotated back and times their factors, not
// rounded to the cache's type.
void decode_keys(const PageLayout& layout, DType dtype, const std::byte* block, int head, KeyTurns turns, float* out);
void decode_values(const PageLayout& layout, DType dtype, const std::byte* block, int head, float* out);

// Minimum and maximum per stored depth index, as float.
void load_endpoints(const TileView& view, DType dtype, float* min, float* max);

}  // namespace kvant::cache
