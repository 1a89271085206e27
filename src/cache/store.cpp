#include "cache/store.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "base/threads.hpp"
#include "cache/feedback.hpp"
#include "cache/saliency.hpp"
#include "methods/method.hpp"

namespace kvant {

using cache::CellSet;
using cache::Page;

// ---- PagePool

base::AlignedBytes PagePool::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (Shelf& shelf : shelves_) {
    if (shelf.bytes == bytes && !shelf.buffers.empty()) {
      base::AlignedBytes buffer = std::move(shelf.buffers.back());
      shelf.buffers.pop_back();
      return buffer;
    }
  }
  return base::allocate_aligned(bytes);
}

void PagePool::give(base::AlignedBytes buffer, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    auto shelf = std::find_if(shelves_.begin(), shelves_.end(), [&](const Shelf& s) { return s.bytes == bytes; });
    if (shelf == shelves_.end()) shelf = shelves_.insert(shelf, {bytes, {}});
    shelf->buffers.push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {
    // No room to note it: it is freed.
  }
}

std::size_t PagePool::idle() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const Shelf& shelf : shelves_) bytes += shelf.bytes * shelf.buffers.size();
  return bytes;
}

void PagePool::free_idle() {
  const std::lock_guard lock(mutex_);
  std::vector<Shelf>().swap(shelves_);
}

std::shared_ptr<PagePool> make_page_pool() {
  return std::make_shared<PagePool>();
}
std::size_t idle_bytes(const PagePool& pool) {
  return pool.idle();
}

// ---- Impl

PageStore::Impl::Impl(const Recipe& r, const CacheShape& s, std::int64_t n, std::shared_ptr<PagePool> p)
    : recipe(r), shape(s), layout(make_layout(r, s)), rows(s, r.page), cells(n), pool(std::move(p)) {
  if (n < 0 || n > (std::int64_t{1} << 40)) {
    base::fail(ErrorCode::invalid_argument, "cells is " + std::to_string(n) + "; allowed: 0 to 2^40");
  }
  if (!pool) pool = make_page_pool();
  if (catalog::uses_queries(recipe)) {
    query_sums.assign(static_cast<std::size_t>(s.kv_heads) * static_cast<std::size_t>(s.key_dim), 0.0);
  }
  if (layout.key.feedback) {
    query_moments.assign(static_cast<std::size_t>(s.kv_heads) * cache::triangle_size(s.key_dim), 0.0F);
  }
  const auto classes = catalog::token_classes(recipe);
  if (classes && classes->saliency == Saliency::attention) probes.emplace(s.key_dim);
  pages.resize(static_cast<std::size_t>((n + r.page - 1) / r.page));
}

PageStore::Impl::Impl(const Impl& other)
    : recipe(other.recipe),
      shape(other.shape),
      layout(other.layout),
      rows(other.rows),
      cells(other.cells),
      pool(other.pool),
      open_pages(other.open_pages),
      rows_written(other.rows_written),
      counts(other.counts),
      query_sums(other.query_sums),
      query_moments(other.query_moments),
      queries_seen(other.queries_seen),
      rotation(other.rotation),
      probes(other.probes) {
  pages.resize(other.pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Page& from = other.pages[i];
    Page& to = pages[i];
    to.sealed = from.sealed;
    to.key_written = from.key_written;
    to.value_written = from.value_written;
    to.exact = from.exact;
    to.last_write = from.last_write;
    to.queries = copy_queries(from);
    to.observed = from.observed;
    if (from.positions) to.positions = make_positions(&from);
    if (from.clocks) {
      to.clocks = std::make_unique<std::int64_t[]>(static_cast<std::size_t>(tokens()));
      std::copy_n(from.clocks.get(), tokens(), to.clocks.get());
    }
    if (from.open) {
      to.open = pool->take(rows.bytes);
      std::memcpy(to.open.get(), from.open.get(), rows.bytes);
    }
  }
}

PageStore::Impl::~Impl() {
  for (Page& page : pages) drop_open(page);
}

int PageStore::Impl::valid_cells(std::int64_t page) const {
  return static_cast<int>(std::min<std::int64_t>(tokens(), cells - page * tokens()));
}

bool PageStore::Impl::is_full(std::int64_t page) const {
  const auto written = pages[static_cast<std::size_t>(page)].written().count();
  return static_cast<int>(written) == valid_cells(page);
}

