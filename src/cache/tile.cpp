#include "cache/tile.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "tiles/plane.hpp"

namespace kvant::cache {

int width_class(int width) {
  return static_cast<int>(std::find(kWidthOrder.begin(), kWidthOrder.end(), width) - kWidthOrder.begin());
}

TilePlanes place_planes(const std::array<int, 6>& counts, int rows, std::size_t offset) {
  const auto [six, four, five, one, three, two] = counts;
  TilePlanes result;
  const auto add = [&](int bits, int shift, int first, int fours) {
    if (fours == 0) return;
    const std::size_t bytes = tiles::plane_bytes(bits, rows, fours * tiles::kQuad);
    result.planes[static_cast<std::size_t>(result.count++)] = {
        bits, shift, first * tiles::kQuad, fours * tiles::kQuad, offset, bytes};
    offset += bytes;
  };
  add(4, 1, 0, six + four + five);
  add(1, 0, six + four, five + one + three);
  add(2, 1, six + four + five + one, three + two);
  add(2, 5, 0, six);
  return result;
}

std::size_t most_plane_bytes(int budget, int rows) {
  // A plane of b bits ends in a word group of Q fours; what is missing there is at most Q - 1 of them. The single bits
  // of pages with four row tiles (Q = 2) are odd in number only when the sum of the widths is odd, so an even budget
  // already has the place that an odd sum leaves.
  const int tiles = tiles::block_tiles(1, tiles::row_tiles(rows));
  const int singles = tiles::quads_per_group(1, tiles);
  const int pairs = tiles::quads_per_group(2, tiles::block_tiles(2, tiles::row_tiles(rows)));
  const int padding = singles == 2 ? 0 : singles - 1;
  const int bits = base::round_up(budget, 2) + padding + 2 * 2 * (pairs - 1);
  return static_cast<std::size_t>(bits) * static_cast<std::size_t>(base::round_up(rows, tiles::kLanes)) * tiles::kQuad /
         8;
}

std::array<int, 6> read_counts(const TileLayout& tile, const std::byte* head_block) {
  std::array<int, 6> counts{};
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::uint16_t count = 0;
    std::memcpy(&count, head_block + tile.counts_offset + i * sizeof count, sizeof count);
    counts[i] = count;
  }
  return counts;
}

const std::uint8_t* token_order(const PageLayout& layout, const std::byte* block, int head) {
  if (layout.salient == 0) return nullptr;
  const std::byte* bytes = block + static_cast<std::size_t>(head) * layout.head_bytes + layout.tokens_offset;
  return reinterpret_cast<const std::uint8_t*>(bytes);
}

TileView::TileView(const PageLayout& layout, const TileLayout& t, const std::byte* block, int head_number)
    : tile(&t),
      head_block(block + static_cast<std::size_t>(head_number) * layout.head_bytes),
      grid(t.shared_grid ? block : head_block),
      head(head_number),
      tokens(token_order(layout, block, head_number)) {
  if (t.budget > 0) {
    planes = place_planes(read_counts(t, head_block), t.rows, t.plane_offset);
    return;
  }
  planes.count = static_cast<int>(t.planes.size());
  std::copy(t.planes.begin(), t.planes.end(), planes.planes.begin());
}

template <typename T>
void TileView::fill_levels(T* out) const {
  if (!tile->table.empty()) {
    std::fill_n(out, tile->depth, T{kTableSteps});
    return;
  }
  std::fill_n(out, tile->depth, T{0});
  for (const PlaneLayout& plane : planes.span()) {
    const T most = static_cast<T>(((1 << plane.bits) - 1) << plane.shift);
    for (int i = plane.first; i < plane.first + plane.depth; ++i) out[i] += most;
  }
}
template void TileView::fill_levels(int* out) const;
template void TileView::fill_levels(float* out) const;

void TileView::order(std::uint16_t* out) const {
  const std::byte* from = head_block + tile->order_offset;
  if (tile->order_entry == 0) {
    std::iota(out, out + tile->depth, std::uint16_t{0});
  } else if (tile->order_entry == 1) {
    for (int i = 0; i < tile->depth; ++i) out[i] = std::to_integer<std::uint16_t>(from[i]);
  } else {
    std::memcpy(out, from, static_cast<std::size_t>(tile->depth) * sizeof *out);
  }
}

void OutlierList::places(std::uint16_t* to_rows, std::uint16_t* to_depths) const {
  if (row_entry == 1) {
    for (int i = 0; i < count; ++i) to_rows[i] = std::to_integer<std::uint16_t>(rows[i]);
  } else {
    std::memcpy(to_rows, rows, static_cast<std::size_t>(count) * sizeof *to_rows);
  }
  if (depths != nullptr) {
    for (int i = 0; i < count; ++i) to_depths[i] = std::to_integer<std::uint16_t>(depths[i]);
    return;
  }
  for (int i = 0; i < count; i += per_vector) {
    for (int j = 0; j < per_vector; ++j) to_depths[i + j] = static_cast<std::uint16_t>(i / per_vector);
  }
}

std::uint32_t TileView::outlier_start(int at_head) const {
  std::uint32_t start = 0;
  std::memcpy(&start, grid + tile->outliers.start_offset + static_cast<std::size_t>(at_head) * sizeof start,
              sizeof start);
  return start;
}

OutlierList TileView::outliers() const {
  const OutlierLayout& from = tile->outliers;
  OutlierList list;
  if (from.slots == 0) return list;
  const std::size_t first = tile->shared_grid ? outlier_start(head) : 0;
  list.count = tile->shared_grid ? static_cast<int>(outlier_start(head + 1) - first) : from.slots;
  list.per_vector = 2 * from.per_end;
  list.row_entry = from.row_entry;
  const std::size_t element = (from.row_offset - from.value_offset) / static_cast<std::size_t>(from.slots);
  list.values = grid + from.value_offset + first * element;
  list.rows = grid + from.row_offset + first * static_cast<std::size_t>(from.row_entry);
  list.depths = tile->shared_grid ? grid + from.depth_offset + first : nullptr;
  return list;
}

}  // namespace kvant::cache
