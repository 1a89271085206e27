// Sealing pages: rows to planes and endpoints.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "base/half.hpp"
#include "cache/feedback.hpp"
#include "cache/grid.hpp"
#include "cache/outliers.hpp"
#include "cache/page.hpp"
#include "cache/tile.hpp"
#include "methods/method.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {
namespace {

using tiles::kernels;

// The channels of a head as float rows of the tokens of one tile that are coded.
struct KeyRows {
  std::vector<float> data;  // [depth][stride]
  int stride = 0;
  std::vector<int> kept;  // row numbers inside the tile, ascending

  int count() const { return static_cast<int>(kept.size()); }
  const float* channel(int c) const { return data.data() + static_cast<std::ptrdiff_t>(c) * stride; }
};

// The tile's rows are the tokens in the places first..first+count-1 of the page.
KeyRows load_keys(const CacheShape& shape, const RowsLayout& rows, const std::byte* open, int head, const CellSet& skip,
                  const std::uint8_t* tokens, int first, int count) {
  KeyRows keys;
  std::vector<int> from;
  for (int row = 0; row < count; ++row) {
    const int token = tokens != nullptr ? tokens[first + row] : first + row;
    if (skip[static_cast<std::size_t>(token)]) continue;
    keys.kept.push_back(row);
    from.push_back(token);
  }
  keys.stride = rows.tokens;
  keys.data.resize(static_cast<std::size_t>(shape.key_dim) * static_cast<std::size_t>(rows.tokens));
  const bool whole = tokens == nullptr && keys.count() == rows.tokens;
  std::vector<float> line(static_cast<std::size_t>(rows.tokens));
  for (int d = 0; d < shape.key_dim; ++d) {
    float* row = keys.data.data() + static_cast<std::ptrdiff_t>(d) * keys.stride;
    kernels().widen(open + rows.key_at(head, d, 0), shape.dtype, whole ? row : line.data(), rows.tokens);
    if (whole) continue;
    for (std::size_t i = 0; i < from.size(); ++i) row[i] = line[static_cast<std::size_t>(from[i])];
  }
  return keys;
}

// Keys as they were before the host's rotation, as values of the cache's type: ranges and outliers are some of them. A
// pair may grow by the root of 2 and by the rotation's magnitude; beyond the type's largest number it ends there.
// Infinity less infinity, which is no number, ends at its negative, as on the device.
void turn_back(DType dtype, KeyTurns turns, const std::vector<std::int32_t>& positions, int channels, KeyRows& keys) {
  const int count = keys.count();
  turns.rotation->turn(Turn::undo, positions.data(), count, keys.data.data(), keys.stride);
  const float limit = base::largest_stored(dtype);
  std::vector<std::byte> stored(static_cast<std::size_t>(count) * size_of(dtype));
  for (int d = 0; d < channels; ++d) {
    float* row = keys.data.data() + static_cast<std::ptrdiff_t>(d) * keys.stride;
    for (int i = 0; i < count; ++i) row[i] = std::min(std::max(-limit, row[i]), limit);
    kernels().narrow(row, stored.data(), dtype, count);
    kernels().widen(stored.data(), dtype, row, count);
  }
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
// and the transform back needs no factor. Divided first, by a power of two: sums of the largest values would overflow.
void rotate_values(float* row, const TileLayout& tile) {
  const float factor = 1.0F / static_cast<float>(tile.rotation);
  for (int r = 0; r < tile.rows; ++r) row[r] *= factor;
  kernels().hadamard(row, tile.rows, tile.rotation);
}

// The largest code without the zeros below it: codes of even width lie one bit up where bit 0 is that of the odd ones.
int own_levels(int levels) {
  return levels >> std::countr_zero(static_cast<unsigned>(levels));
}

// Rows on the tile's kind of grid: uniform, or with a table of levels.
class AnyCoder {
 public:
  AnyCoder(DType dtype, const TileLayout& tile, bool keys, int longest)
      : uniform_(dtype, tile.least_squares, longest),
        table_(tile.table.empty() ? std::optional<TableCoder>()
                                  : std::optional<TableCoder>(std::in_place, tile, keys)) {}

  Endpoints code(const float* x, int n, int levels, std::uint8_t* codes, Endpoints given = {}) {
    if (table_) return table_->code(x, n, codes, given);
    const int shift = std::countr_zero(static_cast<unsigned>(levels));
    const Endpoints endpoints = uniform_.code(x, n, own_levels(levels), codes);
    for (int i = 0; shift > 0 && i < n; ++i) codes[i] = static_cast<std::uint8_t>(codes[i] << shift);
    return endpoints;
  }
  // Uniform grids: the row's range, and codes on a range given.
  Endpoints range(const float* x, int n) const { return uniform_.range(x, n); }
  void code_on(const float* x, int n, int levels, Endpoints grid, std::uint8_t* codes) const {
    uniform_.code_on(x, n, levels, grid, codes);
  }
  // Of the last row, with a table.
  const std::vector<TableCoder::Outlier>& outliers() const { return table_->outliers(); }

 private:
  RowCoder uniform_;
  std::optional<TableCoder> table_;
};

// Codes of all channels on grids that are there, each with the errors of those before it fed back.
void code_with_feedback(const TileView& view, const KeyRows& rows, const float* moment,
                        const std::vector<std::uint16_t>& order, const std::vector<int>& levels,
                        const std::vector<Endpoints>& endpoints, Codes& codes) {
  const int n = rows.count();
  const auto depth = static_cast<std::size_t>(view.tile->depth);
  std::vector<float> step(depth);  // by channel
  std::vector<int> place(depth);
  for (std::size_t i = 0; i < depth; ++i) {
    step[order[i]] = tiles::grid_step(endpoints[i].min, endpoints[i].max, own_levels(levels[i]));
    place[order[i]] = static_cast<int>(i);
  }
  const ErrorFeedback feedback(moment, step);
  std::vector<float> errors(depth * static_cast<std::size_t>(n)), target(static_cast<std::size_t>(n)), back(target);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(n));
  for (int i = 0; i < view.tile->depth; ++i) {
    const int channel = feedback.channel(i);
    const int at = place[static_cast<std::size_t>(channel)];
    const Endpoints grid = endpoints[static_cast<std::size_t>(at)];
    const int most = levels[static_cast<std::size_t>(at)];
    const float width = step[static_cast<std::size_t>(channel)];
    const float* x = rows.channel(channel);
    std::copy_n(x, n, target.data());
    feedback.correct(i, errors.data(), n, n, grid, target.data());
    kernels().quantize(target.data(), n, grid.min, width, own_levels(most), dense.data());
    kernels().dequantize(dense.data(), n, grid.min, width, back.data());
    float* error = errors.data() + std::ptrdiff_t{i} * n;
    for (int t = 0; t < n; ++t) error[t] = x[t] - back[static_cast<std::size_t>(t)];
    const int shift = std::countr_zero(static_cast<unsigned>(most));
    for (int t = 0; t < n; ++t) {
      codes.row(at)[rows.kept[static_cast<std::size_t>(t)]] =
          static_cast<std::uint8_t>(dense[static_cast<std::size_t>(t)] << shift);
    }
  }
}

void code_keys(DType dtype, const TileView& view, const KeyRows& rows, const float* moment, std::byte* head_block) {
  const TileLayout& tile = *view.tile;
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<std::uint16_t> order(depth);
  std::vector<int> levels(depth);
  view.order(order.data());
  view.levels(levels.data());
  AnyCoder coder(dtype, tile, true, tile.rows);
  std::vector<Endpoints> endpoints(depth);  // 0, as all codes, for a class that has skipped tokens only
  Codes codes(tile);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(tile.rows));
  const bool whole = rows.count() == tile.rows;
  for (int i = 0; i < tile.depth && rows.count() > 0; ++i) {
    const auto at = static_cast<std::size_t>(i);
    endpoints[at] = coder.code(rows.channel(order[at]), rows.count(), levels[at], whole ? codes.row(i) : dense.data(),
                               given_range(dtype, tile, view.head, order[at]));
    if (tile.outliers.per_end > 0) {
      std::vector<TableCoder::Outlier> outliers = coder.outliers();
      for (TableCoder::Outlier& outlier : outliers) outlier.index = rows.kept[static_cast<std::size_t>(outlier.index)];
      store_key_outliers(tile, dtype, i, endpoints[at].max, outliers, head_block);
    }
    for (std::size_t k = 0; !whole && k < rows.kept.size(); ++k) codes.row(i)[rows.kept[k]] = dense[k];
  }
  if (tile.feedback && moment != nullptr && rows.count() > 0) {
    code_with_feedback(view, rows, moment, order, levels, endpoints, codes);
  }
  store_endpoints(dtype, head_block, tile, endpoints);
  pack_planes(view, codes, head_block);
}

