// Sealing pages: rows to planes and endpoints.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>

#include "cache/grid.hpp"
#include "cache/outliers.hpp"
#include "cache/page.hpp"
#include "cache/tile.hpp"
#include "methods/method.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {
namespace {

using tiles::kernels;

// The channels of a head as float rows of the cells that are coded.
struct KeyRows {
  std::vector<float> data;  // [depth][stride]
  int stride = 0;
  std::vector<int> kept;  // row numbers inside the page, ascending

  int count() const { return static_cast<int>(kept.size()); }
  const float* channel(int c) const { return data.data() + static_cast<std::ptrdiff_t>(c) * stride; }
};

KeyRows load_keys(const CacheShape& shape, const RowsLayout& rows, const std::byte* open, int head,
                  const CellSet& skip) {
  KeyRows keys;
  for (int t = 0; t < rows.tokens; ++t) {
    if (!skip[static_cast<std::size_t>(t)]) keys.kept.push_back(t);
  }
  keys.stride = rows.tokens;
  keys.data.resize(static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(rows.tokens));
  const bool whole = keys.kept.size() == static_cast<std::size_t>(rows.tokens);
  for (int d = 0; d < shape.key_dim; ++d) {
    float* row = keys.data.data() + static_cast<std::ptrdiff_t>(d) * keys.stride;
    kernels().widen(open + rows.key_at(head, d, 0), shape.dtype, row, rows.tokens);
    if (whole) continue;
    for (std::size_t i = 0; i < keys.kept.size(); ++i) row[i] = row[keys.kept[i]];
  }
  return keys;
}

// Endpoints are values of the cache's type already: they convert to it and back exactly.
void store_endpoints(DType dtype, std::byte* grid, const TileLayout& tile, const std::vector<Endpoints>& endpoints) {
  std::vector<float> min, max;
  for (const Endpoints& e : endpoints) {
    min.push_back(e.min);
    max.push_back(e.max);
  }
  kernels().narrow(min.data(), grid + tile.min_offset, dtype, tile.depth);
  kernels().narrow(max.data(), grid + tile.max_offset, dtype, tile.depth);
}

// Codes of one tile in stored order, rows padded to whole row tiles with zeros.
struct Codes {
  std::int64_t stride;
  std::vector<std::uint8_t> data;

  explicit Codes(const TileLayout& tile)
      : stride(base::round_up(tile.rows, tiles::kLanes)),
        data(static_cast<std::size_t>(tile.depth) * static_cast<std::size_t>(stride)) {}
  std::uint8_t* row(int i) { return data.data() + i * stride; }
};

void pack_planes(const TileView& view, Codes& codes, std::byte* head_block) {
  for (const PlaneLayout& plane : view.planes.span()) {
    kernels().pack_plane(codes.row(plane.first), codes.stride, nullptr, plane.bits, plane.shift, view.tile->rows,
                         plane.depth, head_block + plane.offset);
  }
}

// The channels by the method's widths, wide classes as kWidthOrder says and the lower channel first; stored with the
// counts of each class where these differ from page to page.
void choose_order(const KeyRecipe& recipe, const TileLayout& tile, const KeyRows& rows, const double* queries,
                  std::byte* head_block) {
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<float> min(depth), max(depth);
  for (int d = 0; d < tile.depth; ++d) {
    kernels().min_max(rows.channel(d), rows.count(), &min[static_cast<std::size_t>(d)],
                      &max[static_cast<std::size_t>(d)]);
  }
  std::vector<std::uint8_t> widths(depth);
  catalog::side_of(recipe).choose_widths(
      recipe, {tile, rows.data.data(), rows.stride, rows.count(), min.data(), max.data(), queries}, widths.data());
  std::array<std::uint16_t, kWidthOrder.size()> counts{};
  for (const std::uint8_t width : widths) ++counts[static_cast<std::size_t>(width_class(width))];
  if (tile.budget > 0) {
    for (std::uint16_t& count : counts) count = static_cast<std::uint16_t>(count / tiles::kQuad);
    std::memcpy(head_block + tile.counts_offset, counts.data(), sizeof counts);
  }
  std::vector<std::uint16_t> order(depth);
  std::iota(order.begin(), order.end(), std::uint16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint16_t a, std::uint16_t b) { return width_class(widths[a]) < width_class(widths[b]); });
  std::byte* stored = head_block + tile.order_offset;
  if (tile.order_entry == sizeof(std::uint16_t)) std::memcpy(stored, order.data(), depth * sizeof(std::uint16_t));
  for (std::size_t i = 0; tile.order_entry == 1 && i < depth; ++i) stored[i] = static_cast<std::byte>(order[i]);
}

// Divided by the block: then no rotated value is larger than the largest of its block, which the cache's type holds,
// and the transform back needs no factor.
void rotate_values(float* row, const TileLayout& tile) {
  kernels().hadamard(row, tile.rows, tile.rotation);
  const float factor = 1.0F / static_cast<float>(tile.rotation);  // a power of two
  for (int r = 0; r < tile.rows; ++r) row[r] *= factor;
}

