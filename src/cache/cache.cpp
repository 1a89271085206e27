#include "kvant/cache.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/checked.hpp"
#include "cache/store.hpp"
#include "cache/workspace.hpp"

namespace kvant {
namespace {

// Pages written before full ones behind the window are sealed: bounds the unquantized part of a long prompt.
constexpr std::int64_t kPagesPerSlice = 8;

ConstView slice(const ConstView& view, std::int64_t first, std::int64_t count) {
  ConstView part = view;
  part.data =
      static_cast<const std::byte*>(view.data) + first * view.stride[0] * static_cast<std::int64_t>(size_of(view.type));
  part.extent[0] = count;
  return part;
}

std::vector<std::int64_t> cell_range(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(count));
  std::iota(cells.begin(), cells.end(), first);
  return cells;
}

}  // namespace

Cache::Cache(const Recipe& recipe, const CacheShape& shape) : store_(recipe, shape, 0) {}

// The pool of a Cache is its own and that of its copies: nobody else could use or count what lies idle in it.
void Cache::append(const ConstView& keys, const ConstView& values, const ConstView& queries,
                   std::span<const std::int64_t> positions) {
  PageStore::Impl& impl = store_.impl();
  const std::int64_t count = keys.extent[0];
  impl.check_rows(Side::key, keys, count);
  impl.check_rows(Side::value, values, count);
  const bool observed = queries.data != nullptr;
  if (observed) impl.check_queries(queries);
  if (observed && queries.extent[0] != count) {
    base::fail(ErrorCode::invalid_argument,
               "queries have " + std::to_string(queries.extent[0]) + " rows for " + std::to_string(count) + " tokens");
  }
  if (!positions.empty() && static_cast<std::int64_t>(positions.size()) != count) {
    base::fail(ErrorCode::invalid_argument, "positions has " + std::to_string(positions.size()) + " entries for " +
                                                std::to_string(count) + " tokens");
  }
  impl.check_positions(cell_range(length_, count), positions);
  const std::int64_t page = impl.tokens();
  const std::int64_t cells_before = impl.cells;
  // Rows that were exact and have become codes do not come back by forgetting what was added after them. A call that
  // seals one page at most cannot fail behind that.
  const auto sealed = [&](std::int64_t length) {
    return std::max<std::int64_t>(0, length - impl.recipe.window) / page;
  };
  std::optional<PageStore> before;
  if (impl.recipe.quantizes() && sealed(length_ + count) - sealed(length_) > 1) before.emplace(store_);
  impl.grow(std::max(impl.cells, (length_ + count + page - 1) / page * page));
  try {
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t step = std::min(count - done, kPagesPerSlice * page);
      const std::vector<std::int64_t> cells = cell_range(length_ + done, step);
      const auto at = positions.empty()
                          ? positions
                          : positions.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(step));
      store_.write(Side::key, cells, slice(keys, done, step), at);
      store_.write(Side::value, cells, slice(values, done, step), at);
      if (observed) store_.observe(cells, slice(queries, done, step));
      store_.seal_ready();
      done += step;
    }
  } catch (...) {  // out of memory: what was added is forgotten again
    if (before) {
      store_ = std::move(*before);
      throw;
    }
    store_.forget(length_, impl.cells - length_);
    impl.rewind(length_);
    impl.grow(cells_before);
    throw;
  }
  length_ += count;
  impl.pool->free_idle();
}

void Cache::attend(const ConstView& queries, const View& out, AttentionOptions options, float* lse) const {
  if (queries.extent[0] > length_) {
    base::fail(ErrorCode::invalid_argument, "queries has " + std::to_string(queries.extent[0]) +
                                                " rows; the cache holds " + std::to_string(length_) + " tokens");
  }
  options.first_position = length_ - queries.extent[0];
  static thread_local Workspace workspace;
  kvant::attend(store_, length_, queries, out, options, workspace, lse);
}

void Cache::fetch(const View& keys, const View& values) const {
  const std::vector<std::int64_t> cells = cell_range(0, length_);
  store_.read(Side::key, cells, keys);
  store_.read(Side::value, cells, values);
}

void Cache::trim(std::int64_t n) {
  if (n < 0 || n > length_) {
    base::fail(ErrorCode::invalid_argument,
               "trim is " + std::to_string(n) + "; allowed: 0 to the length, " + std::to_string(length_));
  }
  store_.forget(length_ - n, n);
  length_ -= n;
  store_.impl().rewind(length_);
  store_.impl().pool->free_idle();
}

void Cache::clear() {
  store_.clear();
  store_.impl().pool->free_idle();
  length_ = 0;
}

std::vector<Cache> gather(std::span<const Cache> batch, std::span<const std::int64_t> indices) {
  std::vector<Cache> result;
  result.reserve(indices.size());
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= static_cast<std::int64_t>(batch.size())) {
      base::fail(ErrorCode::out_of_range,
                 "gather index " + std::to_string(index) + " outside a batch of " + std::to_string(batch.size()));
    }
    result.push_back(batch[static_cast<std::size_t>(index)]);
  }
  return result;
}

}  // namespace kvant
