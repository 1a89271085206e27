// Scores of pages whose keys are stored before RoPE. A query meets each of their tokens at another angle, so there is
// no product of integers: a page is decoded and rotated to float32 rows once for all query vectors of a block.
#include <algorithm>

#include "cache/outliers.hpp"
#include "cache/query_block.hpp"
#include "tiles/plane.hpp"

namespace kvant::cache {

void QueryBlock::score_turned(const Page& page) {
  const TileView view(store_.layout, store_.layout.key, page.sealed->block.get(), head_);
  const TileLayout& tile = *view.tile;
  const Rotation& rotation = *store_.rotation;
  for (int row = 0; row < tile.rows; ++row) {
    positions_[row] = page.positions[static_cast<std::size_t>(view.tokens != nullptr ? view.tokens[row] : row)];
  }
  rotation.place(positions_, tile.rows, turn_blocks_, turn_room_);
  kernels_.load_grid(view.grid + tile.min_offset, view.grid + tile.max_offset, store_.shape.dtype,
                     levels_of(view).inverse, tile.depth, middle_, step_);
  kernels_.widen(view.grid + tile.min_offset, store_.shape.dtype, min_, tile.depth);
  std::array<tiles::CodePlane, kMaxPlanes> planes;
  int count = 0;
  for (const PlaneLayout& plane : view.planes.span()) {
    planes[static_cast<std::size_t>(count++)] = {view.head_block + plane.offset, plane.bits, plane.shift, plane.first,
                                                 plane.depth};
  }
  kernels_.turn_tile({planes.data(), count, tile.rows, tile.depth, tile.table.data(), min_, step_, rotation.pairs(),
                      rotation.pair_step(), rotation.pair_distance(), turn_blocks_, turned_, tile.rows});
  turn_outliers(view);
  for (int n = 0; n < vectors_; ++n) std::fill_n(scores_ + n * score_stride_, tile.rows, 0.0F);
  kernels_.multiply_rows({turned_, DType::f32, tile.rows, tile.rows, tile.depth, queries_, query_stride_, vectors_,
                          scores_, score_stride_, ahead_key_});
}

// What an outlier differs from its code's level by, turned with it.
void QueryBlock::turn_outliers(const TileView& view) {
  const OutlierList list = view.outliers();
  if (list.count == 0) return;
  const Rotation& rotation = *store_.rotation;
  const int pairs = rotation.pairs();
  const std::int64_t stride = view.tile->rows;
  kernels_.widen(list.values, store_.shape.dtype, residuals_, list.count);
  kernels_.widen(view.grid + view.tile->max_offset, store_.shape.dtype, max_, view.tile->depth);
  list.places(outlier_rows_, outlier_depths_);
  subtract_levels(view, list, outlier_depths_, min_, max_, step_, residuals_);
  for (int i = 0; i < list.count; ++i) {
    const float residual = residuals_[i];
    const int channel = outlier_depths_[i];
    float* column = turned_ + outlier_rows_[i];
    if (channel >= 2 * pairs) {
      column[channel * stride] += residual;
      continue;
    }
    const bool second = rotation.pair_step() == 2 ? channel % 2 != 0 : channel >= pairs;
    const int pair = rotation.pair_step() == 2 ? channel / 2 : channel % pairs;
    const tiles::TurnBlock& block = turn_blocks_[outlier_rows_[i] / tiles::kLanes];
    const int lane = pair * tiles::kLanes + outlier_rows_[i] % tiles::kLanes;
    const float cosine = block.cosines[pair] * block.lane_cosines[lane] - block.sines[pair] * block.lane_sines[lane];
    const float sine = block.cosines[pair] * block.lane_sines[lane] + block.sines[pair] * block.lane_cosines[lane];
    float* x = column + pair * rotation.pair_step() * stride;
    float* y = x + rotation.pair_distance() * stride;
    *x += second ? -residual * sine : residual * cosine;
    *y += second ? residual * cosine : residual * sine;
  }
}

}  // namespace kvant::cache
