// What a block page decodes to, value by value: for the reference kernel and for host tests. Slow.
#pragma once

#include <cmath>

#include "cuda/block_format.hpp"

namespace kvant::cuda {

// Widen: two bytes of the cache's type to a number.
template <class Widen>
class BlockReader {
 public:
  KVANT_BOTH BlockReader(const BlockFormat& format, const std::uint8_t* page, int head, Widen widen)
      : f_(format),
        page_(page),
        block_(page + static_cast<std::int64_t>(head) * format.head_bytes),
        head_(head),
        widen_(widen) {
    block_planes(f_.key, block_, key_);
    block_planes(f_.rest, block_, rest_);
    block_planes(f_.value, block_, value_);
  }

  // The token in a place of the page, and the channel that the keys' depth index i is.
  KVANT_BOTH int token(int place) const { return f_.tokens_offset < 0 ? place : block_[f_.tokens_offset + place]; }
  KVANT_BOTH int channel(int i) const { return f_.key.order_offset < 0 ? i : block_[f_.key.order_offset + i]; }

  KVANT_BOTH double key(int place, int i) const {
    const bool salient = place < f_.key.rows;
    const BlockTile& tile = salient ? f_.key : f_.rest;
    const Grid grid = grid_of(tile, salient ? key_ : rest_, i);
    const BlockOutliers& list = tile.outliers;
    for (int slot = i * list.per_vector; slot < (i + 1) * list.per_vector; ++slot) {
      if (block_[list.row_offset + slot] != place) continue;
      const double x = widen_(block_ + list.value_offset + 2 * slot);
      if (x < grid.low || x > grid.high) return x;
    }
    return at(tile, salient ? key_ : rest_, grid, place - tile.first, i);
  }
  // The same as a query meets it: turned to its position where it is stored as it was before RoPE.
  KVANT_BOTH double key_at(int place, int i, int position) const {
    const BlockTurns& turns = f_.turns;
    if (i >= 2 * turns.pairs) return key(place, i);
    const bool adjacent = turns.step == 2;
    const int pair = adjacent ? i / 2 : i % turns.pairs;
    const double turn = position * turns.turns[pair];
    const double angle = 2 * 3.14159265358979323846 * (turn - floor(turn));
    const double x = key(place, turns.first(pair));
    const double y = key(place, turns.second(pair));
    const bool is_first = i == turns.first(pair);
    return turns.magnitude * (is_first ? x * cos(angle) - y * sin(angle) : x * sin(angle) + y * cos(angle));
  }
  KVANT_BOTH double value(int place, int channel) const {
    const BlockOutliers& list = f_.value.outliers;
    const BlockRange slots = list.slots > 0 ? block_outlier_range(f_, page_, head_) : BlockRange();
    for (int slot = slots.begin; slot < slots.end; ++slot) {
      if (page_[list.row_offset + slot] != channel || page_[list.depth_offset + slot] != place) continue;
      return widen_(page_ + list.value_offset + 2 * slot);
    }
    const double x = at(f_.value, value_, grid_of(f_.value, value_, place), channel, place);
    return f_.value.factor_offset < 0 ? x : x * widen_(block_ + f_.value.factor_offset + 2 * channel);
  }

 private:
  struct Grid {
    double low, high;
    int levels;
  };

  KVANT_BOTH Grid grid_of(const BlockTile& tile, const BlockPlane (&planes)[kBlockPlanes], int i) const {
    const std::uint8_t* ends = tile.shared_grid != 0 ? page_ : block_;
    const int index = 2 * block_grid_index(f_, tile, block_, i);
    return {widen_(ends + tile.min_offset + index), widen_(ends + tile.max_offset + index),
            block_levels(tile, planes, i)};
  }
  KVANT_BOTH double at(const BlockTile& tile, const BlockPlane (&planes)[kBlockPlanes], const Grid& grid, int row,
                       int i) const {
    return grid.low + block_step(tile, planes, block_, row, i) * ((grid.high - grid.low) / grid.levels);
  }

  const BlockFormat& f_;
  const std::uint8_t* page_;
  const std::uint8_t* block_;
  int head_;
  Widen widen_;
  BlockPlane key_[kBlockPlanes], rest_[kBlockPlanes], value_[kBlockPlanes];
};

}  // namespace kvant::cuda
