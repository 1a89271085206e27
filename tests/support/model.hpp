// A plain list of what a store must hold, and the check that sealing stays within half a step of its grid.
#pragma once

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

// Compares a page that was just sealed with its rows before: exact cells unchanged, the others within half a step.
inline void expect_half_step(const PageStore& store, std::int64_t page, const Snapshot& before, const Snapshot& after) {
  const PageStore::Impl& impl = store.impl();
  const CacheShape& shape = store.shape();
  const auto& exact = impl.pages[static_cast<std::size_t>(page)].exact;
  const std::int64_t first = page * impl.tokens();
  const int count = impl.valid_cells(page);
  const auto key_at = [&](int t, int h, int d) {
    return static_cast<std::size_t>(((first + t) * shape.kv_heads + h) * shape.key_dim + d);
  };
  for (int h = 0; h < shape.kv_heads; ++h) {
    const std::byte* block = store.sealed_block(page).data() + static_cast<std::size_t>(h) * store.layout().head_bytes;
    std::vector<int> widths;
    cache::tile_widths(store.layout().key, cache::tile_index(store.layout().key, block), widths);
    for (int d = 0; d < shape.key_dim; ++d) {
      double min = 1e300, max = -1e300;
      for (int t = 0; t < count; ++t) {
        if (exact[static_cast<std::size_t>(t)]) continue;
        min = std::min<double>(min, before.keys[key_at(t, h, d)]);
        max = std::max<double>(max, before.keys[key_at(t, h, d)]);
      }
      for (int t = 0; t < count; ++t) {
        const double error = std::fabs(static_cast<double>(before.keys[key_at(t, h, d)]) - after.keys[key_at(t, h, d)]);
        const double limit = exact[static_cast<std::size_t>(t)]
                                 ? 0
                                 : detail::half_step(min, max, widths[static_cast<std::size_t>(d)], shape.dtype);
        ASSERT_LE(error, limit) << "key " << t << " of page " << page << ", channel " << d;
      }
    }
    for (int t = 0; t < count; ++t) {
      const auto at = static_cast<std::ptrdiff_t>(((first + t) * shape.kv_heads + h) * shape.value_dim);
      const auto row = before.values.begin() + at;
      const auto [min, max] = std::minmax_element(row, row + shape.value_dim);
      const double limit =
          exact[static_cast<std::size_t>(t)]
              ? 0
              : detail::half_step(*min, *max, std::get<KiviValues>(store.recipe().value).bits, shape.dtype);
      for (int d = 0; d < shape.value_dim; ++d) {
        ASSERT_LE(std::fabs(static_cast<double>(row[d]) - after.values[static_cast<std::size_t>(at + d)]), limit)
            << "value " << t << " of page " << page << ", channel " << d;
      }
    }
  }
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
