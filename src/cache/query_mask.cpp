// What a query block sees of a page: the host's mask, positions, ALiBi, written cells.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "cache/query_block.hpp"

namespace kvant::cache {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

bool QueryBlock::is_plain(std::int64_t first_cell, int cells) const {
  const AttentionOptions& options = *plan_.options;
  if (options.mask.data != nullptr || options.max_bias > 0) return false;
  if (first_cell + cells > plan_.n_cells) return false;
  if (options.first_position < 0) return true;
  const std::int64_t oldest = options.first_position + first_row_;  // the block's first row sees the fewest new cells
  const std::int64_t newest = oldest + rows_ - 1;
  return first_cell + cells - 1 <= oldest &&
         (options.sliding_window <= 0 || first_cell > newest - options.sliding_window);
}

bool QueryBlock::mask_row(std::int64_t row, int query_head, std::int64_t first_cell, int cells, float* out) const {
  const AttentionOptions& options = *plan_.options;
  const int inside = static_cast<int>(std::clamp<std::int64_t>(plan_.n_cells - first_cell, 0, cells));
  if (options.mask.data != nullptr) {
    const std::int64_t at = row * options.mask.row_stride + query_head * options.mask.head_stride + first_cell;
    const auto* data =
        static_cast<const std::byte*>(options.mask.data) + at * static_cast<std::int64_t>(size_of(options.mask.type));
    kernels_.widen(data, options.mask.type, out, inside);
  } else {
    std::fill_n(out, inside, 0.0F);
  }
  std::fill(out + inside, out + cells, kMinusInfinity);
  if (options.first_position >= 0) {
    const std::int64_t position = options.first_position + row;
    for (int i = 0; i < inside; ++i) {
      const std::int64_t distance = position - (first_cell + i);
      if (distance < 0 || (options.sliding_window > 0 && distance >= options.sliding_window)) {
        out[i] = kMinusInfinity;
      } else if (options.max_bias > 0 && options.mask.data == nullptr) {
        out[i] = static_cast<float>(-distance);
      }
    }
  }
  return std::any_of(out, out + cells, [](float x) { return x != kMinusInfinity; });
}

namespace {

// True when every byte group of `data` is the pattern: a mask row that hides nothing or everything, in one quick pass.
bool is_all(const std::byte* data, std::size_t bytes, std::uint64_t pattern) {
  std::uint64_t difference = 0;
  for (std::size_t i = 0; i < bytes; i += sizeof pattern) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i, sizeof word);
    difference |= word ^ pattern;
  }
  return difference == 0;
}

}  // namespace

// What a user mask alone does to a run of cells, where that shows without converting it.
QueryBlock::RowMask QueryBlock::classify(std::int64_t row, int query_head, std::int64_t first_cell, int cells) const {
  const AttentionOptions& options = *plan_.options;
  if (options.mask.data == nullptr || options.first_position >= 0 || first_cell + cells > plan_.n_cells) {
    return RowMask::mixed;
  }
  const std::size_t element = size_of(options.mask.type);
  const std::int64_t at = row * options.mask.row_stride + query_head * options.mask.head_stride + first_cell;
  const auto* data = static_cast<const std::byte*>(options.mask.data) + at * static_cast<std::int64_t>(element);
  const std::size_t bytes = element * static_cast<std::size_t>(cells);
  if (is_all(data, bytes, 0)) return RowMask::plain;
  const std::uint64_t hidden = options.mask.type == DType::f32   ? 0xFF800000FF800000U
                               : options.mask.type == DType::f16 ? 0xFC00FC00FC00FC00U
                                                                 : 0xFF80FF80FF80FF80U;
  return is_all(data, bytes, hidden) ? RowMask::hidden : RowMask::mixed;
}

// Fills mask_rows_ (null where nothing is added); false if no vector sees the page.
bool QueryBlock::load_mask(std::int64_t number, int cells) {
  const Page& page = store_.pages[static_cast<std::size_t>(number)];
  const std::int64_t first_cell = number * store_.tokens();
  const CellSet written = page.written();
  // Unlike count(), no call without an instruction for it.
  const bool whole =
      (written | ~CellSet() << static_cast<std::size_t>(cells)).all() && cells <= store_.valid_cells(number);
  std::fill_n(mask_rows_, vectors_, nullptr);
  if (whole && is_plain(first_cell, cells)) return true;
  const bool per_head = plan_.options->mask.data != nullptr && plan_.options->mask.head_stride != 0;
  bool any = false;
  for (int n = 0; n < vectors_; ++n) {
    float* row = mask_ + n * score_stride_;
    if (!per_head && n % plan_.group != 0) {
      mask_rows_[n] = mask_rows_[n - 1];
      continue;
    }
    const RowMask kind =
        classify(first_row_ + n / plan_.group, head_ * plan_.group + n % plan_.group, first_cell, cells);
    if (kind == RowMask::plain && whole) {
      any = true;
      continue;  // mask_rows_[n] is null
    }
    if (kind == RowMask::hidden) {
      std::fill_n(row, cells, kMinusInfinity);
      mask_rows_[n] = row;
      continue;
    }
    bool visible =
        mask_row(first_row_ + n / plan_.group, head_ * plan_.group + n % plan_.group, first_cell, cells, row);
    if (visible && !whole) {
      for (int i = 0; i < cells; ++i) {
        if (!written[static_cast<std::size_t>(i)]) row[i] = kMinusInfinity;
      }
      visible = std::any_of(row, row + cells, [](float x) { return x != kMinusInfinity; });
    }
    any |= visible;
    const bool adds = std::any_of(row, row + cells, [](float x) { return x != 0; });
    mask_rows_[n] = adds ? row : nullptr;
  }
  return any;
}

void QueryBlock::order_masks(const std::uint8_t* tokens) {
  std::array<float, kMaxPage> line;
  for (int n = 0; n < vectors_; ++n) {
    float* row = mask_ + n * score_stride_;
    if (mask_rows_[n] != row) continue;  // none, or that of another vector
    std::copy_n(row, store_.tokens(), line.data());
    for (int i = 0; i < store_.tokens(); ++i) row[i] = line[tokens[i]];
  }
}

bool QueryBlock::load_clocks(const Page& page, int cells, const std::int64_t* clocks) {
  const CellSet written = page.written();
  bool any = false;
  for (int n = 0; n < vectors_; ++n) {
    if (n % plan_.group != 0) {
      mask_rows_[n] = mask_rows_[n - 1];
      continue;
    }
    float* row = mask_ + n * score_stride_;
    bool adds = false;
    for (int i = 0; i < cells; ++i) {
      const auto cell = static_cast<std::size_t>(i);
      const bool seen = written[cell] && (!page.open || page.clocks[cell] <= clocks[n / plan_.group]);
      row[i] = seen ? 0.0F : kMinusInfinity;
      adds |= !seen;
      any |= seen;
    }
    mask_rows_[n] = adds ? row : nullptr;
  }
  return any;
}

}  // namespace kvant::cache
