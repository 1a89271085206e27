// Checks of the arguments of the KVQuant functions, and element access to strided grids.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "base/checked.hpp"
#include "exact/elements.hpp"
#include "kvant/array.hpp"
#include "methods/kvquant/nuq.hpp"

namespace kvant::kvquant {

// [batch, rows, columns]; batch is 1 for arrays of rank 2.
struct BlockShape {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

template <typename AnyArray>
BlockShape block_shape(const char* name, const AnyArray& array, int rank) {
  exact::require_rank(name, array.rank, rank);
  BlockShape shape;
  if (rank == 3) shape.batch = array.extent[0];
  shape.rows = array.extent[exact::at(rank - 2)];
  shape.columns = array.extent[exact::at(rank - 1)];
  return shape;
}

template <typename AnyArray>
void require_block(const char* name, const AnyArray& array, int rank, const BlockShape& shape) {
  exact::require_rank(name, array.rank, rank);
  if (rank == 3) exact::require_extent(name, 0, array.extent[0], shape.batch);
  exact::require_extent(name, rank - 2, array.extent[exact::at(rank - 2)], shape.rows);
  exact::require_extent(name, rank - 1, array.extent[exact::at(rank - 1)], shape.columns);
}

inline void require_fraction(const char* name, double fraction) {
  if (!std::isnan(fraction)) return;
  base::fail(ErrorCode::invalid_argument, std::string(name) + " = nan is not a number");
}

// levels [L, D] or [B, L, D] with 1..256 levels, for blocks of `shape`.
inline void require_levels(const ConstArray& levels, int rank, const BlockShape& shape) {
  exact::require_rank("levels", levels.rank, rank);
  const std::int64_t level_count = levels.extent[exact::at(rank - 2)];
  exact::require_between("number of levels", level_count, 1, kMaxLevels);
  require_block("levels", levels, rank, {shape.batch, level_count, shape.columns});
}

// Writes row [batch][row] of a grid.
template <typename T, typename From>
void store_row(const Strided<T>& grid, std::int64_t batch, std::int64_t row, std::int64_t columns, const From* from) {
  T* out = grid.data + exact::row_start(grid, batch, 0, row);
  const std::int64_t step = grid.stride[exact::at(grid.rank - 1)];
  for (std::int64_t c = 0; c < columns; ++c) out[c * step] = static_cast<T>(from[c]);
}

}  // namespace kvant::kvquant
