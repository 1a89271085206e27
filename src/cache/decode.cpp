// Reopening pages: planes and endpoints back to rows.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "base/half.hpp"
#include "cache/page.hpp"
#include "cache/tile.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {

using tiles::kernels;

namespace {

// Copies token `from` of one rows buffer to token `to` of another.
void copy_token(const CacheShape& shape, const RowsLayout& source, const std::byte* from, int from_token,
                const RowsLayout& target, std::byte* to, int to_token) {
  for (int head = 0; head < shape.kv_heads; ++head) {
    for (int d = 0; d < shape.key_dim; ++d) {
      std::memcpy(to + target.key_at(head, d, to_token), from + source.key_at(head, d, from_token), source.element);
    }
    std::memcpy(to + target.value_at(head, 0, to_token), from + source.value_at(head, 0, from_token),
                static_cast<std::size_t>(shape.value_dim) * source.element);
  }
}

// Errors of rotated or divided values grow when that is undone: next to the end of the type's range they could leave
// it.
void clamp_to(DType dtype, float* values, std::ptrdiff_t count) {
  const float limit = base::largest_stored(dtype);
  for (float* value = values; value != values + count; ++value) *value = std::clamp(*value, -limit, limit);
}

}  // namespace

ExactRows copy_exact(const CacheShape& shape, int page_tokens, const std::byte* open, const CellSet& which) {
  ExactRows exact;
  for (int cell = 0; cell < page_tokens; ++cell) {
    if (which[static_cast<std::size_t>(cell)]) exact.cells.push_back(static_cast<std::uint8_t>(cell));
  }
  if (exact.cells.empty()) return exact;
  exact.cells.shrink_to_fit();
  exact.capacity = base::round_up(static_cast<int>(exact.cells.size()), tiles::kLanes);
  const RowsLayout source(shape, page_tokens);
  const RowsLayout target(shape, exact.capacity);
  exact.rows = base::allocate_zeroed(target.bytes);
  for (std::size_t i = 0; i < exact.cells.size(); ++i) {
    copy_token(shape, source, open, exact.cells[i], target, exact.rows.get(), static_cast<int>(i));
  }
  return exact;
}

void load_endpoints(const TileView& view, DType dtype, float* min, float* max) {
  const TileLayout& tile = *view.tile;
  const bool by_token = tile.shared_grid && view.tokens != nullptr;
  std::array<float, kMaxPage> line;
  for (const auto& [offset, out] : {std::pair(tile.min_offset, min), std::pair(tile.max_offset, max)}) {
    kernels().widen(view.grid + offset, dtype, by_token ? line.data() : out, tile.depth);
    for (int i = 0; by_token && i < tile.depth; ++i) out[i] = line[view.tokens[i]];
  }
}

namespace {

// One tile as float [depth][stride] by channel or by place, stride = rows padded to 16.
void decode_tile(const TileView& view, DType dtype, float* out) {
  const TileLayout& tile = *view.tile;
  const auto depth = static_cast<std::size_t>(tile.depth);
  const std::int64_t stride = base::round_up(tile.rows, tiles::kLanes);
  std::vector<std::uint8_t> codes(depth * static_cast<std::size_t>(stride));
  for (const PlaneLayout& plane : view.planes.span()) {
    kernels().unpack_plane(view.head_block + plane.offset, plane.bits, plane.shift, tile.rows, plane.depth, nullptr,
                           codes.data() + plane.first * stride, stride);
  }
  for (std::uint8_t& code : codes) {
    if (!tile.table.empty()) code = tile.table[code];
  }
  std::vector<std::uint16_t> order(depth);
  std::vector<int> levels(depth);
  std::vector<float> min(depth), max(depth);
  view.order(order.data());
  view.levels(levels.data());
  load_endpoints(view, dtype, min.data(), max.data());
  for (std::size_t i = 0; i < depth; ++i) {
    float* row = out + order[i] * stride;
    const std::uint8_t* code = codes.data() + static_cast<std::ptrdiff_t>(i) * stride;
    kernels().dequantize(code, tile.rows, min[i], tiles::grid_step(min[i], max[i], levels[i]), row);
    // min + levels * step may miss max by a rounding in binary32; sealing the page again must find the same endpoints.
    for (int r = 0; r < tile.rows; ++r) {
      if (code[r] == levels[i]) row[r] = max[i];
    }
    if (tile.rotation > 1) kernels().hadamard(row, tile.rows, tile.rotation);
  }
  const OutlierList outliers = view.outliers();
  for (int i = 0; i < outliers.count; ++i) {
    const auto d = static_cast<std::size_t>(outliers.depth(i));
    const float value = base::load_float(outliers.values, dtype, i);
    if (value < min[d] || value > max[d]) out[order[d] * stride + outliers.row(i)] = value;
  }
}

}  // namespace

