// A plain list of what a store must hold, and the check that sealing stays within half a step of its grid, or with
// feedback within the grid.
#pragma once

#include <bit>
#include <random>
#include <vector>

#include "cache/store.hpp"
#include "support/data.hpp"

namespace kvant::testing {

// All cells of a store as it reads, [cells][heads][dim].
struct Snapshot {
  std::vector<float> keys, values;

  explicit Snapshot(const PageStore& store)
      : keys(read_all(store, Side::key, store.cells())), values(read_all(store, Side::value, store.cells())) {}
  Snapshot() = default;
  bool operator==(const Snapshot&) const = default;
};

namespace detail {

inline double half_step(double min, double max, int width, DType dtype) {
  const double largest = std::max(std::fabs(min), std::fabs(max));
  // What float arithmetic adds to min + code * step; rows themselves are elements of the cache's type already.
  return (max - min) / ((1 << width) - 1) / 2 * 1.0001 + largest * 1e-6 + (dtype == DType::f32 ? 0 : 1e-9);
}

}  // namespace detail

// Bits per channel of a sealed page's keys, in one of its key tiles.
inline std::vector<int> key_widths(const PageStore& store, std::int64_t page, int head, const TileLayout& tile) {
  const cache::TileView view(store.layout(), tile, store.sealed_block(page).data(), head);
  const auto depth = static_cast<std::size_t>(tile.depth);
  std::vector<std::uint16_t> order(depth);
  std::vector<int> levels(depth), widths(depth);
  view.order(order.data());
  view.levels(levels.data());
  for (std::size_t i = 0; i < depth; ++i) widths[order[i]] = std::popcount(static_cast<unsigned>(levels[i]));
  return widths;
}

inline std::vector<int> key_widths(const PageStore& store, std::int64_t page, int head) {
  return key_widths(store, page, head, store.layout().key);
}

// Which tokens of a sealed page are salient for a head; all false where a page has no classes.
inline std::vector<bool> salient_tokens(const PageStore& store, std::int64_t page, int head) {
  std::vector<bool> salient(static_cast<std::size_t>(store.recipe().page));
  const std::uint8_t* tokens = cache::token_order(store.layout(), store.sealed_block(page).data(), head);
  for (int i = 0; i < store.layout().salient; ++i) salient[tokens[i]] = true;
  return salient;
}

inline int value_bits(const Recipe& recipe, bool salient) {
  if (const auto* kivi = std::get_if<KiviValues>(&recipe.value)) return kivi->bits;
  if (const auto* zipcache = std::get_if<ZipcacheValues>(&recipe.value))
    return salient ? zipcache->high : zipcache->low;
  if (const auto* kvquant = std::get_if<KvquantValues>(&recipe.value)) return kvquant->bits;
  return std::get<WaterfillValues>(recipe.value).bits;
}

// A vector coded with a table of levels: what lies beyond the range of all but the per_end smallest and largest comes
// back as it was, the rest within half of the widest gap between levels (and half a step of the table's grid).
inline void expect_close_to_levels(const std::vector<double>& from, const std::vector<double>& to,
                                   const TileLayout& tile) {
  std::vector<double> sorted = from;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t outside =
      std::min<std::size_t>(static_cast<std::size_t>(tile.outliers.per_end), (from.size() - 1) / 2);
  const double min = sorted[outside];
  const double max = sorted[from.size() - 1 - outside];
  int gap = 0, bits = 0;
  for (const PlaneLayout& plane : tile.planes) bits += plane.bits;
  for (int c = 1; c < 1 << bits; ++c) {
    gap = std::max(gap, tile.table[static_cast<std::size_t>(c)] - tile.table[static_cast<std::size_t>(c) - 1]);
  }
  const double limit = (max - min) * (gap + 1) / 2 / 254 + std::max(std::fabs(min), std::fabs(max)) * 1e-6;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] < min || from[i] > max) {
      ASSERT_EQ(from[i], to[i]) << i;
    } else {
      ASSERT_LE(std::fabs(from[i] - to[i]), limit) << i;
    }
  }
}

