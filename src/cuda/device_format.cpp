#include "cuda/device_format.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/checked.hpp"
#include "cache/tile.hpp"
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"

namespace kvant::cuda {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  base::fail(ErrorCode::invalid_argument, text);
}

bool is_dim(int dim) {
  return dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256;
}

// Codes of a tile, one byte each, [depth][stride].
struct Codes {
  int stride = 0;
  std::vector<std::uint8_t> data;

  explicit Codes(const TileLayout& tile)
      : stride(base::round_up(tile.rows, tiles::kLanes)),
        data(static_cast<std::size_t>(tile.depth) * static_cast<std::size_t>(stride)) {}
  std::uint8_t& at(int depth, int row) { return data[static_cast<std::size_t>(depth * stride + row)]; }
};

// The channel of each stored depth index; a tile without an order stores channels as they come.
std::vector<int> load_order(const TileLayout& tile, const std::byte* block) {
  std::vector<int> order(static_cast<std::size_t>(tile.depth));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = 0; tile.order_entry == 1 && i < order.size(); ++i) {
    order[i] = std::to_integer<int>(block[tile.order_offset + i]);
  }
  return order;
}

// Boosted channels first, each part ascending.
std::vector<int> make_order(const TileLayout& tile, const std::vector<int>& boosted) {
  std::vector<int> order = boosted;
  for (int channel = 0; channel < tile.depth; ++channel) {
    if (!std::binary_search(boosted.begin(), boosted.end(), channel)) order.push_back(channel);
  }
  return order;
}

// Codes by stored depth index. `block`: of the head.
Codes unpack(const TileLayout& tile, std::span<const PlaneLayout> planes, const std::byte* block) {
  Codes codes(tile);
  for (const PlaneLayout& plane : planes) {
    tiles::kernels().unpack_plane(block + plane.offset, plane.bits, plane.shift, tile.rows, plane.depth, nullptr,
                                  &codes.at(plane.first, 0), codes.stride);
  }
  return codes;
}

void pack(const TileLayout& tile, std::span<const PlaneLayout> planes, Codes& codes, std::byte* block) {
  for (const PlaneLayout& plane : planes) {
    tiles::kernels().pack_plane(&codes.at(plane.first, 0), codes.stride, nullptr, plane.bits, plane.shift, tile.rows,
                                plane.depth, block + plane.offset);
  }
}

// A field of `bits` bits of one byte of a device page.
struct Field {
  std::size_t byte = 0;
  int shift = 0;
  int bits = 0;

  int get(const std::byte* page) const { return std::to_integer<int>(page[byte]) >> shift & ((1 << bits) - 1); }
  void set(std::byte* page, int value) const { page[byte] |= static_cast<std::byte>(value << shift); }
};

// Where the fields of a code lie: the main field, and the third bit of 3-bit codes.
struct Fields {
  Field low;
  Field high;  // bits 0: none

  int get(const std::byte* page) const { return low.get(page) | (high.bits != 0 ? high.get(page) << low.bits : 0); }
  void set(std::byte* page, int code) const {
    low.set(page, code & ((1 << low.bits) - 1));
    if (high.bits != 0) high.set(page, code >> low.bits);
  }
};

Fields fields_at(int bits, const CodePlace& place, int codes_quad, int plane1_quad) {
  const auto inside = static_cast<std::size_t>(place.lane * 16 + place.word * 4 + place.byte);
  const int width = bits == 4 ? 4 : 2;
  Fields fields;
  fields.low = {static_cast<std::size_t>(codes_quad) + inside, place.position * width, width};
  if (bits == 3) {
    fields.high = {static_cast<std::size_t>(plane1_quad) + inside, plane1_bit(place.group, place.position), 1};
  }
  return fields;
}

Fields key_fields(const KeyFormat& key, int token, int depth) {
  const CodePlace place = place_of(key.bits, token, depth);
  return fields_at(key.bits, place,
                   key.codes_offset() + (place.group * key.quads_per_group() + place.step) * kQuadBytes,
                   key.plane1_offset() + place.step * kQuadBytes);
}

// The high plane of boosted channels: entry `i` of the list is depth index i of the steps after the base ones.
Fields high_fields(const KeyFormat& key, int token, int i) {
  return key_fields(key, token, key.dim + i);
}

Fields value_fields(const ValueFormat& value, int channel, int token) {
  const CodePlace place = place_of(value.bits, channel, value_slot(token));
  const int half = value.bytes() * (token >= kPage / 2 ? 1 : 0) / 2;
  const int step = place.step % 2;
  return fields_at(value.bits, place, half + value.codes_offset() + (place.group * 2 + step) * kQuadBytes,
                   half + value.plane1_offset() + (place.group / 2 * 2 + step) * kQuadBytes);
}