void PageStore::Impl::rewind(std::int64_t length) {
  rows_written = length;
  for (const std::int64_t number : open_pages) {
    Page& page = pages[static_cast<std::size_t>(number)];
    page.last_write = std::min(page.last_write, length);
    // A reopened page has forgotten when its rows came. Those of a Cache came in order, and an image says no more.
    for (int i = 0; page.clocks && i < tokens(); ++i)
      page.clocks[static_cast<std::size_t>(i)] = number * tokens() + i + 1;
  }
  if (probes) probes->keep_if([&](std::int64_t clock) { return clock <= length; });
}

void PageStore::Impl::grow(std::int64_t new_cells) {
  pages.resize(static_cast<std::size_t>((new_cells + tokens() - 1) / tokens()));
  cells = new_cells;
}

std::byte* PageStore::Impl::open(std::int64_t number) {
  Page& page = pages[static_cast<std::size_t>(number)];
  if (page.open) return page.open.get();
  open_pages.reserve(open_pages.size() + 1);
  auto clocks = probes ? std::make_unique<std::int64_t[]>(static_cast<std::size_t>(tokens())) : nullptr;
  if (needs_rotation() && !page.positions) page.positions = make_positions(nullptr);
  base::AlignedBytes buffer = pool->take(rows.bytes);
  if (page.sealed) {
    cache::decode_page(recipe, shape, layout, *page.sealed, turns_of(page), buffer.get());
    page.sealed.reset();
    ++counts.reopens;
  } else {
    // Kernels read whole tiles, unwritten cells included: rows of an earlier user may be NaN in this store's type.
    std::memset(buffer.get(), 0, rows.bytes);
  }
  page.open = std::move(buffer);
  page.clocks = std::move(clocks);
  open_pages.push_back(number);
  return page.open.get();
}

void PageStore::Impl::drop_open(Page& page) {
  if (page.open) pool->give(std::move(page.open), rows.bytes);
  page.open.reset();
}

void PageStore::Impl::release(std::int64_t number) {
  Page& page = pages[static_cast<std::size_t>(number)];
  if (page.open) std::erase(open_pages, number);
  drop_open(page);
  page = Page();
}

bool PageStore::Impl::order_tokens(std::int64_t page, const CellSet& skip, int threads, std::byte* block) const {
  const std::vector<std::size_t> seeing = probes ? cache::probes_of(*this, page) : std::vector<std::size_t>();
  base::parallel_for(shape.kv_heads, threads, [&](std::int64_t item, int) {
    const int head = static_cast<int>(item);
    const std::vector<double> scores =
        seeing.empty() ? cache::norm_saliency(*this, page, head) : cache::attention_saliency(*this, page, head, seeing);
    cache::store_token_order(layout, scores, skip, head, block);
  });
  return probes && seeing.empty();
}

void PageStore::Impl::seal(std::span<const std::int64_t> ready, int threads) {
  std::vector<std::shared_ptr<cache::SealedPage>> sealed;
  std::vector<CellSet> skip;
  for (const std::int64_t number : ready) {
    const Page& page = pages[static_cast<std::size_t>(number)];
    CellSet left_out = page.exact;
    for (int cell = valid_cells(number); cell < tokens(); ++cell) left_out.set(static_cast<std::size_t>(cell));
    skip.push_back(left_out);
    sealed.push_back(std::make_shared<cache::SealedPage>());
    sealed.back()->block = base::allocate_zeroed(layout.page_bytes);  // padding between planes is part of the bytes
    sealed.back()->exact = cache::copy_exact(shape, tokens(), page.open.get(), page.exact & page.written());
    if (layout.salient > 0 && order_tokens(number, left_out, threads, sealed.back()->block.get())) ++counts.blind_seals;
  }
  const std::vector<std::vector<double>> sums = sums_at(ready);
  std::vector<std::vector<float>> moments = moments_at(ready, threads);
  // Values that share a grid are one item for all heads.
  const int value_items = layout.value.shared_grid ? 1 : shape.kv_heads;
  const std::int64_t per_page = shape.kv_heads + value_items;
  base::parallel_for(static_cast<std::int64_t>(ready.size()) * per_page, threads, [&](std::int64_t item, int) {
    const auto i = static_cast<std::size_t>(item / per_page);
    const int part = static_cast<int>(item % per_page);
    const std::byte* rows_of_page = pages[static_cast<std::size_t>(ready[i])].open.get();
    std::byte* block = sealed[i]->block.get();
    if (part < value_items) {
      cache::encode_values(recipe, shape, layout, rows_of_page, part, shape.kv_heads / value_items, skip[i], block);
    } else {
      const int head = part - value_items;
      cache::QuerySums queries;
      if (!sums[i].empty()) queries.squares = sums[i].data() + std::ptrdiff_t{head} * shape.key_dim;
      if (!moments[i].empty()) {
        queries.moment = moments[i].data() + static_cast<std::size_t>(head) * cache::triangle_size(shape.key_dim);
      }
      cache::encode_keys(recipe, shape, layout, rows_of_page, head, skip[i], queries,
                         turns_of(pages[static_cast<std::size_t>(ready[i])]), block);
    }
  });
  for (std::size_t i = 0; i < ready.size(); ++i) {
    Page& page = pages[static_cast<std::size_t>(ready[i])];
    drop_open(page);
    page.clocks.reset();
    page.queries.reset();
    page.observed.reset();
    page.sealed = std::move(sealed[i]);
    std::erase(open_pages, ready[i]);
  }
  if (!ready.empty() && !sums.back().empty()) {
    query_sums = sums.back();
    if (!query_moments.empty()) query_moments = std::move(moments.back());
    queries_seen = true;
  }
  counts.seals += static_cast<std::int64_t>(ready.size());
  if (!query_sums.empty()) {
    counts.blind_seals += std::count_if(sums.begin(), sums.end(), [](const auto& seen) { return seen.empty(); });
  }
}

