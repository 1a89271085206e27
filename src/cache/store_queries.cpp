// What a store knows of the queries: sums of squares per KV head and key channel, with feedback second moments, and
// probes.
//
// Open pages keep those of each of their cells; when a page is sealed, they join the sums of the store. So a page is
// encoded with the queries up to its own last token, however the tokens arrived in calls, and tokens that are trimmed
// before their page is sealed have never been there.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "cache/feedback.hpp"
#include "cache/store.hpp"

namespace kvant {

using cache::Page;

namespace {

// Calls visit(row, head, channels as floats) for every query vector; dense float vectors are used in place.
template <typename Visit>
void for_each_query(const ConstView& view, const Visit& visit) {
  std::vector<float> buffer(static_cast<std::size_t>(view.extent[2]));
  for (std::int64_t row = 0; row < view.extent[0]; ++row) {
    for (std::int64_t head = 0; head < view.extent[1]; ++head) {
      const std::int64_t at = row * view.stride[0] + head * view.stride[1];
      if (view.type == DType::f32 && view.stride[2] == 1) {
        visit(row, head, static_cast<const float*>(view.data) + at);
        continue;
      }
      for (std::int64_t d = 0; d < view.extent[2]; ++d) {
        buffer[static_cast<std::size_t>(d)] = base::load_float(view.data, view.type, at + d * view.stride[2]);
      }
      visit(row, head, buffer.data());
    }
  }
}

}  // namespace

void cache::check_query_heads(const CacheShape& shape, std::int64_t heads) {
  if (heads >= 1 && heads <= kMostQueryHeads && heads % shape.kv_heads == 0) return;
  base::fail(ErrorCode::invalid_argument, "query heads are " + std::to_string(heads) + "; allowed: a multiple of the " +
                                              std::to_string(shape.kv_heads) + " KV heads, up to " +
                                              std::to_string(kMostQueryHeads));
}

void PageStore::Impl::check_queries(const ConstView& view) const {
  const auto refuse = [](const std::string& text) { base::fail(ErrorCode::invalid_argument, text); };
  if (view.extent[2] != shape.key_dim) {
    refuse("queries have " + std::to_string(view.extent[2]) + " channels; keys have " + std::to_string(shape.key_dim));
  }
  cache::check_query_heads(shape, view.extent[1]);
  if (probes && probes->size() > 0 && probes->query_heads() != view.extent[1]) {
    refuse("query heads are " + std::to_string(view.extent[1]) + "; those of earlier queries are " +
           std::to_string(probes->query_heads()));
  }
  if (view.extent[0] < 0) refuse("queries have " + std::to_string(view.extent[0]) + " rows");
  if (view.extent[0] > 0 && view.data == nullptr) refuse("queries have no data");
  for_each_query(view, [&](std::int64_t row, std::int64_t head, const float* query) {
    std::uint32_t largest = 0;  // magnitudes order as their bits do, infinities and NaN come last
    for (int d = 0; d < shape.key_dim; ++d) {
      largest = std::max(largest, std::bit_cast<std::uint32_t>(query[d]) & 0x7FFFFFFFU);
    }
    if (largest < 0x7F800000U) return;
    base::fail(ErrorCode::not_finite, "query row " + std::to_string(row) + ", head " + std::to_string(head) +
                                          " has a value that is not finite");
  });
}

std::vector<std::vector<double>> PageStore::Impl::sums_at(std::span<const std::int64_t> order) const {
  std::vector<std::vector<double>> result;
  std::vector<double> sums = query_sums;
  bool seen = queries_seen;
  for (const std::int64_t number : order) {
    const Page& page = pages[static_cast<std::size_t>(number)];
    seen |= page.has_queries();
    for (std::size_t token = 0; page.queries && token < static_cast<std::size_t>(tokens()); ++token) {
      if (!page.observed[token] || !page.key_written[token]) continue;
      const std::uint16_t* cell = query_cell(page, token);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(base::bfloat_to_float(cell[i]));
    }
    result.push_back(seen ? sums : std::vector<double>());
  }
  return result;
}

// Page by page and cell by cell, each page's sum from zero: the order of additions does not depend on the calls.
std::vector<std::vector<float>> PageStore::Impl::moments_at(std::span<const std::int64_t> order, int threads) const {
  std::vector<std::vector<float>> result(order.size());
  if (query_moments.empty()) return result;
  const auto dim = static_cast<std::size_t>(shape.key_dim);
  const std::size_t size = cache::triangle_size(shape.key_dim);
  bool seen = queries_seen;
  for (std::size_t i = 0; i < order.size(); ++i) {
    seen |= pages[static_cast<std::size_t>(order[i])].has_queries();
    if (seen) result[i].resize(query_moments.size());
  }
  base::parallel_for(shape.kv_heads, threads, [&](std::int64_t head, int) {
    const std::size_t first = static_cast<std::size_t>(head) * size;
    std::vector<float> sum(size), sample;
    const float* before = query_moments.data() + first;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (result[i].empty()) continue;
      const Page& page = pages[static_cast<std::size_t>(order[i])];
      sample.clear();
      for (std::size_t token = 0; page.queries && token < static_cast<std::size_t>(tokens()); ++token) {
        if (!page.observed[token] || !page.key_written[token]) continue;
        const std::uint16_t* query = query_cell(page, token) + query_sums.size() + static_cast<std::size_t>(head) * dim;
        for (std::size_t d = 0; d < dim; ++d) sample.push_back(base::bfloat_to_float(query[d]));
      }
      std::fill(sum.begin(), sum.end(), 0.0F);
      cache::add_moments(sample.data(), static_cast<int>(sample.size() / dim), shape.key_dim, sum.data());
      float* now = result[i].data() + first;
      for (std::size_t k = 0; k < size; ++k) now[k] = before[k] + sum[k];
      before = now;
    }
  });
  return result;
}

