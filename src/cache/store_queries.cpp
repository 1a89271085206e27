// What a store knows of the queries: sums of squares per KV head and key channel.
//
// Open pages keep those of each of their cells; when a page is sealed, they join the sums of the store. So a page is
// encoded with the queries up to its own last token, however the tokens arrived in calls, and tokens that are trimmed
// before their page is sealed have never been there.
#include <algorithm>
#include <bit>
#include <cstring>

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
      const std::uint16_t* cell = page.queries.get() + token * sums.size();
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(base::bfloat_to_float(cell[i]));
    }
    result.push_back(seen ? sums : std::vector<double>());
  }
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
    std::copy_n(from.queries.get() + source * query_sums.size(), query_sums.size(), query_cell(page, target));
    page.observed.set(target);
  }
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
    if (page.open && !page.queries) {
      page.queries = std::make_unique<std::uint16_t[]>(impl.layout.query_bytes / sizeof(std::uint16_t));
    }
  }
  const std::int64_t last = queries.extent[1] - 1;
  std::vector<float> row_sums(impl.query_sums.size());
  for_each_query(queries, [&](std::int64_t row, std::int64_t head, const float* query) {
    if (head == 0) std::fill(row_sums.begin(), row_sums.end(), 0.0F);
    float* out = row_sums.data() + head / (queries.extent[1] / impl.shape.kv_heads) * impl.shape.key_dim;
    for (int d = 0; d < impl.shape.key_dim; ++d) out[d] += query[d] * query[d];
    if (head != last) return;
    if (cells.empty()) return impl.count_queries(nullptr, 0, row_sums);
    const std::int64_t cell = cells[static_cast<std::size_t>(row)];
    impl.count_queries(&impl.pages[static_cast<std::size_t>(cell / impl.tokens())],
                       static_cast<std::size_t>(cell % impl.tokens()), row_sums);
  });
}

// To the cell of an open page, else to the store; rounded to bfloat16 alike.
void PageStore::Impl::count_queries(Page* page, std::size_t token, const std::vector<float>& sums) {
  const bool open = page != nullptr && page->open;
  std::vector<std::uint16_t> rounded(open ? 0 : sums.size());
  std::uint16_t* out = open ? query_cell(*page, token) : rounded.data();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(std::min(sums[i], base::max_finite(DType::bf16)));
    out[i] = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
  }
  if (open) {
    page->observed.set(token);
    return;
  }
  for (std::size_t i = 0; i < sums.size(); ++i) query_sums[i] += static_cast<double>(base::bfloat_to_float(out[i]));
  queries_seen = true;
}

}  // namespace kvant
