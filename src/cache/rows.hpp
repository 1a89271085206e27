// Unquantized tokens of one layer: open pages and the exact rows beside sealed pages.
#pragma once

#include <cstddef>

#include "base/checked.hpp"
#include "kvant/types.hpp"
#include "tiles/plane.hpp"

namespace kvant::cache {

// Keys [heads][key_dim][tokens], values [heads][tokens][value_stride]: each a tile [depth][rows] like a sealed one, so
// that one product kernel (rows in lanes, no sums across lanes) serves both and an encoder reads channels contiguously.
struct RowsLayout {
  int tokens = 0;
  int value_stride = 0;          // value_dim padded to 16 rows
  std::size_t element = 0;       // bytes of a value
  std::size_t key_head = 0;      // bytes of a head's keys
  std::size_t value_head = 0;    // bytes of a head's values
  std::size_t value_offset = 0;  // from the start of the buffer
  std::size_t bytes = 0;

  RowsLayout(const CacheShape& shape, int token_capacity)
      : tokens(token_capacity),
        value_stride(base::round_up(shape.value_dim, tiles::kLanes)),
        element(size_of(shape.dtype)),
        key_head(element * static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(token_capacity)),
        value_head(element * static_cast<std::size_t>(value_stride) * static_cast<std::size_t>(token_capacity)),
        value_offset(base::checked_multiply(key_head, static_cast<std::size_t>(shape.kv_heads))),
        bytes(base::checked_add(value_offset,
                                base::checked_multiply(value_head, static_cast<std::size_t>(shape.kv_heads)))) {}

  std::size_t key_at(int head, int channel, int token) const {
    return static_cast<std::size_t>(head) * key_head +
           (static_cast<std::size_t>(channel) * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(token)) *
               element;
  }
  std::size_t value_at(int head, int channel, int token) const {
    return value_offset + static_cast<std::size_t>(head) * value_head +
           (static_cast<std::size_t>(token) * static_cast<std::size_t>(value_stride) +
            static_cast<std::size_t>(channel)) *
               element;
  }
};

}  // namespace kvant::cache