std::unique_ptr<std::uint16_t[]> PageStore::Impl::copy_queries(const Page& page) const {
  if (!page.queries) return nullptr;
  auto copy = std::make_unique<std::uint16_t[]>(layout.query_bytes / sizeof(std::uint16_t));
  std::memcpy(copy.get(), page.queries.get(), layout.query_bytes);
  return copy;
}

// Cells first.. of a page of another store to cells to.. of this one, which are written.
void PageStore::Impl::copy_query_cells(const Page& from, std::int64_t first, std::int64_t to, std::int64_t count) {
  if (!from.has_queries()) return;
  Page& page = pages[static_cast<std::size_t>(to / tokens())];
  if (!page.open) return;
  if (!page.queries) page.queries = std::make_unique<std::uint16_t[]>(layout.query_bytes / sizeof(std::uint16_t));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto source = static_cast<std::size_t>(first + i);
    const auto target = static_cast<std::size_t>(to % tokens() + i);
    if (!from.observed[source]) continue;
    std::copy_n(query_cell(from, source), query_values(), query_cell(page, target));
    page.observed.set(target);
  }
}

namespace {

// The ends of the spans of the pages that are full, in clocks.
std::vector<std::int64_t> ends_of_full_pages(const PageStore::Impl& store) {
  std::vector<std::int64_t> ends;
  for (const std::int64_t number : store.open_pages) {
    const Page& page = store.pages[static_cast<std::size_t>(number)];
    if (store.is_full(number)) ends.push_back(page.last_write + store.recipe.window);
  }
  return ends;
}

class ProbeFilter {
 public:
  explicit ProbeFilter(const PageStore::Impl& store)
      : span_(store.recipe), rows_written_(store.rows_written), ends_(ends_of_full_pages(store)) {}

  bool operator()(std::int64_t clock) const {
    if (span_.may_hold(rows_written_, clock)) return true;
    return std::any_of(ends_.begin(), ends_.end(), [&](std::int64_t end) { return span_.holds(end, clock); });
  }

 private:
  cache::ProbeSpan span_;
  std::int64_t rows_written_;
  std::vector<std::int64_t> ends_;
};

}  // namespace

void PageStore::Impl::drop_probes() {
  probes->keep_if(ProbeFilter(*this));
}

// A query whose cell is in no open page counts as that of the row just written: the last rows belong to the last
// queries.
void PageStore::Impl::keep_probes(std::span<const std::int64_t> cells, const ConstView& queries,
                                  const QueryScores& scores) {
  const ProbeFilter filter(*this);
  std::vector<std::pair<std::int64_t, std::int64_t>> kept;  // row, clock
  for (std::int64_t row = 0; row < queries.extent[0]; ++row) {
    std::int64_t clock = rows_written - queries.extent[0] + row + 1;
    if (!cells.empty()) {
      const std::int64_t cell = cells[static_cast<std::size_t>(row)];
      const Page& page = pages[static_cast<std::size_t>(cell / tokens())];
      if (page.clocks) clock = page.clocks[static_cast<std::size_t>(cell % tokens())];
    }
    if (filter(clock)) kept.emplace_back(row, clock);
  }
  const std::int64_t heads = queries.extent[1];
  probes->reserve(kept.size(), static_cast<int>(heads));
  probes->scale = scores.scale;
  probes->softcap = scores.softcap;
  for (const auto& [row, clock] : kept) {
    probes->add(clock);
    const std::span<float> query = probes->query(probes->size() - 1);
    for (std::int64_t i = 0; i < heads * shape.key_dim; ++i) {
      query[static_cast<std::size_t>(i)] = base::load_float(
          queries.data, queries.type,
          row * queries.stride[0] + i / shape.key_dim * queries.stride[1] + i % shape.key_dim * queries.stride[2]);
    }
    if (scores.lse != nullptr) {
      std::copy_n(scores.lse + row * heads, heads, probes->lse(probes->size() - 1).begin());
    }
  }
  probes->keep_if(filter);
}

