#include "kvant/layout.hpp"

#include <cmath>
#include <utility>

#include "base/checked.hpp"
#include "cache/rows.hpp"
#include "cache/tile.hpp"
#include "methods/method.hpp"
#include "tiles/plane.hpp"

namespace kvant {
namespace {

void check_extent(const char* name, int value, int limit) {
  if (value < 1 || value > limit) {
    base::fail(ErrorCode::invalid_argument,
               std::string(name) + " is " + std::to_string(value) + "; allowed: 1 to " + std::to_string(limit));
  }
}

std::size_t add_fixed_planes(const catalog::TileSpec& spec, std::size_t offset, TileLayout& tile) {
  for (const catalog::PlaneSpec& plane : spec.planes) {
    const std::size_t bytes = tiles::plane_bytes(plane.bits, spec.rows, plane.depth);
    tile.planes.push_back({plane.bits, plane.shift, 0, plane.depth, offset, bytes});
    offset += bytes;
  }
  return offset;
}

// The smallest and the largest ceil(share / 2 * n) of each vector of n values (paper: 21 of 4096 for 0.5 %), as a list
// at `offset`, which moves behind it.
void place_outliers(const catalog::TileSpec& spec, const CacheShape& shape, std::size_t& offset, TileLayout& tile) {
  if (spec.outliers <= 0) return;
  OutlierLayout& list = tile.outliers;
  const bool shared = spec.shared_grid;
  const int vector = shared ? spec.rows * shape.kv_heads : spec.rows;
  list.per_end = static_cast<int>(std::ceil(spec.outliers / 2 * vector - 1e-9));
  list.slots = 2 * list.per_end * spec.depth;
  list.row_entry = spec.rows <= 256 ? 1 : 2;
  const auto slots = static_cast<std::size_t>(list.slots);
  const auto take = [&](std::size_t bytes) { return std::exchange(offset, offset + bytes); };
  list.value_offset = take(slots * size_of(shape.dtype));
  list.row_offset = take(slots * static_cast<std::size_t>(list.row_entry));
  list.depth_offset = take(shared ? slots : 0);
  list.start_offset = take(shared ? static_cast<std::size_t>(shape.kv_heads + 1) * sizeof(std::uint32_t) : 0);
}

// Places a tile at `offset` of the head's block: planes (whole word groups) first, so that all of them stay aligned,
// then endpoints, outliers, order and counts. Returns the next free offset, again a multiple of a word group. A shared
// grid and its outliers are placed at `shared` of the page's tail instead.
std::size_t place(const catalog::TileSpec& spec, const CacheShape& shape, std::size_t offset, std::size_t& shared,
                  TileLayout& tile) {
  tile.rows = spec.rows;
  tile.depth = spec.depth;
  tile.rotation = spec.rotation;
  tile.least_squares = spec.least_squares;
  tile.feedback = spec.feedback;
  tile.channel_factors = spec.channel_factors;
  tile.shared_grid = spec.shared_grid;
  tile.low = spec.low;
  tile.high = spec.high;
  tile.table = spec.table;
  tile.coding_table = spec.coding_table;
  tile.range_min = spec.range_min;
  tile.range_max = spec.range_max;
  tile.budget = spec.budget;
  tile.plane_offset = offset;
  offset =
      spec.budget > 0 ? offset + cache::most_plane_bytes(spec.budget, spec.rows) : add_fixed_planes(spec, offset, tile);
  tile.plane_bytes = offset - tile.plane_offset;
  const std::size_t endpoint_bytes = static_cast<std::size_t>(spec.depth) * size_of(shape.dtype);
  std::size_t& grid = spec.shared_grid ? shared : offset;
  tile.min_offset = grid;
  tile.max_offset = grid + endpoint_bytes;
  grid += 2 * endpoint_bytes;
  place_outliers(spec, shape, grid, tile);
  tile.order_offset = offset;
  if (spec.sorted) {
    tile.order_entry = spec.depth <= 256 ? 1 : 2;
    offset += static_cast<std::size_t>(spec.depth * tile.order_entry);
  }
  tile.counts_offset = offset;
  if (spec.budget > 0) offset += cache::kWidthOrder.size() * sizeof(std::uint16_t);
  tile.factor_offset = offset;
  if (spec.channel_factors) offset += static_cast<std::size_t>(spec.rows) * size_of(shape.dtype);
  return base::round_up(offset, static_cast<std::size_t>(tiles::kGroupBytes));
}

// Keys: one tile, or one for the salient tokens and one for the others.
std::size_t place_keys(catalog::TileSpec spec, const CacheShape& shape, std::size_t& shared, PageLayout& layout) {
  if (spec.rest_planes.empty()) return place(spec, shape, 0, shared, layout.key);
  const int tokens = spec.rows;
  spec.rows = spec.salient;
  const std::size_t end = place(spec, shape, 0, shared, layout.key);
  spec.rows = tokens - spec.salient;
  spec.planes = spec.rest_planes;
  return place(spec, shape, end, shared, layout.key_rest);
}

}  // namespace

PageLayout make_layout(const Recipe& recipe, const CacheShape& shape) {
  validate(recipe);
  check_extent("kv_heads", shape.kv_heads, 1024);
  check_extent("key_dim", shape.key_dim, 1024);
  check_extent("value_dim", shape.value_dim, 1024);
  PageLayout layout;
  layout.open_bytes = cache::RowsLayout(shape, recipe.page).bytes;
  if (catalog::uses_queries(recipe)) {
    layout.query_bytes = static_cast<std::size_t>(recipe.page) * static_cast<std::size_t>(shape.kv_heads) *
                         static_cast<std::size_t>(shape.key_dim) * sizeof(std::uint16_t);
  }
  layout.exact_bytes_per_16 = cache::RowsLayout(shape, 16).bytes;
  if (!recipe.quantizes()) {
    layout.bits_per_value = 8.0 * static_cast<double>(size_of(shape.dtype));
    return layout;
  }
  catalog::TileSpec keys = catalog::key_tile(recipe, shape.key_dim);
  catalog::TileSpec values = catalog::value_tile(recipe, shape.value_dim);
  catalog::calibrate(recipe, shape, keys, values);
  std::size_t shared = 0;  // from the end of the heads' blocks
  const std::size_t key_end = place_keys(std::move(keys), shape, shared, layout);
  layout.head_bytes = place(values, shape, key_end, shared, layout.value);
  if (layout.key.feedback) layout.query_bytes *= 2;
  layout.salient = catalog::salient_tokens(recipe);
  if (layout.salient > 0) {
    layout.tokens_offset = layout.head_bytes;
    layout.head_bytes += base::round_up(static_cast<std::size_t>(recipe.page), std::size_t{tiles::kGroupBytes});
  }
  const std::size_t heads_bytes = base::checked_multiply(layout.head_bytes, static_cast<std::size_t>(shape.kv_heads));
  for (TileLayout* tile : {&layout.key, &layout.value}) {
    if (!tile->shared_grid) continue;
    OutlierLayout& list = tile->outliers;
    for (std::size_t* offset : {&tile->min_offset, &tile->max_offset, &list.value_offset, &list.row_offset,
                                &list.depth_offset, &list.start_offset}) {
      *offset += heads_bytes;
    }
  }
  layout.page_bytes = heads_bytes + base::round_up(shared, static_cast<std::size_t>(tiles::kGroupBytes));
  if (catalog::before_rope(recipe)) {
    layout.position_bytes = static_cast<std::size_t>(recipe.page) * sizeof(std::int32_t);
  }
  layout.bits_per_value = 8.0 * static_cast<double>(layout.page_bytes + layout.position_bytes) /
                          (static_cast<double>(recipe.page) * shape.kv_heads * (shape.key_dim + shape.value_dim));
  return layout;
}

}  // namespace kvant