// The place of each token in a page of a head.
std::vector<int> places(const PageLayout& layout, const std::byte* block, int head) {
  std::vector<int> result(static_cast<std::size_t>(layout.value.depth));
  std::iota(result.begin(), result.end(), 0);
  const std::uint8_t* tokens = token_order(layout, block, head);
  for (int i = 0; tokens != nullptr && i < layout.value.depth; ++i) result[tokens[i]] = i;
  return result;
}

// ZipCache's channel-separable values: the root of the largest magnitude of each channel over the page, as stored.
std::vector<float> store_factors(DType dtype, const TileLayout& tile, const RowsLayout& rows, const std::byte* open,
                                 int head, const CellSet& skip, std::byte* head_block) {
  const auto channels = static_cast<std::size_t>(tile.rows);
  std::vector<float> factors(channels), row(channels);
  for (int t = 0; t < tile.depth; ++t) {
    if (skip[static_cast<std::size_t>(t)]) continue;
    kernels().widen(open + rows.value_at(head, 0, t), dtype, row.data(), tile.rows);
    for (std::size_t c = 0; c < channels; ++c) factors[c] = std::max(factors[c], std::fabs(row[c]));
  }
  for (float& factor : factors) factor = std::sqrt(factor);
  std::byte* stored = head_block + tile.factor_offset;
  kernels().narrow(factors.data(), stored, dtype, tile.rows);
  kernels().widen(stored, dtype, factors.data(), tile.rows);
  return factors;
}

