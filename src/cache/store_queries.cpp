// What a store knows of the queries: sums of squares per KV head and key channel.
//
// Each open page has sums of its own that join those of the store when the page is sealed: a page is encoded with the
// queries up to its own last token, however the tokens arrived in calls.
#include <cmath>
#include <limits>

#include "base/half.hpp"
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

void PageStore::Impl::check_queries(const ConstView& view) const {
  const auto refuse = [](const std::string& text) { base::fail(ErrorCode::invalid_argument, text); };
  if (view.extent[2] != shape.key_dim) {
    refuse("queries have " + std::to_string(view.extent[2]) + " channels; keys have " + std::to_string(shape.key_dim));
  }
  if (view.extent[1] < 1 || view.extent[1] % shape.kv_heads != 0) {
    refuse("query heads are " + std::to_string(view.extent[1]) + "; allowed: a multiple of the " +
           std::to_string(shape.kv_heads) + " KV heads");
  }
  if (view.extent[0] > 0 && view.data == nullptr) refuse("queries have no data");
  for_each_query(view, [&](std::int64_t row, std::int64_t head, const float* query) {
    bool bad = false;
    for (int d = 0; d < shape.key_dim; ++d) bad |= !(std::fabs(query[d]) <= std::numeric_limits<float>::max());
    if (!bad) return;
    base::fail(ErrorCode::not_finite,
               "query row " + std::to_string(row) + ", head " + std::to_string(head) + " has a value that is not finite");
  });
}

std::vector<std::vector<double>> PageStore::Impl::sums_at(std::span<const std::int64_t> order) const {
  std::vector<std::vector<double>> result;
  std::vector<double> sums = query_sums;
  bool seen = queries_seen;
  for (const std::int64_t number : order) {
    const Page& page = pages[static_cast<std::size_t>(number)];
    for (std::size_t i = 0; page.queries && i < sums.size(); ++i) sums[i] += page.queries[i];
    seen |= page.queries != nullptr;
    result.push_back(seen ? sums : std::vector<double>());
  }
  return result;
}

void PageStore::Impl::settle_queries(Page& page) {
  if (!page.queries) return;
  for (std::size_t i = 0; i < query_sums.size(); ++i) query_sums[i] += page.queries[i];
  queries_seen = true;
  page.queries.reset();
}

void PageStore::Impl::take_queries(const Impl& from) {
  for (const Page& page : pages) {
    if (page.queries) return;
  }
  if (queries_seen) return;
  std::vector<double> sums = from.query_sums;
  bool seen = from.queries_seen;
  for (const Page& page : from.pages) {
    for (std::size_t i = 0; page.queries && i < sums.size(); ++i) sums[i] += page.queries[i];
    seen |= page.queries != nullptr;
  }
  query_sums = std::move(sums);
  queries_seen = seen;
}

bool PageStore::weighs_queries() const {
  return !impl_->query_sums.empty();
}

void PageStore::observe(std::span<const std::int64_t> cells, const ConstView& queries) {
  Impl& impl = *impl_;
  impl.check_queries(queries);
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
  if (impl.query_sums.empty()) return;
  for (const std::int64_t cell : cells) {  // all memory is there before the first change
    Page& page = impl.pages[static_cast<std::size_t>(cell / impl.tokens())];
    if (page.open && !page.queries) page.queries = std::make_unique<double[]>(impl.query_sums.size());
  }
  const std::int64_t group = queries.extent[1] / impl.shape.kv_heads;
  for_each_query(queries, [&](std::int64_t row, std::int64_t head, const float* query) {
    double* sums = impl.query_sums.data();
    if (!cells.empty()) {
      const Page& page = impl.pages[static_cast<std::size_t>(cells[static_cast<std::size_t>(row)] / impl.tokens())];
      if (page.open) sums = page.queries.get();
    }
    impl.queries_seen |= sums == impl.query_sums.data();
    double* out = sums + head / group * impl.shape.key_dim;
    for (int d = 0; d < impl.shape.key_dim; ++d) {
      out[d] += static_cast<double>(query[d]) * static_cast<double>(query[d]);
    }
  });
}

}  // namespace kvant