// This store's clock goes on where the other one's is, so that probes keep theirs: the rows copied last are taken for
// those written last.
void PageStore::Impl::take_probes(const Impl& from) {
  if (!probes || probes->size() > 0 || from.probes->size() == 0) return;
  probes = from.probes;
  const std::int64_t by = from.rows_written - rows_written;
  rows_written += by;
  for (Page& page : pages) {
    page.last_write += by;
    for (int cell = 0; page.clocks && cell < tokens(); ++cell) page.clocks[static_cast<std::size_t>(cell)] += by;
  }
  drop_probes();
}

bool PageStore::weighs_queries() const {
  return !impl_->query_sums.empty() || impl_->probes.has_value();
}

void PageStore::observe(std::span<const std::int64_t> cells, const ConstView& queries, const QueryScores& scores) {
  Impl& impl = *impl_;
  impl.check_queries(queries);
  if (!std::isfinite(scores.scale) || !(scores.softcap >= 0) || !std::isfinite(scores.softcap)) {
    base::fail(ErrorCode::invalid_argument, "scale is " + std::to_string(scores.scale) + ", softcap " +
                                                std::to_string(scores.softcap) +
                                                "; allowed: finite, softcap not negative");
  }
  if (!cells.empty() && static_cast<std::int64_t>(cells.size()) != queries.extent[0]) {
    base::fail(ErrorCode::invalid_argument, "queries have " + std::to_string(queries.extent[0]) + " rows for " +
                                                std::to_string(cells.size()) + " cells");
  }
  for (const std::int64_t cell : cells) {
    if (cell < 0 || cell >= impl.cells) {
      base::fail(ErrorCode::out_of_range,
                 "cell " + std::to_string(cell) + " outside 0.." + std::to_string(impl.cells - 1));
    }
  }
  // All memory is there before the first change.
  for (const std::int64_t cell : cells) {
    Page& page = impl.pages[static_cast<std::size_t>(cell / impl.tokens())];
    if (page.open && !page.queries && !impl.query_sums.empty()) {
      page.queries = std::make_unique<std::uint16_t[]>(impl.layout.query_bytes / sizeof(std::uint16_t));
    }
  }
  const bool sampled = !impl.query_moments.empty();
  Impl::QueryRow sums{std::vector<float>(impl.query_sums.size()),
                      std::vector<float>(sampled ? impl.query_sums.size() : 0)};
  if (impl.probes && queries.extent[0] > 0) impl.keep_probes(cells, queries, scores);
  if (impl.query_sums.empty()) return;
  const std::int64_t last = queries.extent[1] - 1;
  const std::int64_t group = queries.extent[1] / impl.shape.kv_heads;
  for_each_query(queries, [&](std::int64_t row, std::int64_t head, const float* query) {
    const std::int64_t cell = cells.empty() ? 0 : cells[static_cast<std::size_t>(row)];
    if (head == 0) std::fill(sums.squares.begin(), sums.squares.end(), 0.0F);
    const std::int64_t first = head / group * impl.shape.key_dim;
    float* out = sums.squares.data() + first;
    for (int d = 0; d < impl.shape.key_dim; ++d) out[d] += query[d] * query[d];
    if (sampled && head % group == cell % group) std::copy_n(query, impl.shape.key_dim, sums.sample.data() + first);
    if (head != last) return;
    if (cells.empty()) return impl.count_queries(nullptr, 0, sums);
    impl.count_queries(&impl.pages[static_cast<std::size_t>(cell / impl.tokens())],
                       static_cast<std::size_t>(cell % impl.tokens()), sums);
  });
}

// To the cell of an open page, else to the store; rounded to bfloat16 alike.
void PageStore::Impl::count_queries(Page* page, std::size_t token, const QueryRow& row) {
  const bool open = page != nullptr && page->open;
  std::vector<std::uint16_t> rounded(open ? 0 : query_values());
  std::uint16_t* const out = open ? query_cell(*page, token) : rounded.data();
  const std::size_t count = query_sums.size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(std::min(row.squares[i], base::max_finite(DType::bf16)));
    out[i] = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
  }
  for (std::size_t i = 0; i < row.sample.size(); ++i) {
    out[count + i] = base::float_to_bfloat(std::clamp(row.sample[i], -cache::kLargestQuery, cache::kLargestQuery));
  }
  if (open) {
    page->observed.set(token);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) query_sums[i] += static_cast<double>(base::bfloat_to_float(out[i]));
  if (!query_moments.empty()) count_sample(out + count);
  queries_seen = true;
}

// One query of each group to the store's second moments.
void PageStore::Impl::count_sample(const std::uint16_t* sample) {
  std::vector<float> query(static_cast<std::size_t>(shape.key_dim));
  for (int head = 0; head < shape.kv_heads; ++head, sample += shape.key_dim) {
    for (std::size_t d = 0; d < query.size(); ++d) query[d] = base::bfloat_to_float(sample[d]);
    cache::add_moments(query.data(), 1, shape.key_dim,
                       query_moments.data() + static_cast<std::size_t>(head) * cache::triangle_size(shape.key_dim));
  }
}

}  // namespace kvant