// Rows on the tile's kind of grid: uniform, or with a table of levels.
class AnyCoder {
 public:
  AnyCoder(DType dtype, const TileLayout& tile, bool keys, int longest) : uniform_(dtype, tile.least_squares, longest) {
    if (!tile.table.empty()) table_.emplace(tile, keys);
  }

  // Codes of even width lie one bit up where bit 0 is that of the odd ones.
  Endpoints code(const float* x, int n, int levels, std::uint8_t* codes) {
    if (table_) return table_->code(x, n, codes);
    const int shift = std::countr_zero(static_cast<unsigned>(levels));
    const Endpoints endpoints = uniform_.code(x, n, levels >> shift, codes);
    for (int i = 0; shift > 0 && i < n; ++i) codes[i] = static_cast<std::uint8_t>(codes[i] << shift);
    return endpoints;
  }
  // Of the last row, with a table.
  const std::vector<TableCoder::Outlier>& outliers() const { return table_->outliers(); }

 private:
  RowCoder uniform_;
  std::optional<TableCoder> table_;
};

}  // namespace

void encode_keys(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, const double* queries, std::byte* block) {
  const TileLayout& tile = layout.key;
  std::byte* head_block = block + static_cast<std::size_t>(head) * layout.head_bytes;
  const KeyRows rows = load_keys(shape, RowsLayout(shape, recipe.page), open, head, skip);
  if (tile.order_entry > 0) choose_order(recipe.key, tile, rows, queries, head_block);
  const TileView view(layout, tile, block, head);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<std::uint16_t> order(depth);
  std::vector<int> levels(depth);
  view.order(order.data());
  view.levels(levels.data());
  AnyCoder coder(shape.dtype, tile, true, tile.rows);
  std::vector<Endpoints> endpoints(depth);
  Codes codes(tile);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(tile.rows));
  const bool whole = rows.count() == tile.rows;
  for (int i = 0; i < tile.depth; ++i) {
    const auto at = static_cast<std::size_t>(i);
    endpoints[at] = coder.code(rows.channel(order[at]), rows.count(), levels[at], whole ? codes.row(i) : dense.data());
    if (tile.outliers.per_end > 0) {
      std::vector<TableCoder::Outlier> outliers = coder.outliers();
      for (TableCoder::Outlier& outlier : outliers) outlier.index = rows.kept[static_cast<std::size_t>(outlier.index)];
      store_key_outliers(tile, shape.dtype, i, endpoints[at].max, outliers, head_block);
    }
    for (std::size_t k = 0; !whole && k < rows.kept.size(); ++k) codes.row(i)[rows.kept[k]] = dense[k];
  }
  store_endpoints(shape.dtype, head_block, tile, endpoints);
  pack_planes(view, codes, head_block);
}

void encode_values(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                   int first_head, int heads, const CellSet& skip, std::byte* block) {
  const TileLayout& tile = layout.value;
  const RowsLayout rows(shape, recipe.page);
  const TileView view(layout, tile, block, first_head);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<int> levels(depth);
  view.levels(levels.data());
  const int width = heads * tile.rows;  // values under one grid
  AnyCoder coder(shape.dtype, tile, false, width);
  ValueOutliers outliers(tile, heads);
  std::vector<Endpoints> endpoints(depth);  // 0 for skipped cells, as their codes: never read, always the same bytes
  std::vector<Codes> codes(static_cast<std::size_t>(heads), Codes(tile));
  std::vector<float> row(static_cast<std::size_t>(width));
  std::vector<std::uint8_t> dense(row.size());
  for (int t = 0; t < tile.depth; ++t) {
    const auto at = static_cast<std::size_t>(t);
    if (skip[at]) continue;
    for (int h = 0; h < heads; ++h) {
      float* part = row.data() + static_cast<std::ptrdiff_t>(h) * tile.rows;
      kernels().widen(open + rows.value_at(first_head + h, 0, t), shape.dtype, part, tile.rows);
      if (tile.rotation > 1) rotate_values(part, tile);
    }
    endpoints[at] = coder.code(row.data(), width, levels[at], dense.data());
    if (tile.outliers.per_end > 0) outliers.add(t, coder.outliers());
    for (int h = 0; h < heads; ++h) {
      std::memcpy(codes[static_cast<std::size_t>(h)].row(t), dense.data() + static_cast<std::ptrdiff_t>(h) * tile.rows,
                  static_cast<std::size_t>(tile.rows));
    }
  }
  std::byte* head_block = block + static_cast<std::size_t>(first_head) * layout.head_bytes;
  store_endpoints(shape.dtype, tile.shared_grid ? block : head_block, tile, endpoints);
  if (tile.outliers.per_end > 0) outliers.store(shape.dtype, block);
  for (int h = 0; h < heads; ++h) {
    pack_planes(view, codes[static_cast<std::size_t>(h)], head_block + static_cast<std::size_t>(h) * layout.head_bytes);
  }
}

}  // namespace kvant::cache