void copy2(std::byte* to, const std::byte* from) {
  std::memcpy(to, from, 2);
}

// Width of a tile's codes over all depth indices.
int uniform_width(const TileLayout& tile) {
  int width = 0;
  for (const PlaneLayout& plane : tile.planes) width += plane.depth == tile.depth ? plane.bits : 0;
  return width;
}

void check_width(const char* side, int width) {
  if (width < 2 || width > 4) {
    refuse("codes of " + std::string(side) + " have " + std::to_string(width) + " bits; on the GPU: 2 to 4");
  }
}

// Depth of the plane over some channels, 0 if there is none. The device knows one second plane of 2 bits on 2-bit
// codes.
int boosted_channels(const TileLayout& tile) {
  int count = 0;
  for (const PlaneLayout& plane : tile.planes) {
    if (plane.depth == tile.depth) continue;
    if (count != 0 || plane.bits != 2 || plane.shift != 2 || plane.first != 0) {
      refuse("a plane of " + std::to_string(plane.bits) + " bits over some channels; on the GPU: one of 2 bits");
    }
    count = plane.depth;
  }
  return count;
}

// ---- one side of a page

void uniform_keys_to_device(const DeviceFormat& format, const TileLayout& tile, const std::byte* block,
                            std::byte* keys) {
  Codes codes = unpack(tile, tile.planes, block);
  const std::vector<int> order = load_order(tile, block);
  for (int i = 0; i < format.key.dim; ++i) {
    const int d = order[static_cast<std::size_t>(i)];
    std::byte* ends = keys + key_endpoint_offset(d);
    const bool swapped = i < format.boosted;
    copy2(ends + (swapped ? 8 : 0), block + tile.min_offset + static_cast<std::size_t>(2 * i));
    copy2(ends + (swapped ? 0 : 8), block + tile.max_offset + static_cast<std::size_t>(2 * i));
    const int mask = format.boosted > 0 ? 3 : 15;
    for (int t = 0; t < kPage; ++t) key_fields(format.key, t, d).set(keys, codes.at(i, t) & mask);
    if (!swapped) continue;
    keys[format.key.index_offset() + i] = static_cast<std::byte>(d);
    for (int t = 0; t < kPage; ++t) high_fields(format.key, t, i).set(keys, codes.at(i, t) >> 2);
  }
}

void uniform_keys_from_device(const DeviceFormat& format, const TileLayout& tile, const std::byte* keys,
                              std::byte* block) {
  std::vector<int> boosted;
  for (int i = 0; i < format.boosted; ++i) {
    const int channel = std::to_integer<int>(keys[format.key.index_offset() + i]);
    if ((i > 0 && channel <= boosted.back()) || channel >= format.key.dim) {
      base::fail(ErrorCode::bad_format, "entry " + std::to_string(i) + " of a page's channel list is " +
                                            std::to_string(channel) + "; allowed: ascending, below " +
                                            std::to_string(format.key.dim));
    }
    boosted.push_back(channel);
  }
  const std::vector<int> order = make_order(tile, boosted);
  Codes codes(tile);
  for (int i = 0; i < format.key.dim; ++i) {
    const int d = order[static_cast<std::size_t>(i)];
    if (tile.order_entry == 1) block[tile.order_offset + static_cast<std::size_t>(i)] = static_cast<std::byte>(d);
    const std::byte* ends = keys + key_endpoint_offset(d);
    const bool swapped = i < format.boosted;
    copy2(block + tile.min_offset + static_cast<std::size_t>(2 * i), ends + (swapped ? 8 : 0));
    copy2(block + tile.max_offset + static_cast<std::size_t>(2 * i), ends + (swapped ? 0 : 8));
    for (int t = 0; t < kPage; ++t) {
      int code = key_fields(format.key, t, d).get(keys);
      if (swapped) code |= high_fields(format.key, t, i).get(keys) << 2;
      codes.at(i, t) = static_cast<std::uint8_t>(code);
    }
  }
  pack(tile, tile.planes, codes, block);
}

// Bytes from the start of a sorted key tile to the minimum of the channel in place i; the maximum is 8 bytes further.
std::size_t sorted_endpoint_offset(int i) {
  return static_cast<std::size_t>(i / kFour * 16 + i % kFour * 2);
}

