#include "cuda/block_seal.hpp"

#include <algorithm>

#include "base/half.hpp"
#include "cache/outliers.hpp"

namespace kvant::cuda {
namespace {

constexpr std::int64_t kUsualBytes = 70 << 10;  // three blocks on a multiprocessor

KeyRank rank_of(const Recipe& recipe, const PageLayout& layout) {
  if (layout.key.budget > 0) return KeyRank::widths;
  const auto* kitty = std::get_if<KittyKeys>(&recipe.key);
  if (kitty == nullptr || layout.key.order_entry == 0) return KeyRank::none;
  if (kitty->selector == Selector::magnitude) return KeyRank::magnitude;
  return kitty->selector == Selector::variance ? KeyRank::variance : KeyRank::range;
}

// Depth indices of the shortest plane.
int boosted_of(const TileLayout& tile) {
  int count = tile.depth;
  for (const PlaneLayout& plane : tile.planes) count = std::min(count, plane.depth);
  return count;
}

void copy_nearest(const TileLayout& tile, std::uint8_t* to) {
  if (tile.table.empty()) return;
  const auto codes = cache::nearest_codes(tile);
  std::copy(codes.begin(), codes.end(), to);
}

int heads_of_grid(const BlockFormat& format) {
  return format.value.shared_grid != 0 ? format.kv_heads : 1;
}

std::int64_t grid_bytes(const BlockFormat& format, int tokens) {
  return BlockGridShared::bytes(tokens, heads_of_grid(format), format.value.rows);
}

}  // namespace

BlockSealArgs make_block_seal(const Recipe& recipe, const PageLayout& layout, const BlockFormat& format) {
  BlockSealArgs args;
  args.format = format;
  args.rank = rank_of(recipe, layout);
  args.boosted = boosted_of(layout.key);
  args.low = layout.key.low;
  args.high = layout.key.high;
  args.budget = layout.key.budget;
  args.salient = layout.salient;
  args.key_least_squares = layout.key.least_squares ? 1 : 0;
  args.value_least_squares = layout.value.least_squares ? 1 : 0;
  copy_nearest(layout.key, args.key_nearest);
  copy_nearest(layout.value, args.value_nearest);
  // Sums of least squares have eight threads a token, all else has a warp.
  if (args.value_least_squares != 0 || format.value.shared_grid != 0) {
    args.grid_tokens = args.value_least_squares != 0 ? kMostGridTokens : kBlockSealWarps;
  }
  while (args.grid_tokens > 1 && grid_bytes(format, args.grid_tokens) > kUsualBytes) args.grid_tokens /= 2;
  return args;
}

std::vector<std::uint16_t> calibrated_ranges(const PageLayout& layout, int kv_heads, DType dtype) {
  std::vector<std::uint16_t> ranges;
  if (layout.key.range_min.empty()) return ranges;
  for (int head = 0; head < kv_heads; ++head) {
    for (int channel = 0; channel < layout.key.depth; ++channel) {
      const cache::Endpoints range = cache::given_range(dtype, layout.key, head, channel);
      for (const float end : {range.min, range.max}) {
        ranges.emplace_back();
        base::store_float(&ranges.back(), dtype, 0, end);
      }
    }
  }
  return ranges;
}

std::size_t block_list_counts(const BlockSealArgs& args) {
  if (args.format.value.outliers.slots == 0 || args.salient > 0) return 0;
  return std::size_t{BlockSealBatch::kJobs} * static_cast<std::size_t>(args.format.kv_heads) *
         (kPage / kBlockSealPlaces);
}

BlockSealGrids::BlockSealGrids(const BlockSealArgs& args) {
  const BlockFormat& format = args.format;
  prepare_y = format.kv_heads;
  const int tiles = format.rest.rows > 0 ? 2 : 1;
  encode_y = format.kv_heads * tiles;
  if (args.grid_tokens > 0) encode_y += format.kv_heads / heads_of_grid(format) * (kPage / args.grid_tokens);
  encode_bytes =
      std::max(BlockKeyShared::bytes(format.key.depth), static_cast<int>(grid_bytes(format, args.grid_tokens)));
  values_y = format.kv_heads;
  values_z = format.value.outliers.slots > 0 && block_list_counts(args) == 0 ? 1 : kPage / kBlockSealPlaces;
  values_bytes = BlockValueShared::bytes(format.value.rows);
}

bool can_seal_blocks(const BlockSealArgs& args, int shared_bytes) {
  const BlockSealGrids grids(args);
  return std::max(grids.encode_bytes, grids.values_bytes) <= shared_bytes;
}

}  // namespace kvant::cuda
