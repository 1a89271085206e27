// Products of a block's vectors with one tile of a page: open rows, codes, and what outliers add.
#include <algorithm>
#include <array>

#include "cache/outliers.hpp"
#include "cache/query_block.hpp"
#include "tiles/plane.hpp"

namespace kvant::cache {

void QueryBlock::multiply_open(const void* tile, std::int64_t stride, int rows, int depth, const float* v,
                               std::int64_t v_stride, float* out, std::int64_t out_stride, tiles::Ahead ahead) {
  kernels_.multiply_rows(
      {tile, store_.shape.dtype, stride, rows, depth, v, v_stride, vectors_, out, out_stride, ahead});
}

const float* QueryBlock::gather(const TileView& view) {
  view.order(order_);
  for (int n = 0; n < vectors_ && !has_lanes_; ++n) {
    const float* query = queries_ + n * query_stride_;
    float* lanes = query_lanes_ + n / 4 * 4 * query_stride_ + n % 4;
    for (int d = 0; d < store_.shape.key_dim; ++d) lanes[4 * d] = query[d];
  }
  has_lanes_ = true;
  for (int n = 0; n < vectors_; n += 4) {
    kernels_.gather_lanes(query_lanes_ + n * query_stride_, order_, view.tile->depth, std::min(4, vectors_ - n),
                          gathered_ + n * query_stride_, query_stride_);
  }
  return gathered_;
}

const QueryBlock::Levels& QueryBlock::levels_of(const TileView& view) {
  const PageLayout& layout = store_.layout;
  Levels& levels = levels_[view.tile == &layout.value ? 2 : (view.tile == &layout.key_rest ? 1 : 0)];
  if (levels.tile == view.tile && view.tile->budget == 0) return levels;
  const int depth = view.tile->depth;
  const auto fill = [&](int from, int to, float most) {
    std::fill(levels.inverse + from, levels.inverse + to, 1.0F / most);
    std::fill(levels.half + from, levels.half + to, 0.5F * most);
  };
  if (view.tile->budget > 0) {
    const std::array<int, 6> counts = read_counts(*view.tile, view.head_block);
    int at = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const int end = std::min(at + counts[i] * tiles::kQuad, depth);
      fill(at, end, static_cast<float>(largest_code(kWidthOrder[i])));
      at = end;
    }
  } else {
    view.levels(levels.inverse);
    for (int i = 0; i < depth; ++i) fill(i, i + 1, levels.inverse[i]);
  }
  std::fill(levels.half + depth, levels.half + base::round_up(depth, tiles::kDepthPad), 0.0F);
  levels.tile = view.tile;
  return levels;
}

void QueryBlock::pack_tile(const TileView& view, const float* v, std::int64_t v_stride) {
  const TileLayout& tile = *view.tile;
  if (!view.in_order()) {  // only key tiles have an order
    v = gather(view);
    v_stride = query_stride_;
  }
  const Levels& levels = levels_of(view);
  if (tile.shared_grid && view.tokens != nullptr) {
    load_endpoints(view, store_.shape.dtype, middle_, step_);
    for (int i = 0; i < tile.depth; ++i) {
      const float span = step_[i] - middle_[i];
      middle_[i] += 0.5F * span;
      step_[i] = span * levels.inverse[i];
    }
  } else {
    kernels_.load_grid(view.grid + tile.min_offset, view.grid + tile.max_offset, store_.shape.dtype, levels.inverse,
                       tile.depth, middle_, step_);
  }
  tiles::PackArgs pack;
  pack.v = v;
  pack.v_stride = v_stride;
  pack.step = step_;
  pack.middle = middle_;
  pack.depth = tile.depth;
  pack.vectors = vectors_;
  pack.wide = store_.recipe.x_bits == 16;
  pack.mid = levels.half;
  pack.x = packed_;
  pack.scale = x_scale_;
  pack.bias = bias_;
  kernels_.pack_x(pack);
}

void QueryBlock::multiply_tile(const TileView& view, tiles::Start start, tiles::Ahead ahead, float* out,
                               std::int64_t out_stride) {
  std::array<tiles::CodePlane, kMaxPlanes> planes;
  int count = 0;
  for (const PlaneLayout& plane : view.planes.span()) {
    planes[static_cast<std::size_t>(count++)] = {view.head_block + plane.offset, plane.bits, plane.shift, plane.first,
                                                 plane.depth};
  }
  kernels_.multiply_codes({planes.data(), count, view.tile->rows, packed_, view.tile->depth, vectors_,
                           store_.recipe.x_bits == 16, x_scale_, out, out_stride, start, alpha_, bias_, ahead,
                           view.tile->table.empty() ? nullptr : view.tile->table.data()});
}

void QueryBlock::add_outliers(const TileView& view, const float* v, std::int64_t v_stride, float* out,
                              std::int64_t out_stride) {
  if (view.tile->outliers.slots == 0) return;
  const OutlierList list = view.outliers();
  if (list.count == 0) return;
  kernels_.widen(list.values, store_.shape.dtype, residuals_, list.count);
  load_endpoints(view, store_.shape.dtype, min_, max_);
  list.places(outlier_rows_, outlier_depths_);
  subtract_levels(view, list, outlier_depths_, min_, max_, step_, residuals_);
  kernels_.multiply_sparse({residuals_, outlier_rows_, outlier_depths_, list.count, view.tile->rows, view.tile->depth,
                            v, v_stride, vectors_, out, out_stride, lanes_});
}

}  // namespace kvant::cache