// Calls visit(field, place, token, shift) for every field of the planes, which have the same runs on both sides.
template <class Visit>
void visit_sorted(const KeyFormat& key, const cache::TilePlanes& planes, const Visit& visit) {
  std::size_t offset = static_cast<std::size_t>(key.codes_offset());
  for (const PlaneLayout& plane : planes.span()) {
    for (int i = 0; i < plane.depth; ++i) {
      for (int t = 0; t < kPage; ++t) {
        const FieldPlace at = sorted_place(plane.bits, i / kFour, i % kFour, t);
        visit(Field{offset + static_cast<std::size_t>(at.byte), at.shift, plane.bits}, plane.first + i, t, plane.shift);
      }
    }
    offset += static_cast<std::size_t>(plane.bits * plane.depth / kFour * kFourBytes);
  }
}

void sorted_keys_to_device(const KeyFormat& key, const TileLayout& tile, const std::byte* block, std::byte* keys) {
  const std::array<int, 6> counts = cache::read_counts(tile, block);
  const cache::TilePlanes planes = cache::place_planes(counts, tile.rows, tile.plane_offset);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    keys[static_cast<std::size_t>(key.counts_offset()) + i] = static_cast<std::byte>(counts[i]);
  }
  for (int i = 0; i < key.dim; ++i) {
    std::byte* ends = keys + sorted_endpoint_offset(i);
    copy2(ends, block + tile.min_offset + static_cast<std::size_t>(2 * i));
    copy2(ends + 8, block + tile.max_offset + static_cast<std::size_t>(2 * i));
  }
  std::memcpy(keys + key.index_offset(), block + tile.order_offset, static_cast<std::size_t>(key.dim));
  Codes codes = unpack(tile, planes.span(), block);
  visit_sorted(key, planes, [&](const Field& field, int place, int token, int shift) {
    field.set(keys, codes.at(place, token) >> shift & ((1 << field.bits) - 1));
  });
}

// What a download relies on: planes within the budget, every channel once, ascending inside a class.
std::array<int, 6> checked_counts(const KeyFormat& key, const std::byte* keys) {
  std::array<int, 6> counts{};
  int fours = 0;
  int bits = 0;
  std::vector<bool> seen(static_cast<std::size_t>(key.dim));
  bool good = true;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    counts[i] = std::to_integer<int>(keys[static_cast<std::size_t>(key.counts_offset()) + i]);
    int last = -1;
    for (int at = kFour * fours; at < kFour * (fours + counts[i]) && at < key.dim; ++at) {
      const int channel = std::to_integer<int>(keys[key.index_offset() + at]);
      good = good && channel > last && channel < key.dim && !seen[static_cast<std::size_t>(channel)];
      if (!good) break;
      seen[static_cast<std::size_t>(channel)] = true;
      last = channel;
    }
    fours += counts[i];
    bits += counts[i] * cache::kWidthOrder[i];
  }
  if (!good || fours != key.dim / kFour || bits > key.budget) {
    base::fail(ErrorCode::bad_format,
               "a page's channels have " + std::to_string(fours) + " fours of widths that sum to " +
                   std::to_string(bits) + (good ? "" : ", and its order is no order") + "; allowed: " +
                   std::to_string(key.dim / kFour) + " fours, a sum of at most " + std::to_string(key.budget));
  }
  return counts;
}

void sorted_keys_from_device(const KeyFormat& key, const TileLayout& tile, const std::byte* keys, std::byte* block) {
  const std::array<int, 6> counts = checked_counts(key, keys);
  const cache::TilePlanes planes = cache::place_planes(counts, tile.rows, tile.plane_offset);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto count = static_cast<std::uint16_t>(counts[i]);
    std::memcpy(block + tile.counts_offset + i * sizeof count, &count, sizeof count);
  }
  for (int i = 0; i < key.dim; ++i) {
    const std::byte* ends = keys + sorted_endpoint_offset(i);
    copy2(block + tile.min_offset + static_cast<std::size_t>(2 * i), ends);
    copy2(block + tile.max_offset + static_cast<std::size_t>(2 * i), ends + 8);
  }
  std::memcpy(block + tile.order_offset, keys + key.index_offset(), static_cast<std::size_t>(key.dim));
  Codes codes(tile);
  visit_sorted(key, planes, [&](const Field& field, int place, int token, int shift) {
    codes.at(place, token) |= static_cast<std::uint8_t>(field.get(keys) << shift);
  });
  pack(tile, planes.span(), codes, block);
}

// `grid`: what the endpoints' offsets count from.
void values_to_device(const ValueFormat& value, const TileLayout& tile, const std::byte* block, const std::byte* grid,
                      std::byte* values) {
  Codes codes = unpack(tile, tile.planes, block);
  for (int t = 0; t < kPage; ++t) {
    std::byte* ends = values + value_endpoint_offset(value, t);
    copy2(ends, grid + tile.min_offset + static_cast<std::size_t>(2 * t));
    copy2(ends + 128, grid + tile.max_offset + static_cast<std::size_t>(2 * t));
    for (int c = 0; c < value.dim; ++c) value_fields(value, c, t).set(values, codes.at(t, c));
  }
}