// Rows as a value tile stores them: multiplied by the Hadamard matrix H[i][j] = (-1)^|i & j| and divided by its size.
inline std::vector<double> rotated(const std::vector<double>& row, int block) {
  std::vector<double> result(row.size());
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t first = i / static_cast<std::size_t>(block) * static_cast<std::size_t>(block);
    for (std::size_t j = first; j < first + static_cast<std::size_t>(block); ++j) {
      result[i] += std::popcount((i - first) & (j - first)) % 2 == 0 ? row[j] : -row[j];
    }
    result[i] /= block;
  }
  return result;
}

// Compares a page that was just sealed with its rows before. Exact cells are unchanged; on range grids every value
// stays within half a step, fitted grids have no more squared error than that.
class SealCheck {
 public:
  SealCheck(const PageStore& store, std::int64_t page, const Snapshot& before, const Snapshot& after)
      : store_(store), shape_(store.shape()), page_(page), before_(before), after_(after) {}

  void run() {
    const PageLayout& layout = store_.layout();
    for (int head = 0; head < shape_.kv_heads; ++head) {
      salient_.push_back(salient_tokens(store_, page_, head));
      factors_.push_back(expected_factors(head));
      const std::vector<int> widths = key_widths(store_, page_, head);
      const bool classes = layout.key_rest.rows > 0;
      const std::vector<int> others = classes ? key_widths(store_, page_, head, layout.key_rest) : widths;
      for (int d = 0; d < shape_.key_dim; ++d) {
        const auto channel = static_cast<std::size_t>(d);
        check_channel(head, d, widths[channel], [&](std::size_t t) { return !classes || salient_.back()[t]; });
        check_channel(head, d, others[channel], [&](std::size_t t) { return classes && !salient_.back()[t]; });
      }
    }
    const bool shared = store_.layout().value.shared_grid;
    for (int t = 0; t < store_.impl().valid_cells(page_); ++t) {
      for (int head = 0; head < shape_.kv_heads; head += shared ? shape_.kv_heads : 1) {
        check_token(t, head, shared ? shape_.kv_heads : 1);
      }
    }
  }

 private:
  bool is_exact(int t) const {
    return store_.impl().pages[static_cast<std::size_t>(page_)].exact[static_cast<std::size_t>(t)];
  }
  std::size_t at(int t, int head, int dim) const {
    return static_cast<std::size_t>(((page_ * store_.recipe().page + t) * shape_.kv_heads + head) * dim);
  }