// ---- PageStore

PageStore::PageStore(const Recipe& recipe, const CacheShape& shape, std::int64_t cells, std::shared_ptr<PagePool> pool)
    : impl_(std::make_unique<Impl>(recipe, shape, cells, std::move(pool))) {}
PageStore::~PageStore() = default;
PageStore::PageStore(const PageStore& other) : impl_(std::make_unique<Impl>(*other.impl_)) {}
PageStore& PageStore::operator=(const PageStore& other) {
  if (this != &other) impl_ = std::make_unique<Impl>(*other.impl_);
  return *this;
}
PageStore::PageStore(PageStore&&) noexcept = default;
PageStore& PageStore::operator=(PageStore&&) noexcept = default;

const Recipe& PageStore::recipe() const {
  return impl_->recipe;
}
const CacheShape& PageStore::shape() const {
  return impl_->shape;
}
const PageLayout& PageStore::layout() const {
  return impl_->layout;
}
std::int64_t PageStore::cells() const {
  return impl_->cells;
}

int PageStore::seal_ready(int threads) {
  if (!impl_->recipe.quantizes()) return 0;
  std::vector<std::int64_t> ready;
  for (const std::int64_t number : impl_->open_pages) {
    const Page& page = impl_->pages[static_cast<std::size_t>(number)];
    const bool settled = impl_->rows_written - page.last_write >= impl_->recipe.window;
    // A page of sinks only has nothing to encode.
    if (settled && impl_->is_full(number) && static_cast<int>(page.exact.count()) < impl_->valid_cells(number)) {
      ready.push_back(number);
    }
  }
  // In the order they were filled, so that each page is encoded with the queries up to its own last token.
  std::sort(ready.begin(), ready.end(), [&](std::int64_t a, std::int64_t b) {
    return impl_->pages[static_cast<std::size_t>(a)].last_write < impl_->pages[static_cast<std::size_t>(b)].last_write;
  });
  if (!impl_->probes) {
    if (!ready.empty()) impl_->seal(ready, threads);
  } else {
    // One by one: what a probe's attention is depends on which of the pages before are sealed.
    for (std::size_t i = 0; i < ready.size(); ++i) impl_->seal(std::span(ready).subspan(i, 1), threads);
    if (!ready.empty()) impl_->drop_probes();
  }
  return static_cast<int>(ready.size());
}

