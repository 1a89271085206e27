// The inside of a PageStore; attention and Cache read it, only store*.cpp change it.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include "cache/page.hpp"
#include "cache/probes.hpp"
#include "kvant/page_store.hpp"

namespace kvant {

// Buffers of one size handed back by stores, kept for the next page of that size. Locked, because copies of a store
// share its pool and may live in different threads.
class PagePool {
 public:
  base::AlignedBytes take(std::size_t bytes);
  void give(base::AlignedBytes buffer, std::size_t bytes) noexcept;
  std::size_t idle() const;
  void free_idle();

 private:
  struct Shelf {
    std::size_t bytes = 0;
    std::vector<base::AlignedBytes> buffers;
  };
  mutable std::mutex mutex_;
  std::vector<Shelf> shelves_;  // few sizes: one per distinct layer shape
};

namespace cache {

constexpr int kMostQueryHeads = 65536;
// Throws Error(invalid_argument) where queries cannot have so many heads.
void check_query_heads(const CacheShape& shape, std::int64_t heads);

}  // namespace cache

struct PageStore::Impl {
  Recipe recipe;
  CacheShape shape;
  PageLayout layout;
  cache::RowsLayout rows;
  std::int64_t cells = 0;
  std::shared_ptr<PagePool> pool;
  std::vector<cache::Page> pages;
  std::vector<std::int64_t> open_pages;  // numbers of open pages, in the order they were opened
  std::int64_t rows_written = 0;         // key rows since creation: the clock of the recent window
  StoreCounts counts;
  // Sums of squares of queries, [kv_heads][key_dim], those of open pages not included; empty unless the recipe uses
  // them.
  std::vector<double> query_sums;
  // With feedback, of the same queries: lower triangles of the sums of q q' per KV head (cache/feedback.hpp).
  std::vector<float> query_moments;
  bool queries_seen = false;
  std::shared_ptr<const cache::Rotation> rotation;  // of recipes with keys before RoPE, once the host has given it
  std::optional<cache::Probes> probes;              // only where the recipe tells salient tokens by attention

  Impl(const Recipe& r, const CacheShape& s, std::int64_t n, std::shared_ptr<PagePool> p);
  Impl(const Impl& other);
  ~Impl();

  int tokens() const { return recipe.page; }
  // Cells of a page that exist: fewer than a page only at the end of the store.
  int valid_cells(std::int64_t page) const;
  bool is_full(std::int64_t page) const;
  // Adds what this store holds and none of `counted` does.
  void add_bytes(std::span<const PageStore> counted, StoreBytes& bytes) const;

  // Throws unless rows of this shape and these values may be written (the checks of PageStore::write).
  void check_rows(Side side, const ConstView& view, std::int64_t count) const;
  void check_values(Side side, const ConstView& view) const;
  void check_queries(const ConstView& view) const;

  // For stores filled in cell order: the clock goes back to `length` rows after a trim.
  void rewind(std::int64_t length);
  void grow(std::int64_t new_cells);

  std::byte* open(std::int64_t page);  // makes the page open, decoding it if it was sealed
  void release(std::int64_t page);     // back to unwritten
  void drop_open(cache::Page& page);   // returns its buffer to the pool
  void seal(std::span<const std::int64_t> ready, int threads);
  // Salient tokens of pages that are about to be encoded, into their blocks. True for pages without any probe.
  bool order_tokens(std::int64_t page, const cache::CellSet& skip, int threads, std::byte* block) const;

  // ---- src/cache/store_rotation.cpp
  bool needs_rotation() const { return layout.position_bytes > 0; }
  cache::KeyTurns turns_of(const cache::Page& page) const { return {rotation.get(), page.positions.get()}; }
  std::unique_ptr<std::int32_t[]> make_positions(const cache::Page* from) const;
  // Throws unless keys of these positions (empty: the cells' numbers) may be written.
  void check_positions(std::span<const std::int64_t> cells, std::span<const std::int64_t> positions) const;
  void take_rotation(const Impl& from);
  void turn_open(cache::Page& page, std::size_t token, std::int32_t distance);

  // ---- src/cache/store_queries.cpp
  // The sums that each of the pages, in this order, is encoded with: the store's and those of all pages so far; empty
  // where no query was seen. Sealing the last one makes its sums the store's.
  std::vector<std::vector<double>> sums_at(std::span<const std::int64_t> order) const;
  // The same for query_moments; empty entries without feedback too.
  std::vector<std::vector<float>> moments_at(std::span<const std::int64_t> order, int threads) const;
  // Values that an open page keeps per cell.
  std::size_t query_values() const { return query_sums.size() * (query_moments.empty() ? 1 : 2); }
  std::uint16_t* query_cell(const cache::Page& page, std::size_t token) const {
    return page.queries.get() + token * query_values();
  }
  std::unique_ptr<std::uint16_t[]> copy_queries(const cache::Page& page) const;
  struct QueryRow {              // of one token
    std::vector<float> squares;  // [kv_heads][key_dim], summed over the heads of a group
    std::vector<float> sample;   // with feedback: one query of each group
  };
  void count_queries(cache::Page* page, std::size_t token, const QueryRow& row);
  void count_sample(const std::uint16_t* sample);
  void copy_query_cells(const cache::Page& from, std::int64_t first, std::int64_t to, std::int64_t count);
  // Keeps those queries that may become probes, and drops probes that no open page can need any more.
  void keep_probes(std::span<const std::int64_t> cells, const ConstView& queries, const QueryScores& scores);
  void drop_probes();
  void take_probes(const Impl& from);
};

}  // namespace kvant