  void compare(const std::vector<double>& from, const std::vector<double>& to, double limit, bool fitted) const {
    double sum = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      const double error = std::fabs(from[i] - to[i]);
      if (!fitted) {
        ASSERT_LE(error, limit) << i << " of page " << page_;
      }
      sum += error * error;
    }
    ASSERT_LE(sum, limit * limit * static_cast<double>(from.size())) << "page " << page_;
  }

  // ZipCache's: the root of the largest magnitude of the tokens that are coded, rounded as stored.
  std::vector<double> expected_factors(int head) const {
    std::vector<double> factors(static_cast<std::size_t>(shape_.value_dim), 1.0);
    if (!store_.layout().value.channel_factors) return factors;
    for (std::size_t d = 0; d < factors.size(); ++d) {
      float largest = 0;
      for (int t = 0; t < store_.impl().valid_cells(page_); ++t) {
        if (!is_exact(t)) largest = std::max(largest, std::fabs(before_.values[at(t, head, shape_.value_dim) + d]));
      }
      factors[d] = largest > 0 ? rounded_to(shape_.dtype, std::sqrt(largest)) : 1.0;
    }
    return factors;
  }

  template <typename Belongs>
  void check_channel(int head, int d, int width, const Belongs& belongs) const {
    std::vector<double> from, to;
    for (int t = 0; t < store_.impl().valid_cells(page_); ++t) {
      const std::size_t i = at(t, head, shape_.key_dim) + static_cast<std::size_t>(d);
      if (!belongs(static_cast<std::size_t>(t))) continue;
      if (is_exact(t)) {
        ASSERT_EQ(before_.keys[i], after_.keys[i]);
      } else {
        from.push_back(before_.keys[i]);
        to.push_back(after_.keys[i]);
      }
    }
    if (from.empty()) return;
    if (!store_.layout().key.table.empty()) return expect_close_to_levels(from, to, store_.layout().key);
    const auto [min, max] = std::minmax_element(from.begin(), from.end());
    // An error that is fed back may move a value to any code; nothing leaves the range that the grid was made from.
    const bool free = store_.layout().key.feedback;
    const double limit = detail::half_step(*min, *max, free ? 1 : width, shape_.dtype) * (free ? 2 : 1);
    compare(from, to, limit, store_.layout().key.least_squares);
  }

  void check_token(int t, int first_head, int heads) const {
    std::vector<double> from, to;
    for (int h = first_head; h < first_head + heads; ++h) {
      const std::size_t i = at(t, h, shape_.value_dim);
      from.insert(from.end(), before_.values.begin() + static_cast<std::ptrdiff_t>(i),
                  before_.values.begin() + static_cast<std::ptrdiff_t>(i) + shape_.value_dim);
      to.insert(to.end(), after_.values.begin() + static_cast<std::ptrdiff_t>(i),
                after_.values.begin() + static_cast<std::ptrdiff_t>(i) + shape_.value_dim);
    }
    if (is_exact(t)) {
      ASSERT_EQ(from, to);
      return;
    }
    const TileLayout& tile = store_.layout().value;
    if (!tile.table.empty()) return expect_close_to_levels(from, to, tile);
    from = rotated(from, tile.rotation);
    to = rotated(to, tile.rotation);
    const auto channels = static_cast<std::size_t>(shape_.value_dim);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const double factor = factors_[static_cast<std::size_t>(first_head) + i / channels][i % channels];
      from[i] /= factor;
      to[i] /= factor;
    }
    const double min = *std::min_element(from.begin(), from.end());
    const double max = *std::max_element(from.begin(), from.end());
    // Rotated or divided endpoints are no values of the cache's type.
    const double precision = shape_.dtype == DType::bf16 ? 1.0 / 256 : (shape_.dtype == DType::f16 ? 1.0 / 2048 : 1e-6);
    const bool rounded = tile.rotation > 1 || tile.channel_factors;
    const double rounding = rounded ? precision * std::max(std::fabs(min), std::fabs(max)) + 1e-7 : 0;
    const auto limit = [&](std::size_t head) {
      const int bits = value_bits(store_.recipe(), salient_[head][static_cast<std::size_t>(t)]);
      return detail::half_step(min, max, bits, shape_.dtype) + rounding;
    };
    if (!tile.channel_factors)
      return compare(from, to, limit(static_cast<std::size_t>(first_head)), tile.least_squares);
    for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
      const auto part = [&](const std::vector<double>& all) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(h * channels);
        return std::vector<double>(begin, begin + shape_.value_dim);
      };
      compare(part(from), part(to), limit(static_cast<std::size_t>(first_head) + h), false);
    }
  }

  const PageStore& store_;
  CacheShape shape_;
  std::int64_t page_;
  const Snapshot& before_;
  const Snapshot& after_;
  std::vector<std::vector<bool>> salient_;    // [head][token]
  std::vector<std::vector<double>> factors_;  // [head][channel], 1 where a recipe has none
};

inline void expect_close(const PageStore& store, std::int64_t page, const Snapshot& before, const Snapshot& after) {
  SealCheck(store, page, before, after).run();
}

// Cells of a PageStore as a plain list, with the rules of sealing and reopening.
class StoreModel {
 public:
  struct Cell {
    std::vector<float> rows[2];  // by Side; empty: unwritten
    bool exact = false;
  };
  struct PageState {
    bool sealed = false;
    std::int64_t last_write = 0;
  };

