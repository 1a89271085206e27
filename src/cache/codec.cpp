// Sealing and reopening pages: rows to planes and endpoints, and back.
#include <algorithm>
#include <cstring>

#include "cache/page.hpp"
#include "methods/method.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {
namespace {

using tiles::kernels;

// The depth rows of a tile as floats with the skipped cells removed, plus where the kept ones go.
struct TileRows {
  std::vector<float> data;  // [depth][stride]
  int stride = 0;
  std::vector<int> kept;  // row numbers inside the page, ascending
};

TileRows load_keys(const CacheShape& shape, const RowsLayout& rows, const std::byte* open, int head,
                   const CellSet& skip) {
  TileRows tile;
  for (int t = 0; t < rows.tokens; ++t) {
    if (!skip[static_cast<std::size_t>(t)]) tile.kept.push_back(t);
  }
  tile.stride = rows.tokens;
  tile.data.resize(static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(rows.tokens));
  const bool whole = tile.kept.size() == static_cast<std::size_t>(rows.tokens);
  for (int d = 0; d < shape.key_dim; ++d) {
    float* row = tile.data.data() + static_cast<std::ptrdiff_t>(d) * tile.stride;
    kernels().widen(open + rows.key_at(head, d, 0), shape.dtype, row, rows.tokens);
    if (whole) continue;
    for (std::size_t i = 0; i < tile.kept.size(); ++i) row[i] = row[tile.kept[i]];
  }
  return tile;
}

// min and max are elements of the row, so they convert to the cache's type and back exactly.
void store_endpoints(DType dtype, std::byte* head_block, const TileLayout& tile, const std::vector<float>& min,
                     const std::vector<float>& max) {
  kernels().narrow(min.data(), head_block + tile.min_offset, dtype, tile.depth);
  kernels().narrow(max.data(), head_block + tile.max_offset, dtype, tile.depth);
}

void pack_planes(const TileLayout& tile, const std::uint8_t* codes, std::int64_t stride, std::byte* head_block) {
  for (const PlaneLayout& plane : tile.planes) {
    kernels().pack_plane(codes, stride, plane.gathered ? tile_index(tile, head_block) : nullptr, plane.bits,
                         plane.shift, tile.rows, plane.depth, head_block + plane.offset);
  }
}

void encode_keys(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, std::byte* head_block) {
  const TileLayout& tile = layout.key;
  const TileRows rows = load_keys(shape, RowsLayout(shape, recipe.page), open, head, skip);
  const int count = static_cast<int>(rows.kept.size());
  if (tile.index_count > 0) {
    catalog::side_of(recipe.key)
        .choose(rows.data.data(), rows.stride, count, tile.depth, tile.index_count,
                reinterpret_cast<std::uint16_t*>(head_block + tile.index_offset));
  }
  std::vector<int> widths;
  tile_widths(tile, tile_index(tile, head_block), widths);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<float> min(depth), max(depth);
  const std::int64_t stride = base::round_up(tile.rows, tiles::kLanes);
  std::vector<std::uint8_t> codes(depth * static_cast<std::size_t>(stride)), dense(static_cast<std::size_t>(tile.rows));
  for (std::size_t d = 0; d < depth; ++d) {
    const float* row = rows.data.data() + static_cast<std::ptrdiff_t>(d) * rows.stride;
    kernels().min_max(row, count, &min[d], &max[d]);
    const int levels = (1 << widths[d]) - 1;
    std::uint8_t* out = codes.data() + static_cast<std::ptrdiff_t>(d) * stride;
    const bool whole = count == tile.rows;
    kernels().quantize(row, count, min[d], tiles::grid_step(min[d], max[d], levels), levels,
                       whole ? out : dense.data());
    for (int i = 0; !whole && i < count; ++i)
      out[rows.kept[static_cast<std::size_t>(i)]] = dense[static_cast<std::size_t>(i)];
  }
  store_endpoints(shape.dtype, head_block, tile, min, max);
  pack_planes(tile, codes.data(), stride, head_block);
}

void encode_values(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                   int head, const CellSet& skip, std::byte* head_block) {
  const TileLayout& tile = layout.value;
  const RowsLayout rows(shape, recipe.page);
  std::vector<int> widths;
  tile_widths(tile, tile_index(tile, head_block), widths);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<float> min(depth), max(depth), row(static_cast<std::size_t>(tile.rows));
  const std::int64_t stride = base::round_up(tile.rows, tiles::kLanes);
  std::vector<std::uint8_t> codes(depth * static_cast<std::size_t>(stride));
  for (std::size_t t = 0; t < depth; ++t) {
    if (skip[t]) continue;  // endpoints 0 and codes 0: never read, always the same bytes
    kernels().widen(open + rows.value_at(head, 0, static_cast<int>(t)), shape.dtype, row.data(), tile.rows);
    kernels().min_max(row.data(), tile.rows, &min[t], &max[t]);
    const int levels = (1 << widths[t]) - 1;
    kernels().quantize(row.data(), tile.rows, min[t], tiles::grid_step(min[t], max[t], levels), levels,
                       codes.data() + static_cast<std::ptrdiff_t>(t) * stride);
  }
  store_endpoints(shape.dtype, head_block, tile, min, max);
  pack_planes(tile, codes.data(), stride, head_block);
}

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

}  // namespace

void encode_head(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, std::byte* block) {
  std::byte* head_block = block + static_cast<std::size_t>(head) * layout.head_bytes;
  encode_keys(recipe, shape, layout, open, head, skip, head_block);
  encode_values(recipe, shape, layout, open, head, skip, head_block);
}

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

void tile_widths(const TileLayout& tile, const std::uint16_t* index, std::vector<int>& widths) {
  widths.assign(static_cast<std::size_t>(tile.depth), 0);
  for (const PlaneLayout& plane : tile.planes) {
    for (int i = 0; i < plane.depth; ++i) widths[plane.gathered ? index[i] : static_cast<std::size_t>(i)] += plane.bits;
  }
}

void load_grid(const TileLayout& tile, DType dtype, const std::byte* head_block, std::vector<int>& widths, float* min,
               float* step) {
  kernels().widen(head_block + tile.min_offset, dtype, min, tile.depth);
  kernels().widen(head_block + tile.max_offset, dtype, step, tile.depth);
  if (tile.index_count == 0) {
    int width = 0;
    for (const PlaneLayout& plane : tile.planes) width += plane.bits;
    const int levels = (1 << width) - 1;
    for (int d = 0; d < tile.depth; ++d) step[d] = tiles::grid_step(min[d], step[d], levels);
    return;
  }
  tile_widths(tile, tile_index(tile, head_block), widths);
  for (int d = 0; d < tile.depth; ++d) {
    step[d] = tiles::grid_step(min[d], step[d], (1 << widths[static_cast<std::size_t>(d)]) - 1);
  }
}

void decode_tile(const PageLayout& layout, const TileLayout& tile, DType dtype, const std::byte* block, int head,
                 float* out) {
  const std::byte* head_block = block + static_cast<std::size_t>(head) * layout.head_bytes;
  const std::int64_t stride = base::round_up(tile.rows, tiles::kLanes);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<std::uint8_t> codes(depth * static_cast<std::size_t>(stride));
  for (const PlaneLayout& plane : tile.planes) {
    kernels().unpack_plane(head_block + plane.offset, plane.bits, plane.shift, tile.rows, plane.depth,
                           plane.gathered ? tile_index(tile, head_block) : nullptr, codes.data(), stride);
  }
  std::vector<float> min(depth), step(depth);
  std::vector<int> widths;
  load_grid(tile, dtype, head_block, widths, min.data(), step.data());
  tile_widths(tile, tile_index(tile, head_block), widths);
  std::vector<float> max(depth);
  kernels().widen(head_block + tile.max_offset, dtype, max.data(), tile.depth);
  for (std::size_t d = 0; d < depth; ++d) {
    const auto row = static_cast<std::ptrdiff_t>(d) * stride;
    kernels().dequantize(codes.data() + row, tile.rows, min[d], step[d], out + row);
    // min + levels * step may miss max by a rounding in binary32; sealing the page again must find the same endpoints.
    const int levels = (1 << widths[d]) - 1;
    for (int i = 0; i < tile.rows; ++i) {
      if (codes[static_cast<std::size_t>(row + i)] == levels) out[row + i] = max[d];
    }
  }
}

void decode_page(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const SealedPage& page,
                 std::byte* open) {
  const RowsLayout rows(shape, recipe.page);
  const int value_stride = base::round_up(shape.value_dim, tiles::kLanes);
  std::vector<float> keys(static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(recipe.page));
  std::vector<float> values(static_cast<std::size_t>(recipe.page) * static_cast<std::size_t>(value_stride));
  for (int head = 0; head < shape.kv_heads; ++head) {
    decode_tile(layout, layout.key, shape.dtype, page.block.get(), head, keys.data());
    decode_tile(layout, layout.value, shape.dtype, page.block.get(), head, values.data());
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
