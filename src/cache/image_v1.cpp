#include "cache/image_v1.hpp"

#include <cstring>
#include <vector>

#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"

namespace kvant::cache {
namespace {

using tiles::kernels;

// Version 1, one head: low bits of all channels, high bits of the listed ones, minima, maxima, list, then the value
// tile.
struct HeadV1 {
  std::size_t low, high, min, max, list, values, bytes;

  HeadV1(const PageLayout& layout, const CacheShape& shape) {
    const TileLayout& key = layout.key;
    const std::size_t endpoints = static_cast<std::size_t>(key.depth) * size_of(shape.dtype);
    low = 0;
    high = low + key.planes[0].bytes;
    min = high + key.planes[1].bytes;
    max = min + endpoints;
    list = max + endpoints;
    values = base::round_up(list + static_cast<std::size_t>(key.planes[1].depth) * sizeof(std::uint16_t),
                            static_cast<std::size_t>(tiles::kGroupBytes));
    bytes = values + layout.head_bytes - layout.value.plane_offset;
  }
};

// The listed channels, then the others; empty when the list is not ascending or out of range.
std::vector<std::uint16_t> read_order(const std::byte* list, int listed, int depth) {
  std::vector<std::uint16_t> order(static_cast<std::size_t>(listed));
  std::memcpy(order.data(), list, order.size() * sizeof(std::uint16_t));
  std::vector<bool> seen(static_cast<std::size_t>(depth));
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] >= depth || (i > 0 && order[i] <= order[i - 1])) return {};
    seen[order[i]] = true;
  }
  for (int d = 0; d < depth; ++d) {
    if (!seen[static_cast<std::size_t>(d)]) order.push_back(static_cast<std::uint16_t>(d));
  }
  return order;
}

}  // namespace

std::size_t page_bytes_v1(const PageLayout& layout, const CacheShape& shape) {
  return HeadV1(layout, shape).bytes * static_cast<std::size_t>(shape.kv_heads);
}

bool convert_v1(const PageLayout& layout, const CacheShape& shape, const std::byte* old_block, std::byte* block) {
  const HeadV1 old(layout, shape);
  const TileLayout& key = layout.key;
  const std::size_t element = size_of(shape.dtype);
  const std::int64_t stride = base::round_up(key.rows, tiles::kLanes);
  for (int head = 0; head < shape.kv_heads; ++head, old_block += old.bytes, block += layout.head_bytes) {
    const std::vector<std::uint16_t> order = read_order(old_block + old.list, key.planes[1].depth, key.depth);
    if (order.empty()) return false;
    // Low bits lie by channel, high bits in the order of the list, which is the new order already.
    const auto size = static_cast<std::size_t>(key.depth) * static_cast<std::size_t>(stride);
    std::vector<std::uint8_t> by_channel(size), codes(size);
    kernels().unpack_plane(old_block + old.low, 2, 0, key.rows, key.depth, nullptr, by_channel.data(), stride);
    for (std::size_t i = 0; i < order.size(); ++i) {
      std::memcpy(codes.data() + static_cast<std::ptrdiff_t>(i) * stride, by_channel.data() + order[i] * stride,
                  static_cast<std::size_t>(stride));
      for (const auto& [from, to] : {std::pair(old.min, key.min_offset), std::pair(old.max, key.max_offset)}) {
        std::memcpy(block + to + i * element, old_block + from + order[i] * element, element);
      }
      std::byte* entry = block + key.order_offset + i * static_cast<std::size_t>(key.order_entry);
      std::memcpy(entry, &order[i], static_cast<std::size_t>(key.order_entry));  // little-endian
    }
    kernels().pack_plane(codes.data(), stride, nullptr, 2, 0, key.rows, key.depth, block + key.planes[0].offset);
    std::memcpy(block + key.planes[1].offset, old_block + old.high, key.planes[1].bytes);
    std::memcpy(block + layout.value.plane_offset, old_block + old.values,
                layout.head_bytes - layout.value.plane_offset);
  }
  return true;
}

}  // namespace kvant::cache