void PageStore::forget(std::int64_t first, std::int64_t count) {
  Impl& impl = *impl_;
  if (first < 0 || count < 0 || first > impl.cells || count > impl.cells - first) {
    base::fail(ErrorCode::out_of_range, "forget of cells " + std::to_string(first) + " + " + std::to_string(count) +
                                            " outside 0.." + std::to_string(impl.cells));
  }
  if (count == 0) return;
  // Reopening may run out of memory: it comes before anything is forgotten (at most the two pages at the ends).
  const std::int64_t end = first + count;
  const auto partial = [&](std::int64_t page) {
    return page * impl.tokens() < first || page * impl.tokens() + impl.valid_cells(page) > end;
  };
  for (std::int64_t page = first / impl.tokens(); page * impl.tokens() < end; ++page) {
    if (partial(page) && impl.pages[static_cast<std::size_t>(page)].sealed) impl.open(page);
  }
  for (std::int64_t number = first / impl.tokens(); number * impl.tokens() < end; ++number) {
    Page& page = impl.pages[static_cast<std::size_t>(number)];
    const std::int64_t base = number * impl.tokens();
    for (std::int64_t cell = std::max(first, base); cell < std::min(end, base + impl.tokens()); ++cell) {
      const auto bit = static_cast<std::size_t>(cell - base);
      page.key_written.reset(bit);
      page.value_written.reset(bit);
      page.exact.reset(bit);
      page.observed.reset(bit);
    }
    if (!page.is_empty() && (page.key_written | page.value_written).none()) impl.release(number);
  }
}

void PageStore::clear() {
  for (std::int64_t page = 0; page < static_cast<std::int64_t>(impl_->pages.size()); ++page) impl_->release(page);
  impl_->rows_written = 0;
  std::fill(impl_->query_sums.begin(), impl_->query_sums.end(), 0.0);
  std::fill(impl_->query_moments.begin(), impl_->query_moments.end(), 0.0F);
  impl_->queries_seen = false;
  if (impl_->probes) impl_->probes->clear();
}

bool PageStore::is_sealed(std::int64_t page) const {
  return page >= 0 && page < static_cast<std::int64_t>(impl_->pages.size()) &&
         impl_->pages[static_cast<std::size_t>(page)].sealed != nullptr;
}

bool PageStore::is_written(std::int64_t cell) const {
  if (cell < 0 || cell >= impl_->cells) return false;
  return impl_->pages[static_cast<std::size_t>(cell / impl_->tokens())]
      .written()[static_cast<std::size_t>(cell % impl_->tokens())];
}

std::span<const std::byte> PageStore::sealed_block(std::int64_t page) const {
  if (!is_sealed(page)) return {};
  return {impl_->pages[static_cast<std::size_t>(page)].sealed->block.get(), impl_->layout.page_bytes};
}

StoreBytes PageStore::bytes() const {
  return bytes_of({this, 1});
}

StoreBytes PageStore::bytes_of(std::span<const PageStore> stores) {
  StoreBytes bytes;
  for (std::size_t s = 0; s < stores.size(); ++s) stores[s].impl_->add_bytes(stores.first(s), bytes);
  return bytes;
}

void PageStore::Impl::add_bytes(std::span<const PageStore> counted, StoreBytes& bytes) const {
  bytes.tables += sizeof(Impl) + pages.capacity() * sizeof(Page) + open_pages.capacity() * sizeof(std::int64_t) +
                  query_sums.capacity() * sizeof(double) + query_moments.capacity() * sizeof(float);
  const TileLayout& key = layout.key;
  bytes.tables += (key.range_min.capacity() + key.range_max.capacity()) * sizeof(float);
  if (probes) bytes.tables += probes->bytes();
  if (rotation) bytes.tables += rotation->bytes();
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Page& page = pages[i];
    if (page.clocks) bytes.tables += static_cast<std::size_t>(tokens()) * sizeof(std::int64_t);
    if (page.positions) bytes.tables += layout.position_bytes;
    if (page.open) bytes.open += rows.bytes;
    if (page.queries) bytes.tables += layout.query_bytes;
    const auto shared = [&](const PageStore& other) {
      const std::vector<Page>& theirs = other.impl_->pages;
      return i < theirs.size() && theirs[i].sealed == page.sealed;
    };
    if (!page.sealed) continue;
    if (page.sealed.use_count() > 1 && std::any_of(counted.begin(), counted.end(), shared)) continue;
    bytes.sealed += layout.page_bytes;
    bytes.tables += sizeof(cache::SealedPage) + 2 * sizeof(void*);  // the shared_ptr's counter sits beside it
    const cache::ExactRows& exact = page.sealed->exact;
    if (exact.rows) bytes.exact += cache::RowsLayout(shape, exact.capacity).bytes + exact.cells.capacity();
  }
}

StoreCounts PageStore::counts() const {
  StoreCounts counts = impl_->counts;
  counts.open_pages = static_cast<std::int64_t>(impl_->open_pages.size());
  counts.sealed_pages =
      std::count_if(impl_->pages.begin(), impl_->pages.end(), [](const Page& page) { return page.sealed != nullptr; });
  return counts;
}

}  // namespace kvant