namespace {

void decode_key_tiles(const PageLayout& layout, DType dtype, const std::byte* block, int head, float* out) {
  const std::uint8_t* tokens = token_order(layout, block, head);
  if (tokens == nullptr) return decode_tile(TileView(layout, layout.key, block, head), dtype, out);
  const int page = layout.key.rows + layout.key_rest.rows;
  int first = 0;
  std::vector<float> decoded;
  for (const TileLayout* tile : {&layout.key, &layout.key_rest}) {
    if (tile->rows == 0) continue;
    const int stride = base::round_up(tile->rows, tiles::kLanes);
    decoded.resize(static_cast<std::size_t>(tile->depth) * static_cast<std::size_t>(stride));
    decode_tile(TileView(layout, *tile, block, head), dtype, decoded.data());
    for (int d = 0; d < tile->depth; ++d) {
      const float* from = decoded.data() + static_cast<std::ptrdiff_t>(d) * stride;
      float* to = out + static_cast<std::ptrdiff_t>(d) * page;
      for (int row = 0; row < tile->rows; ++row) to[tokens[first + row]] = from[row];
    }
    first += tile->rows;
  }
}

}  // namespace

void decode_keys(const PageLayout& layout, DType dtype, const std::byte* block, int head, KeyTurns turns, float* out) {
  decode_key_tiles(layout, dtype, block, head, out);
  if (turns.rotation == nullptr) return;
  const int page = layout.key.rows + layout.key_rest.rows;
  turns.rotation->turn(Turn::rotate, turns.positions, page, out, page);
  clamp_to(dtype, out, static_cast<std::ptrdiff_t>(layout.key.depth) * page);
}

void decode_values(const PageLayout& layout, DType dtype, const std::byte* block, int head, float* out) {
  const TileLayout& tile = layout.value;
  const TileView view(layout, tile, block, head);
  const int stride = base::round_up(tile.rows, tiles::kLanes);
  const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(tile.depth) * stride;
  if (view.tokens == nullptr) {
    decode_tile(view, dtype, out);
    if (tile.rotation > 1) clamp_to(dtype, out, size);
    return;
  }
  std::vector<float> decoded(static_cast<std::size_t>(tile.depth) * static_cast<std::size_t>(stride));
  decode_tile(view, dtype, decoded.data());
  std::vector<float> factors(static_cast<std::size_t>(tile.rows), 1.0F);
  if (tile.channel_factors) kernels().widen(view.head_block + tile.factor_offset, dtype, factors.data(), tile.rows);
  for (int i = 0; i < tile.depth; ++i) {
    const float* from = decoded.data() + static_cast<std::ptrdiff_t>(i) * stride;
    float* to = out + static_cast<std::ptrdiff_t>(view.tokens[i]) * stride;
    for (int r = 0; r < tile.rows; ++r) to[r] = from[r] * factors[static_cast<std::size_t>(r)];
  }
  if (tile.channel_factors) clamp_to(dtype, out, size);
}

void decode_page(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const SealedPage& page,
                 KeyTurns turns, std::byte* open) {
  const RowsLayout rows(shape, recipe.page);
  const int value_stride = base::round_up(shape.value_dim, tiles::kLanes);
  std::vector<float> keys(static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(recipe.page));
  std::vector<float> values(static_cast<std::size_t>(recipe.page) * static_cast<std::size_t>(value_stride));
  for (int head = 0; head < shape.kv_heads; ++head) {
    decode_keys(layout, shape.dtype, page.block.get(), head, turns, keys.data());
    decode_values(layout, shape.dtype, page.block.get(), head, values.data());
    kernels().narrow(keys.data(), open + rows.key_at(head, 0, 0), shape.dtype, static_cast<std::int64_t>(keys.size()));
    kernels().narrow(values.data(), open + rows.value_at(head, 0, 0), shape.dtype,
                     static_cast<std::int64_t>(values.size()));
  }
  if (page.exact.cells.empty()) return;
  const RowsLayout source(shape, page.exact.capacity);
  for (std::size_t i = 0; i < page.exact.cells.size(); ++i) {
    copy_token(shape, source, page.exact.rows.get(), static_cast<int>(i), rows, open, page.exact.cells[i]);
  }
}

}  // namespace kvant::cache