// A channel of zeros has factor 0 and stays zeros.
void divide(float* row, const std::vector<float>& factors) {
  for (std::size_t c = 0; c < factors.size(); ++c) row[c] = factors[c] > 0 ? row[c] / factors[c] : 0.0F;
}

}  // namespace

void encode_keys(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                 int head, const CellSet& skip, const QuerySums& queries, KeyTurns turns, std::byte* block) {
  std::byte* head_block = block + static_cast<std::size_t>(head) * layout.head_bytes;
  const RowsLayout rows(shape, recipe.page);
  const std::uint8_t* tokens = token_order(layout, block, head);
  int first = 0;
  for (const TileLayout* tile : {&layout.key, &layout.key_rest}) {
    if (tile->rows == 0) continue;
    KeyRows keys = load_keys(shape, rows, open, head, skip, tokens, first, tile->rows);
    if (turns.rotation != nullptr) {
      std::vector<std::int32_t> positions;
      for (const int row : keys.kept) positions.push_back(turns.positions[tokens ? tokens[first + row] : first + row]);
      turn_back(shape.dtype, turns, positions, shape.key_dim, keys);
    }
    if (tile->order_entry > 0) choose_order(recipe.key, *tile, keys, queries.squares, head_block);
    code_keys(shape.dtype, TileView(layout, *tile, block, head), keys, queries.moment, head_block);
    first += tile->rows;
  }
}

void encode_values(const Recipe& recipe, const CacheShape& shape, const PageLayout& layout, const std::byte* open,
                   int first_head, int heads, const CellSet& skip, std::byte* block) {
  const TileLayout& tile = layout.value;
  const RowsLayout rows(shape, recipe.page);
  const TileView view(layout, tile, block, first_head);
  std::byte* const head_block = block + static_cast<std::size_t>(first_head) * layout.head_bytes;
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<int> levels(depth);
  view.levels(levels.data());
  const bool alike = std::equal(levels.begin() + 1, levels.end(), levels.begin());
  const int width = heads * tile.rows;  // values under one grid
  AnyCoder coder(shape.dtype, tile, false, width);
  ValueOutliers outliers(tile, heads);
  std::vector<Endpoints> endpoints(depth);  // 0 for skipped cells, as their codes: never read, always the same bytes
  struct Head {
    Codes codes;
    std::vector<int> places;
    std::vector<float> factors;
  };
  std::vector<Head> parts;
  for (int h = 0; h < heads; ++h) {
    parts.push_back({Codes(tile), places(layout, block, first_head + h), {}});
    if (!tile.channel_factors) continue;
    parts.back().factors = store_factors(shape.dtype, tile, rows, open, first_head + h, skip,
                                         head_block + static_cast<std::size_t>(h) * layout.head_bytes);
  }
  std::vector<float> row(static_cast<std::size_t>(width));
  std::vector<std::uint8_t> dense(row.size());
  std::vector<int> at_places(static_cast<std::size_t>(heads));
  for (int t = 0; t < tile.depth; ++t) {
    const auto token = static_cast<std::size_t>(t);
    if (skip[token]) continue;
    for (int h = 0; h < heads; ++h) {
      float* part = row.data() + static_cast<std::ptrdiff_t>(h) * tile.rows;
      kernels().widen(open + rows.value_at(first_head + h, 0, t), shape.dtype, part, tile.rows);
      if (tile.channel_factors) divide(part, parts[static_cast<std::size_t>(h)].factors);
      if (tile.rotation > 1) rotate_values(part, tile);
    }
    // Grids that heads share lie by token: what is salient differs between heads.
    Endpoints& grid = endpoints[tile.shared_grid ? token : static_cast<std::size_t>(parts.front().places[token])];
    grid = alike ? coder.code(row.data(), width, levels[0], dense.data()) : coder.range(row.data(), width);
    if (tile.outliers.per_end > 0) {
      for (int h = 0; h < heads; ++h)
        at_places[static_cast<std::size_t>(h)] = parts[static_cast<std::size_t>(h)].places[token];
      outliers.add(at_places, coder.outliers());
    }
    for (int h = 0; h < heads; ++h) {
      Head& head = parts[static_cast<std::size_t>(h)];
      const int place = head.places[token];
      const auto first = static_cast<std::ptrdiff_t>(h) * tile.rows;
      if (alike) {
        std::memcpy(head.codes.row(place), dense.data() + first, static_cast<std::size_t>(tile.rows));
      } else {
        coder.code_on(row.data() + first, tile.rows, levels[static_cast<std::size_t>(place)], grid,
                      head.codes.row(place));
      }
    }
  }
  store_endpoints(shape.dtype, tile.shared_grid ? block : head_block, tile, endpoints);
  if (tile.outliers.per_end > 0) outliers.store(shape.dtype, block);
  for (int h = 0; h < heads; ++h) {
    pack_planes(view, parts[static_cast<std::size_t>(h)].codes,
                head_block + static_cast<std::size_t>(h) * layout.head_bytes);
  }
}

}  // namespace kvant::cache
