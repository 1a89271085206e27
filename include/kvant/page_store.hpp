// PageStore: the pages of one layer, addressed by cell number. This is the level at which hosts that own cell numbers
// (llama.cpp, block tables) plug in; Cache builds one sequence on top of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvant/layout.hpp"
#include "kvant/recipe.hpp"
#include "kvant/rotation.hpp"
#include "kvant/types.hpp"

namespace kvant {

// Recycles the buffers of open pages between stores. Several stores may share one, also from different threads.
class PagePool;
std::shared_ptr<PagePool> make_page_pool();
// Bytes of recycled buffers that the pool holds for later use (live pages are counted by their stores).
std::size_t idle_bytes(const PagePool& pool);

// How attention turned queries into probabilities, for PageStore::observe.
struct QueryScores {
  float scale = 0;    // of q.k; 0: 1 / sqrt(key_dim)
  float softcap = 0;  // as in AttentionOptions
  // [rows, query_heads] as attend() gives it; null: computed over the stored cells when a page is sealed.
  const float* lse = nullptr;
};

// Bytes a store holds, by what they are for. total() is what the allocator gave, nothing left out.
struct StoreBytes {
  std::size_t sealed = 0;  // sealed blocks: codes, endpoints, indices
  std::size_t open = 0;    // unquantized pages, the recent window included
  std::size_t exact = 0;   // unquantized rows beside sealed pages (sinks)
  std::size_t tables = 0;  // page table, bitmaps, query statistics, probes, positions and rotation
  std::size_t total() const { return sealed + open + exact + tables; }
};

struct StoreCounts {
  std::int64_t sealed_pages = 0;
  std::int64_t open_pages = 0;
  std::int64_t seals = 0;  // times a page was encoded since creation
  // Of the seals: pages of recipes that weigh channels or tokens by queries, encoded without any. Channels are then
  // weighed by their ranges alone, salient tokens told by key norm.
  std::int64_t blind_seals = 0;
  std::int64_t reopens = 0;  // times a sealed page was decoded back because a cell in it was written
};

enum class Side : std::uint8_t { key, value };

// Thread-compatible. Copying a store shares its sealed pages (they are immutable) and copies its open ones.
class PageStore {
 public:
  // A store of `cells` cells, all unwritten. Memory is allocated page by page on first write.
  PageStore(const Recipe& recipe, const CacheShape& shape, std::int64_t cells,
            std::shared_ptr<PagePool> pool = nullptr);
  ~PageStore();
  PageStore(const PageStore& other);
  PageStore& operator=(const PageStore& other);
  PageStore(PageStore&&) noexcept;
  PageStore& operator=(PageStore&&) noexcept;

  const Recipe& recipe() const;
  const CacheShape& shape() const;
  const PageLayout& layout() const;
  std::int64_t cells() const;

  // True when the recipe stores keys before RoPE (kvquant:rope=before). Such a store has to be told the rotation before
  // its first key; rows go in and come out rotated all the same. Sealed pages hold them turned back by the position
  // that write() gave, open pages and exact rows as they came. Any position is right, but only the true one gives
  // channels the steady ranges that the recipe is about.
  bool needs_rotation() const;
  // Ignored by other recipes. Throws Error(invalid_argument) when the rotation does not fit key_dim, or is another one
  // than that of the rows that are stored.
  void set_key_rotation(const KeyRotation& rotation);
  // Moves the keys in `cells` by distances[i] positions, as a context shift does: sealed ones get other positions and
  // keep their codes, open ones are turned. They are no sinks from then on. Cells without a key are left alone. Throws
  // Error(invalid_argument) unless needs_rotation(), Error(out_of_range) for positions beyond 2^31; then nothing moved.
  void shift_keys(std::span<const std::int64_t> cells, std::span<const std::int64_t> distances);

  // Writes rows[i] ([kv_heads, dim]) into cell cells[i]. A sealed page that is written is reopened first.
  // positions, where the host knows them, tell which cells are sinks (position < recipe.sink) and how far a key was
  // rotated; without them the cell number counts as the position. Keys and values may come in either order.
  // Throws Error(out_of_range | not_finite | invalid_argument); then nothing was written.
  void write(Side side, std::span<const std::int64_t> cells, const ConstView& rows,
             std::span<const std::int64_t> positions = {});

  // Reads the cells as stored (decoded where sealed); unwritten cells read as zeros. out: [cells, kv_heads, dim].
  void read(Side side, std::span<const std::int64_t> cells, const View& out) const;

  // Tells a store whose recipe weighs key channels (waterfill, kitty:selector=query) or tokens (zipcache) by the
  // queries what those of the tokens in `cells` are: queries [cells.size(), query_heads, key_dim], query_heads a
  // multiple of kv_heads; call it after the tokens are written and before seal_ready. A page is encoded with the
  // statistics of all queries up to its own last token; queries of cells that are in no open page count from now on.
  // With `cells` empty, so do all of them, however many rows there are. zipcache keeps some as probes of the pages they
  // can see, which are decided with queries up to recipe.window tokens behind the page. Ignored by other recipes.
  // Throws Error(invalid_argument | out_of_range | not_finite); then nothing was counted.
  void observe(std::span<const std::int64_t> cells, const ConstView& queries, const QueryScores& scores = {});
  // True when the recipe makes use of queries.
  bool weighs_queries() const;

  // Encodes every full page that has at least recipe.window newer rows. Returns how many were sealed.
  int seal_ready(int threads = 0);

  // Forgets cells [first, first + count): they read as unwritten. A sealed page that is partly forgotten is reopened.
  void forget(std::int64_t first, std::int64_t count);
  void clear();

  // Copies count cells from `from` (same recipe, shape); whole aligned pages are shared, the rest is copied as stored.
  // A store that has seen no queries takes over the statistics as well.
  void copy_cells(const PageStore& from, std::int64_t from_first, std::int64_t first, std::int64_t count);

  bool is_sealed(std::int64_t page) const;
  bool is_written(std::int64_t cell) const;  // both key and value
  // The immutable block of a sealed page (layout().page_bytes), empty when the page is open.
  std::span<const std::byte> sealed_block(std::int64_t page) const;

  StoreBytes bytes() const;
  // What the stores hold together: pages that copy_cells shared among them at the same cells count once.
  static StoreBytes bytes_of(std::span<const PageStore> stores);
  StoreCounts counts() const;

  struct Impl;  // src/cache/store.hpp; attention reads the pages through it
  const Impl& impl() const { return *impl_; }
  Impl& impl() { return *impl_; }

 private:
  void copy_run(const Impl& source, std::int64_t from, std::int64_t to, std::int64_t count);

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvant
