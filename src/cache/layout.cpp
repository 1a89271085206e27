#include "kvant/layout.hpp"

#include "base/checked.hpp"
#include "cache/rows.hpp"
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

// Places a tile at `offset` of the head's block: planes (whole word groups) first, so that all of them stay aligned,
// then endpoints and indices. Returns the next free offset, again a multiple of a word group.
std::size_t place(const catalog::TileSpec& spec, DType dtype, std::size_t offset, TileLayout& tile) {
  tile.rows = spec.rows;
  tile.depth = spec.depth;
  tile.index_count = spec.index_count;
  for (const catalog::PlaneSpec& plane : spec.planes) {
    const std::size_t bytes = tiles::plane_bytes(plane.bits, spec.rows, plane.depth);
    tile.planes.push_back({plane.bits, plane.shift, plane.depth, plane.gathered, offset, bytes});
    offset += bytes;
  }
  const std::size_t endpoint_bytes = static_cast<std::size_t>(spec.depth) * size_of(dtype);
  tile.min_offset = offset;
  tile.max_offset = offset + endpoint_bytes;
  tile.index_offset = tile.max_offset + endpoint_bytes;
  offset = tile.index_offset + static_cast<std::size_t>(spec.index_count) * sizeof(std::uint16_t);
  return base::round_up(offset, static_cast<std::size_t>(tiles::kGroupBytes));
}

}  // namespace

PageLayout make_layout(const Recipe& recipe, const CacheShape& shape) {
  validate(recipe);
  check_extent("kv_heads", shape.kv_heads, 1024);
  check_extent("key_dim", shape.key_dim, 1024);
  check_extent("value_dim", shape.value_dim, 1024);
  PageLayout layout;
  layout.open_bytes = cache::RowsLayout(shape, recipe.page).bytes;
  layout.exact_bytes_per_16 = cache::RowsLayout(shape, 16).bytes;
  if (!recipe.quantizes()) {
    layout.bits_per_value = 8.0 * static_cast<double>(size_of(shape.dtype));
    return layout;
  }
  const std::size_t key_end = place(catalog::key_tile(recipe, shape.key_dim), shape.dtype, 0, layout.key);
  layout.head_bytes = place(catalog::value_tile(recipe, shape.value_dim), shape.dtype, key_end, layout.value);
  layout.page_bytes = base::checked_multiply(layout.head_bytes, static_cast<std::size_t>(shape.kv_heads));
  layout.bits_per_value = 8.0 * static_cast<double>(layout.head_bytes) /
                          (static_cast<double>(recipe.page) * (shape.key_dim + shape.value_dim));
  return layout;
}

}  // namespace kvant
