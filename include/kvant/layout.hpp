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
  int bits = 0;            // 1, 2 or 4
  int shift = 0;           // the plane holds bits shift..shift+bits-1 of the code
  int depth = 0;           // depth indices it covers
  bool gathered = false;   // true: the first `depth` entries of the tile's index list; false: 0..depth-1
  std::size_t offset = 0;  // bytes from the start of the head's block
  std::size_t bytes = 0;
};

// One tile (K or V of one head): codes [depth][rows] with (min, max) per depth index.
struct TileLayout {
  int rows = 0;   // K: tokens of a page; V: channels
  int depth = 0;  // K: channels; V: tokens of a page
  std::vector<PlaneLayout> planes;
  std::size_t min_offset = 0;  // depth values of CacheShape::dtype
  std::size_t max_offset = 0;
  std::size_t index_offset = 0;  // uint16 each, index_count of them: depth indices of gathered planes
  int index_count = 0;
};

// Layout of the sealed block of one page: kv_heads consecutive head blocks of head_bytes each (a multiple of 64).
struct PageLayout {
  TileLayout key;
  TileLayout value;
  std::size_t head_bytes = 0;
  std::size_t page_bytes = 0;  // kv_heads * head_bytes
  std::size_t open_bytes = 0;  // an open page: page * kv_heads * (key_dim + value_dim) rows in dtype, rows padded to 16
  std::size_t exact_bytes_per_16 = 0;  // unquantized rows beside a sealed page (sinks), per started 16 tokens

  // Bits per value of a sealed page, everything inside it counted.
  double bits_per_value = 0;
};

// Throws Error when the recipe or the shape is invalid. For f16 the tiles are empty and page_bytes is 0.
PageLayout make_layout(const Recipe& recipe, const CacheShape& shape);

}  // namespace kvant
