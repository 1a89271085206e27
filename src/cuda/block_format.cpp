#include "cuda/block_format.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "cache/tile.hpp"
#include "cuda/device_format.hpp"

namespace kvant::cuda {
namespace {

static_assert(kTableStepsOnDevice == cache::kTableSteps);
static_assert(kBlockPlanes == cache::kMaxPlanes);

std::int32_t narrow(std::size_t x) {
  if (x > 0x7FFFFFFFU) base::fail(ErrorCode::invalid_argument, "a page has more than 2^31 bytes");
  return static_cast<std::int32_t>(x);
}

BlockOutliers make_outliers(const OutlierLayout& from) {
  BlockOutliers list;
  if (from.slots == 0) return list;
  list.per_vector = 2 * from.per_end;
  list.inverse =
      ((1U << 20) + static_cast<std::uint32_t>(list.per_vector) - 1) / static_cast<std::uint32_t>(list.per_vector);
  list.slots = from.slots;
  list.value_offset = narrow(from.value_offset);
  list.row_offset = narrow(from.row_offset);
  list.depth_offset = narrow(from.depth_offset);
  list.start_offset = narrow(from.start_offset);
  return list;
}

BlockTile make_tile(const TileLayout& from, int first) {
  BlockTile tile;
  tile.rows = from.rows;
  tile.depth = from.depth;
  tile.first = first;
  int levels = from.budget > 0 ? cache::largest_code(from.high) : 0;
  for (const PlaneLayout& plane : from.planes) {
    BlockPlane& to = tile.planes[tile.plane_count++];
    to.bits = static_cast<std::int16_t>(plane.bits);
    to.shift = static_cast<std::int16_t>(plane.shift);
    to.first = static_cast<std::int16_t>(plane.first / kFour);
    to.fours = static_cast<std::int16_t>((plane.depth + kFour - 1) / kFour);
    to.depth = plane.depth;
    to.offset = narrow(plane.offset);
    levels += to.largest();
  }
  tile.plane_offset = narrow(from.plane_offset);
  tile.min_offset = narrow(from.min_offset);
  tile.max_offset = narrow(from.max_offset);
  if (from.order_entry > 0) tile.order_offset = narrow(from.order_offset);
  if (from.budget > 0) tile.counts_offset = narrow(from.counts_offset);
  if (from.channel_factors) tile.factor_offset = narrow(from.factor_offset);
  tile.rotation = from.rotation;
  tile.shared_grid = from.shared_grid ? 1 : 0;
  const bool uniform = std::all_of(from.planes.begin(), from.planes.end(),
                                   [&](const PlaneLayout& plane) { return plane.depth == from.depth; });
  if (uniform && from.budget == 0) tile.levels = levels;
  if (!from.table.empty()) {
    for (int bits = 1; bits <= 4; ++bits) {
      if (levels == (1 << bits) - 1) tile.table_bits = bits;
    }
    for (std::size_t i = 0; i < from.table.size(); ++i) {
      tile.table[i / 4] |= static_cast<std::uint32_t>(from.table[i]) << (i % 4 * 8);
    }
    levels = tile.levels = kTableStepsOnDevice;
  }
  if (tile.levels > 0) tile.rate = 1.0F / static_cast<float>(tile.levels);
  tile.wide = levels > 127 ? 1 : 0;
  tile.outliers = make_outliers(from.outliers);
  return tile;
}

// Value tiles whose first tokens are wider.
void lift_narrow_codes(BlockTile& tile) {
  for (const BlockPlane& plane : tile.planes) {
    if (plane.depth == 0 || plane.depth == tile.depth) continue;
    tile.lift += plane.bits;
    tile.lift_from = plane.depth;
  }
}

// Planes lie over all depth indices or the first ones.
void place_rates(BlockTile& tile) {
  if (tile.counts_offset >= 0) return;
  const auto rate = [&](int i) {
    return 1.0F / static_cast<float>(block_levels(tile, tile.planes, i) << block_lift(tile, i));
  };
  tile.rates[0] = tile.rates[1] = rate(0);
  for (tile.rate_change = tile.depth; tile.rate_change > 0 && rate(tile.rate_change - 1) != tile.rates[0];) {
    tile.rates[1] = rate(--tile.rate_change);
  }
}

// Channels in an order of their own: only `any` looks for them. Of planes of one width everywhere the 4 bits come
// first, then 2, then 1.
BlockCodes codes_of(const BlockTile& tile) {
  const auto plane = [&](int i, int bits, int shift) {
    return i < tile.plane_count && tile.planes[i].bits == bits && tile.planes[i].shift == shift;
  };
  if (tile.order_offset >= 0) return BlockCodes::any;
  if (tile.table_bits == 2) return BlockCodes::table2;
  if (tile.table_bits == 3) return BlockCodes::table3;
  if (tile.table_bits == 4) return BlockCodes::table4;
  if (tile.table_bits > 0 || tile.counts_offset >= 0) return BlockCodes::any;
  if (tile.levels == 3 && plane(0, 2, 0)) return BlockCodes::plain2;
  if (tile.levels == 15 && plane(0, 4, 0)) return BlockCodes::plain4;
  const bool two = tile.plane_count == 2 && plane(0, 2, 0) && plane(1, 2, 2);
  return two && tile.planes[0].depth == tile.depth && tile.lift == 2 ? BlockCodes::layered : BlockCodes::any;
}

}  // namespace

BlockFormat make_block_format(const Recipe& recipe, const CacheShape& shape) {
  const PageLayout layout = make_layout(recipe, shape);
  if (!recipe.quantizes()) {
    base::fail(ErrorCode::invalid_argument, "recipe '" + to_text(recipe) + "' has no sealed pages; on the GPU: others");
  }
  check_device_shape(recipe, shape);
  BlockFormat format;
  format.key = make_tile(layout.key, 0);
  if (layout.key_rest.rows > 0) format.rest = make_tile(layout.key_rest, layout.key.rows);
  format.value = make_tile(layout.value, 0);
  lift_narrow_codes(format.value);
  for (BlockTile* tile : {&format.key, &format.rest, &format.value}) {
    tile->codes = codes_of(*tile);
    if (tile->depth > 0) place_rates(*tile);
  }
  format.head_bytes = narrow(layout.head_bytes);
  format.page_bytes = narrow(layout.page_bytes);
  format.kv_heads = shape.kv_heads;
  if (layout.salient > 0) format.tokens_offset = narrow(layout.tokens_offset);
  format.before_rope = layout.position_bytes > 0 ? 1 : 0;
  return format;
}

}  // namespace kvant::cuda
