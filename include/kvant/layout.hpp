// PageLayout: the size of a sealed page and the offset of everything in it, as a pure function of recipe and shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvant/recipe.hpp"
#include "kvant/types.hpp"

namespace kvant {

// One bit plane of a tile inside a head's block (src/tiles/plane.hpp has the word format).
struct PlaneLayout {
  int bits = 0;   // 1, 2 or 4
  int shift = 0;  // the plane holds bits shift..shift+bits-1 of the code
  int first = 0;  // it covers the stored depth indices first..first+depth-1; a multiple of 4
  int depth = 0;
  std::size_t offset = 0;  // bytes from the start of the head's block
  std::size_t bytes = 0;
};

// Values kept beside the codes of a tile, in a list with a fixed number of slots. A key tile has one list per head:
// slot i belongs to channel i / (2 * per_end) and says the token; slots that a channel does not need hold its maximum
// and token 0. Value tiles that share a grid share one list behind it: slots say token and channel, ascending by head,
// token and channel; starts[h]..starts[h + 1] are those of head h, and those after the last head's are zeros.
struct OutlierLayout {
  int per_end = 0;  // the smallest and the largest so many of each vector; 0: no list
  int slots = 0;
  int row_entry = 0;             // bytes of a row (key: token, value: channel): 1 or 2
  std::size_t value_offset = 0;  // slots values of CacheShape::dtype; offsets count from where those of the grid do
  std::size_t row_offset = 0;
  std::size_t depth_offset = 0;  // shared lists: the token, 1 byte each
  std::size_t start_offset = 0;  // shared lists: kv_heads + 1 numbers, uint32
};

// One tile (K or V of one head): codes [depth][rows] with (min, max) per depth index.
struct TileLayout {
  int rows = 0;   // K: tokens of a page; V: channels
  int depth = 0;  // K: channels; V: tokens of a page
  // The planes of every page; empty where each page has its own widths (budget > 0): then src/cache/tile.hpp computes
  // them from the counts that the page stores.
  std::vector<PlaneLayout> planes;
  std::size_t plane_offset = 0;
  std::size_t plane_bytes = 0;
  // depth values of CacheShape::dtype each, in stored order, from the start of the head's block, or of the page's block
  // where all heads share one grid.
  std::size_t min_offset = 0;
  std::size_t max_offset = 0;
  bool shared_grid = false;
  // Which channel each stored depth index is: 1 or 2 bytes each; 0 where it is the depth index itself.
  int order_entry = 0;
  std::size_t order_offset = 0;
  // Own widths: how many fours of channels have each width, uint16 per width class (src/cache/tile.hpp).
  std::size_t counts_offset = 0;
  int low = 0;  // widths of a page, low..high
  int high = 0;
  int budget = 0;    // sum of the widths of all fours
  int rotation = 1;  // rows are stored Hadamard-rotated in blocks of this many, divided by it; 1: as they are
  // What the codes stand for, [16], on a grid of 254 steps from min to max; empty: codes are steps of the grid.
  std::vector<std::uint8_t> table;
  // The same for the choice of codes alone, where the two differ (Q-Norm); empty: `table`.
  std::vector<std::uint8_t> coding_table;
  // Key channels with ranges given beforehand, [kv_heads][channels]; empty: each page has its own.
  std::vector<float> range_min;
  std::vector<float> range_max;
  OutlierLayout outliers;
  // Values: rows values of CacheShape::dtype by which a reader multiplies the channels of a page's output.
  bool channel_factors = false;
  std::size_t factor_offset = 0;
  // What the encoder does, nothing that a reader needs: to the grids, and (keys) with the errors of the codes.
  bool least_squares = false;
  bool feedback = false;
};

// Layout of the sealed block of one page: kv_heads consecutive head blocks of head_bytes each (a multiple of 64), then
// the grids and outliers that all heads share.
struct PageLayout {
  TileLayout key;
  TileLayout key_rest;  // the other tokens where salient ones are a tile of their own; else rows is 0
  TileLayout value;
  // Tokens of a page lie in an order of its own, per head: first those that count as salient, each class ascending.
  // `page` bytes from the start of the head's block say which token is where. 0: tokens lie in cell order, no such
  // bytes.
  int salient = 0;
  std::size_t tokens_offset = 0;
  std::size_t head_bytes = 0;
  std::size_t page_bytes = 0;  // kv_heads * head_bytes, plus the shared grids rounded up to 64
  std::size_t open_bytes = 0;  // an open page: page * kv_heads * (key_dim + value_dim) rows in dtype, rows padded to 16
  // Statistics beside an open page once queries were observed: page * kv_heads * key_dim bfloat16 squares and, with
  // feedback, as many values of queries; 0 if the recipe needs none.
  std::size_t query_bytes = 0;
  std::size_t position_bytes = 0;      // positions beside every page where keys are stored before RoPE, else 0
  std::size_t exact_bytes_per_16 = 0;  // unquantized rows beside a sealed page (sinks), per started 16 tokens

  // Bits per value of a sealed page, everything inside it and its positions counted.
  double bits_per_value = 0;
};

// Throws Error when the recipe or the shape is invalid. For f16 the tiles are empty and page_bytes is 0.
PageLayout make_layout(const Recipe& recipe, const CacheShape& shape);

}  // namespace kvant
