#include "cache/outliers.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "base/half.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {
namespace {

// Codes that the tile's planes hold.
int level_count(const TileLayout& tile) {
  int bits = 0;
  for (const PlaneLayout& plane : tile.planes) bits += plane.bits;
  return 1 << bits;
}

void store_row(const TileLayout& tile, std::byte* base, int slot, int row) {
  const auto small = static_cast<std::uint16_t>(row);  // little-endian
  const auto entry = static_cast<std::size_t>(tile.outliers.row_entry);
  std::memcpy(base + tile.outliers.row_offset + static_cast<std::size_t>(slot) * entry, &small, entry);
}

// Keeps the first values in the order of `before`: one comparison for nearly every value.
template <typename Before>
void keep_first(std::vector<float>& kept, float value, const Before& before) {
  if (!before(value, kept.back())) return;
  std::size_t i = kept.size() - 1;
  for (; i > 0 && before(value, kept[i - 1]); --i) kept[i] = kept[i - 1];
  kept[i] = value;
}

}  // namespace

int middle_code(const TileLayout& tile) {
  return level_count(tile) / 2;
}

std::array<std::uint8_t, kTableSteps + 1> nearest_codes(const TileLayout& tile) {
  const int levels = level_count(tile);
  const std::vector<std::uint8_t>& table = tile.coding_table.empty() ? tile.table : tile.coding_table;
  std::array<std::uint8_t, kTableSteps + 1> nearest{};
  int code = 0;
  for (int step = 0; step <= kTableSteps; ++step) {
    const auto distance = [&](int c) { return std::abs(step - table[static_cast<std::size_t>(c)]); };
    while (code + 1 < levels && distance(code + 1) <= distance(code)) ++code;
    nearest[static_cast<std::size_t>(step)] = static_cast<std::uint8_t>(code);
  }
  return nearest;
}

Endpoints given_range(DType dtype, const TileLayout& tile, int head, int channel) {
  if (tile.range_min.empty()) return {};
  const auto at = static_cast<std::size_t>(std::ptrdiff_t{head} * tile.depth + channel);
  const float limit = base::largest_stored(dtype);
  const auto stored = [&](float x) {
    std::array<std::byte, sizeof(float)> bytes{};
    base::store_float(bytes.data(), dtype, 0, std::clamp(x, -limit, limit));
    return base::load_float(bytes.data(), dtype, 0) + 0.0F;  // no minus zero
  };
  return {stored(tile.range_min[at]), stored(tile.range_max[at])};
}

TableCoder::TableCoder(const TileLayout& tile, bool ends)
    : per_end_(tile.outliers.per_end), middle_(ends ? -1 : middle_code(tile)), nearest_(nearest_codes(tile)) {}

Endpoints TableCoder::inner_range(const float* x, int n) {
  const int outside = std::min(per_end_, (n - 1) / 2);
  if (outside == 0) {
    Endpoints range;
    tiles::kernels().min_max(x, n, &range.min, &range.max);
    return {range.min + 0.0F, range.max + 0.0F};
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  largest_.assign(static_cast<std::size_t>(outside) + 1, -kInfinity);
  smallest_.assign(static_cast<std::size_t>(outside) + 1, kInfinity);
  for (int i = 0; i < n; ++i) {
    keep_first(largest_, x[i], std::greater<>());
    keep_first(smallest_, x[i], std::less<>());
  }
  return {smallest_.back() + 0.0F, largest_.back() + 0.0F};  // no minus zero: a decoded one would be plus zero
}

void TableCoder::keep_farthest(Endpoints range) {
  const auto most = static_cast<std::size_t>(2 * per_end_);
  if (outliers_.size() <= most) return;
  const auto distance = [&](const Outlier& o) { return std::max(range.min - o.value, o.value - range.max); };
  std::stable_sort(outliers_.begin(), outliers_.end(),
                   [&](const Outlier& a, const Outlier& b) { return distance(a) > distance(b); });
  outliers_.resize(most);
  std::sort(outliers_.begin(), outliers_.end(), [](const Outlier& a, const Outlier& b) { return a.index < b.index; });
}

Endpoints TableCoder::code(const float* x, int n, std::uint8_t* codes, Endpoints given) {
  const bool fixed = given.max > given.min;
  const Endpoints range = fixed ? given : inner_range(x, n);
  tiles::kernels().quantize(x, n, range.min, tiles::grid_step(range.min, range.max, kTableSteps), kTableSteps, codes);
  outliers_.clear();
  for (int i = 0; i < n; ++i) {
    codes[i] = nearest_[codes[i]];
    if (x[i] >= range.min && x[i] <= range.max) continue;
    outliers_.push_back({i, x[i]});
    if (middle_ >= 0) codes[i] = static_cast<std::uint8_t>(middle_);
  }
  if (fixed) keep_farthest(range);
  return range;
}

void store_key_outliers(const TileLayout& tile, DType dtype, int depth, float max,
                        const std::vector<TableCoder::Outlier>& outliers, std::byte* head_block) {
  const int per_vector = 2 * tile.outliers.per_end;
  std::byte* values = head_block + tile.outliers.value_offset;
  for (int i = 0; i < per_vector; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool used = at < outliers.size();
    const int slot = depth * per_vector + i;
    base::store_float(values, dtype, slot, used ? outliers[at].value : max);
    store_row(tile, head_block, slot, used ? outliers[at].index : 0);
  }
}

void ValueOutliers::add(const std::vector<int>& places, const std::vector<TableCoder::Outlier>& outliers) {
  for (const TableCoder::Outlier& outlier : outliers) {
    const auto head = static_cast<std::size_t>(outlier.index / tile_.rows);
    heads_[head].push_back({places[head], outlier.index % tile_.rows, outlier.value});
  }
}

void ValueOutliers::store(DType dtype, std::byte* block) {
  const OutlierLayout& list = tile_.outliers;
  std::uint32_t slot = 0;
  for (std::size_t head = 0; head <= heads_.size(); ++head) {
    std::memcpy(block + list.start_offset + head * sizeof slot, &slot, sizeof slot);
    if (head == heads_.size()) return;
    // Tokens came in cell order, their places may be in another.
    std::stable_sort(heads_[head].begin(), heads_[head].end(),
                     [](const Entry& a, const Entry& b) { return a.place < b.place; });
    for (const Entry& entry : heads_[head]) {
      base::store_float(block + list.value_offset, dtype, slot, entry.value);
      store_row(tile_, block, static_cast<int>(slot), entry.channel);
      block[list.depth_offset + slot] = static_cast<std::byte>(entry.place);
      ++slot;
    }
  }
}

void subtract_levels(const TileView& view, const OutlierList& list, const std::uint16_t* depths, const float* min,
                     const float* max, const float* step, float* values) {
  const auto level = [&](int code) { return static_cast<float>(view.tile->table[static_cast<std::size_t>(code)]); };
  if (list.depths != nullptr) {
    const float middle = level(middle_code(*view.tile));
    for (int i = 0; i < list.count; ++i) values[i] -= min[depths[i]] + middle * step[depths[i]];
    return;
  }
  // Factors instead of branches: which end an outlier is beyond is as good as random.
  const float low = level(0);
  const float span = level(level_count(*view.tile) - 1) - low;
  for (int i = 0; i < list.count; ++i) {
    const std::uint16_t d = depths[i];
    const auto above = static_cast<float>(values[i] > max[d]);
    const auto used = above + static_cast<float>(values[i] < min[d]);
    values[i] = used * (values[i] - (min[d] + (low + above * span) * step[d]));
  }
}

}  // namespace kvant::cache