void values_from_device(const ValueFormat& value, const TileLayout& tile, const std::byte* values, std::byte* block,
                        std::byte* grid) {
  Codes codes(tile);
  for (int t = 0; t < kPage; ++t) {
    const std::byte* ends = values + value_endpoint_offset(value, t);
    copy2(grid + tile.min_offset + static_cast<std::size_t>(2 * t), ends);
    copy2(grid + tile.max_offset + static_cast<std::size_t>(2 * t), ends + 128);
    for (int c = 0; c < value.dim; ++c) {
      codes.at(t, c) = static_cast<std::uint8_t>(value_fields(value, c, t).get(values));
    }
  }
  pack(tile, tile.planes, codes, block);
}

KeyFormat key_format(const TileLayout& tile, int dim, int boosted) {
  if (tile.budget > 0) return {0, dim, 0, tile.budget};
  const int bits = uniform_width(tile);
  check_width("keys", bits);
  if (boosted > 0 && bits != 2) refuse("chosen channels of keys without 2-bit codes below them");
  return {bits, dim, (boosted + kStep - 1) / kStep};
}

}  // namespace

void check_device_shape(const Recipe& recipe, const CacheShape& shape) {
  if (recipe.page != kPage) refuse("recipe key 'page' is " + std::to_string(recipe.page) + "; on the GPU: 128");
  for (const int dim : {shape.key_dim, shape.value_dim}) {
    if (!is_dim(dim)) refuse("head dimension is " + std::to_string(dim) + "; on the GPU: 64, 96, 128, 192, 256");
  }
  if (shape.dtype == DType::f32) refuse("cache type is f32; on the GPU: f16, bf16");
}

DeviceFormat make_device_format(const Recipe& recipe, const CacheShape& shape) {
  const PageLayout layout = make_layout(recipe, shape);
  const std::string served = "; on the GPU: kivi, kitty, waterfill";
  if (!recipe.quantizes()) refuse("recipe '" + to_text(recipe) + "' has no sealed pages" + served);
  if (!layout.key.table.empty() || !layout.value.table.empty()) {
    refuse("recipe '" + to_text(recipe) + "' has tables of levels and outliers" + served);
  }
  const auto* kitty = std::get_if<KittyKeys>(&recipe.key);
  if (kitty != nullptr && kitty->selector != Selector::magnitude) {
    refuse("recipe '" + to_text(recipe) + "' ranks channels otherwise than by magnitude" + served);
  }
  if (layout.key.feedback) refuse("recipe '" + to_text(recipe) + "' feeds errors of keys back by queries" + served);
  if (layout.salient > 0) refuse("recipe '" + to_text(recipe) + "' orders the tokens of a page" + served);
  check_device_shape(recipe, shape);
  DeviceFormat format;
  format.boosted = boosted_channels(layout.key);
  format.key = key_format(layout.key, shape.key_dim, format.boosted);
  format.value = {uniform_width(layout.value), shape.value_dim};
  check_width("values", format.value.bits);
  if (boosted_channels(layout.value) != 0) refuse("values with chosen tokens; on the GPU: one width");
  format.rotation = layout.value.rotation;
  format.exact = {shape.key_dim, shape.value_dim};
  format.bfloat = shape.dtype == DType::bf16;
  return format;
}

void to_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> block, int head,
               std::span<std::byte> device) {
  const std::byte* from = block.data() + static_cast<std::size_t>(head) * layout.head_bytes;
  std::byte* keys = device.data();
  std::memset(keys, 0, format.head_bytes());
  if (format.key.sorted()) {
    sorted_keys_to_device(format.key, layout.key, from, keys);
  } else {
    uniform_keys_to_device(format, layout.key, from, keys);
  }
  values_to_device(format.value, layout.value, from, layout.value.shared_grid ? block.data() : from,
                   keys + format.key.bytes());
}

void from_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> device, int head,
                 std::span<std::byte> block) {
  std::byte* to = block.data() + static_cast<std::size_t>(head) * layout.head_bytes;
  std::memset(to, 0, layout.head_bytes);
  if (format.key.sorted()) {
    sorted_keys_from_device(format.key, layout.key, device.data(), to);
  } else {
    uniform_keys_from_device(format, layout.key, device.data(), to);
  }
  values_from_device(format.value, layout.value, device.data() + format.key.bytes(), to,
                     layout.value.shared_grid ? block.data() : to);
}

}  // namespace kvant::cuda