  StoreModel(const Recipe& recipe, const CacheShape& shape, std::int64_t cells)
      : recipe_(recipe), shape_(shape), cells_(static_cast<std::size_t>(cells)) {
    pages_.resize(static_cast<std::size_t>((cells + recipe.page - 1) / recipe.page));
  }

  bool is_sealed(std::int64_t page) const { return pages_[static_cast<std::size_t>(page)].sealed; }
  // The first `count` cells, zeros where unwritten.
  std::vector<float> read(Side side, std::int64_t count) const {
    std::vector<float> all;
    for (std::int64_t cell = 0; cell < count; ++cell) {
      const auto& row = cells_[static_cast<std::size_t>(cell)].rows[static_cast<int>(side)];
      all.insert(all.end(), row.begin(), row.end());
      if (row.empty()) all.resize(all.size() + static_cast<std::size_t>(shape_.kv_heads * dim(side)));
    }
    return all;
  }

  std::int64_t size() const { return static_cast<std::int64_t>(cells_.size()); }
  int dim(Side side) const { return side == Side::key ? shape_.key_dim : shape_.value_dim; }

  void write(Side side, std::int64_t cell, const float* row, std::int64_t position) {
    reopen(cell / recipe_.page);
    Cell& c = cells_[static_cast<std::size_t>(cell)];
    auto& stored = c.rows[static_cast<int>(side)];
    stored.assign(row, row + shape_.kv_heads * dim(side));
    for (float& x : stored) x = rounded_to(shape_.dtype, x);
    c.exact = position < recipe_.sink;
    if (side == Side::key) page_of(cell).last_write = ++clock_;
  }

  void forget(std::int64_t first, std::int64_t count) {
    for (std::int64_t page = first / recipe_.page; count > 0 && page * recipe_.page < first + count; ++page) {
      if (page * recipe_.page < first || page_end(page) > first + count) reopen(page);
    }
    for (std::int64_t cell = first; cell < first + count; ++cell) cells_[static_cast<std::size_t>(cell)] = Cell();
    for (std::int64_t page = first / recipe_.page; count > 0 && page * recipe_.page < first + count; ++page) {
      if (is_empty(page)) pages_[static_cast<std::size_t>(page)] = PageState();
    }
  }

  void copy(const StoreModel& from, std::int64_t from_first, std::int64_t first, std::int64_t count) {
    const StoreModel source = from;  // the ranges may overlap
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t a = from_first + done;
      const std::int64_t b = first + done;
      const std::int64_t step =
          std::min({count - done, recipe_.page - a % recipe_.page, recipe_.page - b % recipe_.page});
      const bool whole = a % recipe_.page == 0 && b % recipe_.page == 0 &&
                         a + step == source.page_end(a / recipe_.page) && b + step == page_end(b / recipe_.page);
      const bool shared = whole && source.pages_[static_cast<std::size_t>(a / recipe_.page)].sealed;
      forget(b, step);
      for (const Side side : {Side::key, Side::value}) {
        for (std::int64_t i = 0; i < step; ++i) {
          const Cell& cell = source.cells_[static_cast<std::size_t>(a + i)];
          const auto& row = cell.rows[static_cast<int>(side)];
          if (shared) {
            cells_[static_cast<std::size_t>(b + i)] = cell;
          } else if (!row.empty()) {
            write(side, b + i, row.data(), cell.exact ? 0 : recipe_.sink);
          }
        }
      }
      if (shared) page_of(b).sealed = true;
      done += step;
    }
  }

  // Pages that seal_ready must seal now.
  std::vector<std::int64_t> ready() const {
    std::vector<std::int64_t> pages;
    for (std::int64_t page = 0; page < static_cast<std::int64_t>(pages_.size()); ++page) {
      const PageState& state = pages_[static_cast<std::size_t>(page)];
      if (state.sealed || clock_ - state.last_write < recipe_.window || !recipe_.quantizes()) continue;
      bool full = true;
      bool all_exact = true;
      for (std::int64_t cell = page * recipe_.page; cell < page_end(page); ++cell) {
        const Cell& c = cells_[static_cast<std::size_t>(cell)];
        full &= !c.rows[0].empty() && !c.rows[1].empty();
        all_exact &= c.exact;
      }
      if (full && !all_exact) pages.push_back(page);
    }
    return pages;
  }

  // Takes over what the store reads after it sealed `page`.
  void seal(std::int64_t page, const Snapshot& after) {
    pages_[static_cast<std::size_t>(page)].sealed = true;
    for (std::int64_t cell = page * recipe_.page; cell < page_end(page); ++cell) {
      for (const Side side : {Side::key, Side::value}) {
        auto& row = cells_[static_cast<std::size_t>(cell)].rows[static_cast<int>(side)];
        const auto& all = side == Side::key ? after.keys : after.values;
        std::copy_n(all.begin() + cell * static_cast<std::int64_t>(row.size()), row.size(), row.begin());
      }
    }
  }

  void expect_equal(const PageStore& store) const {
    Snapshot expected;
    expected.keys = read(Side::key, size());
    expected.values = read(Side::value, size());
    ASSERT_TRUE(Snapshot(store) == expected);
    StoreCounts counts = store.counts();
    for (std::int64_t page = 0; page < static_cast<std::int64_t>(pages_.size()); ++page) {
      const bool sealed = pages_[static_cast<std::size_t>(page)].sealed;
      ASSERT_EQ(store.is_sealed(page), sealed) << page;
      counts.sealed_pages -= sealed ? 1 : 0;
    }
    ASSERT_EQ(counts.sealed_pages, 0);
    const StoreBytes bytes = store.bytes();
    ASSERT_EQ(bytes.sealed, static_cast<std::size_t>(store.counts().sealed_pages) * store.layout().page_bytes);
    ASSERT_EQ(bytes.open, static_cast<std::size_t>(counts.open_pages) * store.layout().open_bytes);
    for (std::int64_t cell = 0; cell < size(); ++cell) {
      const Cell& c = cells_[static_cast<std::size_t>(cell)];
      ASSERT_EQ(store.is_written(cell), !c.rows[0].empty() && !c.rows[1].empty()) << cell;
      const auto& page = store.impl().pages[static_cast<std::size_t>(cell / recipe_.page)];
      ASSERT_EQ(page.exact[static_cast<std::size_t>(cell % recipe_.page)], c.exact) << cell;
    }
  }

 private:
  PageState& page_of(std::int64_t cell) { return pages_[static_cast<std::size_t>(cell / recipe_.page)]; }
  std::int64_t page_end(std::int64_t page) const { return std::min<std::int64_t>(size(), (page + 1) * recipe_.page); }
  bool is_empty(std::int64_t page) const {
    for (std::int64_t cell = page * recipe_.page; cell < page_end(page); ++cell) {
      const Cell& c = cells_[static_cast<std::size_t>(cell)];
      if (!c.rows[0].empty() || !c.rows[1].empty()) return false;
    }
    return true;
  }
  // Decoded rows go back into the cache's type.
  void reopen(std::int64_t page) {
    PageState& state = pages_[static_cast<std::size_t>(page)];
    if (!state.sealed) return;
    state.sealed = false;
    for (std::int64_t cell = page * recipe_.page; cell < page_end(page); ++cell) {
      for (auto& row : cells_[static_cast<std::size_t>(cell)].rows) {
        for (float& x : row) x = rounded_to(shape_.dtype, x);
      }
    }
  }

  Recipe recipe_;
  CacheShape shape_;
  std::vector<Cell> cells_;
  std::vector<PageState> pages_;
  std::int64_t clock_ = 0;
};

}  // namespace kvant::testing
