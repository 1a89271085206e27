// Rows into and out of a PageStore.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "cache/store.hpp"
#include "tiles/kernels.hpp"

namespace kvant {
namespace {

using cache::Page;
using tiles::kernels;

int dim_of(const CacheShape& shape, Side side) {
  return side == Side::key ? shape.key_dim : shape.value_dim;
}
const char* name_of(Side side) {
  return side == Side::key ? "key" : "value";
}

template <typename AnyView>
void check_view(const char* what, const AnyView& view, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  const std::array<std::int64_t, 3> expected = {rows, heads, dim};
  if (view.extent != expected) {
    const auto text = [](const std::array<std::int64_t, 3>& e) {
      return std::to_string(e[0]) + " x " + std::to_string(e[1]) + " x " + std::to_string(e[2]);
    };
    base::fail(ErrorCode::invalid_argument,
               std::string(what) + " is " + text(view.extent) + "; expected " + text(expected));
  }
  if (view.data == nullptr && rows * heads * dim > 0) {
    base::fail(ErrorCode::invalid_argument, std::string(what) + " has no data");
  }
}

void check_cells(std::span<const std::int64_t> cells, std::int64_t limit) {
  for (const std::int64_t cell : cells) {
    if (cell < 0 || cell >= limit) {
      base::fail(ErrorCode::out_of_range, "cell " + std::to_string(cell) + " outside 0.." + std::to_string(limit - 1));
    }
  }
}

// One token's heads as dense floats; a dense float row is used in place.
const float* load_row(const ConstView& view, std::int64_t token, std::vector<float>& buffer) {
  const std::int64_t heads = view.extent[1];
  const std::int64_t dim = view.extent[2];
  const auto* data =
      static_cast<const std::byte*>(view.data) + token * view.stride[0] * static_cast<std::int64_t>(size_of(view.type));
  const bool dense = view.stride[2] == 1 && (view.stride[1] == dim || heads == 1);
  if (dense && view.type == DType::f32) return reinterpret_cast<const float*>(data);
  if (dense) {
    kernels().widen(data, view.type, buffer.data(), heads * dim);
  } else {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t d = 0; d < dim; ++d) {
        buffer[static_cast<std::size_t>(h * dim + d)] =
            base::load_float(data, view.type, h * view.stride[1] + d * view.stride[2]);
      }
    }
  }
  return buffer.data();
}

}  // namespace

// Refuses what the cache's type cannot hold. binary32 and bfloat16 stop at half their range: max - min must stay
// finite.
void PageStore::Impl::check_values(Side side, const ConstView& view) const {
  const DType dtype = shape.dtype;
  std::vector<float> buffer(static_cast<std::size_t>(view.extent[1] * view.extent[2]));
  const float limit = dtype == DType::f16 ? base::kRoundsToMaxHalf : base::max_finite(dtype) / 2;
  for (std::int64_t token = 0; token < view.extent[0]; ++token) {
    const float* row = load_row(view, token, buffer);
    const std::int64_t n = view.extent[1] * view.extent[2];
    bool bad = false;
    for (std::int64_t i = 0; i < n; ++i) bad |= !(std::fabs(row[i]) <= limit);
    if (!bad) continue;
    const float* worst = std::find_if(row, row + n, [&](float x) { return !(std::fabs(x) <= limit); });
    base::fail(ErrorCode::not_finite, std::string(name_of(side)) + " row " + std::to_string(token) + ", value " +
                                          std::to_string(worst - row) + " is " + std::to_string(*worst) +
                                          "; the cache's type " + name_of(dtype) + " holds magnitudes up to " +
                                          std::to_string(limit));
  }
}

void PageStore::Impl::check_rows(Side side, const ConstView& view, std::int64_t count) const {
  if (count < 0) base::fail(ErrorCode::invalid_argument, "a view has " + std::to_string(count) + " tokens");
  check_view(side == Side::key ? "keys" : "values", view, count, shape.kv_heads, dim_of(shape, side));
  check_values(side, view);
}

namespace {

// Every channel of a key lies on a cache line of its own, which the weights of a decoded token have pushed out of the
// cache: all are asked for before the first is written.
template <class Element>
void put_key(std::byte* at, std::ptrdiff_t tokens, const std::byte* row, int dim) {
  auto* column = reinterpret_cast<Element*>(at);
  const auto* values = reinterpret_cast<const Element*>(row);
  for (int d = 0; d < dim; ++d) __builtin_prefetch(column + d * tokens, 1);
  for (int d = 0; d < dim; ++d) column[d * tokens] = values[d];
}

void put_row(const PageStore::Impl& impl, Side side, std::byte* open, int token, const std::byte* row) {
  const std::size_t size = impl.rows.element;
  const int dim = dim_of(impl.shape, side);
  for (int head = 0; head < impl.shape.kv_heads; ++head, row += static_cast<std::size_t>(dim) * size) {
    if (side == Side::value) {
      std::memcpy(open + impl.rows.value_at(head, 0, token), row, static_cast<std::size_t>(dim) * size);
    } else {
      const auto put = size == 2 ? put_key<std::uint16_t> : put_key<std::uint32_t>;
      put(open + impl.rows.key_at(head, 0, token), impl.tokens(), row, dim);
    }
  }
}

// A page's rows as floats for reading: decoded once however many of its cells are asked for.
class PageReader {
 public:
  PageReader(const PageStore::Impl& impl, Side side) : impl_(impl), side_(side) {}

  float at(std::int64_t cell, int head, int channel) {
    select(cell / impl_.tokens());
    const auto token = static_cast<std::size_t>(cell % impl_.tokens());
    const Page& page = impl_.pages[static_cast<std::size_t>(page_)];
    if (!(side_ == Side::key ? page.key_written : page.value_written)[token]) return 0;
    if (page.open) return load(page.open.get(), impl_.rows, head, channel, static_cast<int>(token));
    const auto& exact = page.sealed->exact;
    const auto slot = std::find(exact.cells.begin(), exact.cells.end(), token);
    if (slot != exact.cells.end()) {
      return load(exact.rows.get(), cache::RowsLayout(impl_.shape, exact.capacity), head, channel,
                  static_cast<int>(slot - exact.cells.begin()));
    }
    const std::size_t row = side_ == Side::key ? static_cast<std::size_t>(channel) : token;
    const std::size_t column = side_ == Side::key ? token : static_cast<std::size_t>(channel);
    return decoded_[static_cast<std::size_t>(head) * head_size_ + row * stride_ + column];
  }

 private:
  float load(const std::byte* data, const cache::RowsLayout& rows, int head, int channel, int token) const {
    const std::size_t at = side_ == Side::key ? rows.key_at(head, channel, token) : rows.value_at(head, channel, token);
    return base::load_float(data + at, impl_.shape.dtype, 0);
  }

  void select(std::int64_t page) {
    if (page == page_) return;
    page_ = page;
    const Page& source = impl_.pages[static_cast<std::size_t>(page)];
    if (!source.sealed) return;
    const bool keys = side_ == Side::key;
    const int depth = keys ? impl_.shape.key_dim : impl_.tokens();
    stride_ = static_cast<std::size_t>(keys ? impl_.tokens() : base::round_up(impl_.shape.value_dim, tiles::kLanes));
    head_size_ = static_cast<std::size_t>(depth) * stride_;
    decoded_.resize(static_cast<std::size_t>(impl_.shape.kv_heads) * head_size_);
    for (int head = 0; head < impl_.shape.kv_heads; ++head) {
      float* out = decoded_.data() + static_cast<std::size_t>(head) * head_size_;
      const std::byte* block = source.sealed->block.get();
      if (keys) {
        cache::decode_keys(impl_.layout, impl_.shape.dtype, block, head, impl_.turns_of(source), out);
      } else {
        cache::decode_values(impl_.layout, impl_.shape.dtype, block, head, out);
      }
    }
  }

  const PageStore::Impl& impl_;
  Side side_;
  std::int64_t page_ = -1;
  std::size_t stride_ = 0;
  std::size_t head_size_ = 0;
  std::vector<float> decoded_;
};

}  // namespace

void PageStore::write(Side side, std::span<const std::int64_t> cells, const ConstView& rows,
                      std::span<const std::int64_t> positions) {
  Impl& impl = *impl_;
  const int dim = dim_of(impl.shape, side);
  impl.check_rows(side, rows, static_cast<std::int64_t>(cells.size()));
  check_cells(cells, impl.cells);
  if (!positions.empty() && positions.size() != cells.size()) {
    base::fail(ErrorCode::invalid_argument, "positions has " + std::to_string(positions.size()) + " entries for " +
                                                std::to_string(cells.size()) + " cells");
  }
  if (side == Side::key) impl.check_positions(cells, positions);
  const auto values = static_cast<std::size_t>(impl.shape.kv_heads) * static_cast<std::size_t>(dim);
  std::vector<float> buffer(values);
  std::vector<std::byte> narrow(values * impl.rows.element);
  for (const std::int64_t cell : cells) impl.open(cell / impl.tokens());  // all memory is there before the first change

  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::int64_t number = cells[i] / impl.tokens();
    const auto token = static_cast<std::size_t>(cells[i] % impl.tokens());
    Page& page = impl.pages[static_cast<std::size_t>(number)];
    kernels().narrow(load_row(rows, static_cast<std::int64_t>(i), buffer), narrow.data(), impl.shape.dtype,
                     static_cast<std::int64_t>(values));
    put_row(impl, side, page.open.get(), static_cast<int>(token), narrow.data());
    (side == Side::key ? page.key_written : page.value_written).set(token);
    page.exact.set(token, (positions.empty() ? cells[i] : positions[i]) < impl.recipe.sink);
    // Keys alone move the clock: values of the same call come later and must not make early pages look recent.
    if (side == Side::value) continue;
    if (page.positions) {
      page.positions[token] = static_cast<std::int32_t>(positions.empty() ? cells[i] : positions[i]);
    }
    page.observed.reset(token);  // a query of the row that was there before
    page.last_write = ++impl.rows_written;
    if (page.clocks) page.clocks[token] = impl.rows_written;
  }
}

void PageStore::read(Side side, std::span<const std::int64_t> cells, const View& out) const {
  const int dim = dim_of(impl_->shape, side);
  check_view("out", out, static_cast<std::int64_t>(cells.size()), impl_->shape.kv_heads, dim);
  check_cells(cells, impl_->cells);
  PageReader reader(*impl_, side);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (int head = 0; head < impl_->shape.kv_heads; ++head) {
      for (int d = 0; d < dim; ++d) {
        base::store_float(out.data, out.type,
                          static_cast<std::int64_t>(i) * out.stride[0] + head * out.stride[1] + d * out.stride[2],
                          reader.at(cells[i], head, d));
      }
    }
  }
}

void PageStore::copy_cells(const PageStore& from, std::int64_t from_first, std::int64_t first, std::int64_t count) {
  Impl& impl = *impl_;
  const Impl& source = *from.impl_;
  if (!(impl.recipe == source.recipe) || impl.shape.kv_heads != source.shape.kv_heads ||
      impl.shape.key_dim != source.shape.key_dim || impl.shape.value_dim != source.shape.value_dim ||
      impl.shape.dtype != source.shape.dtype) {
    base::fail(ErrorCode::invalid_argument, "copy_cells between stores of different recipe or shape");
  }
  if (count < 0 || from_first < 0 || first < 0 || from_first > source.cells - count || first > impl.cells - count) {
    base::fail(ErrorCode::out_of_range, "copy_cells of " + std::to_string(count) + " cells outside a store");
  }
  const PageStore snapshot = this == &from ? PageStore(from) : PageStore(impl.recipe, impl.shape, 0, impl.pool);
  const PageStore& origin = this == &from ? snapshot : from;
  if (this != &from) impl.take_rotation(source);
  if (this != &from && !impl.queries_seen) {
    impl.query_sums = source.query_sums;
    impl.query_moments = source.query_moments;
    impl.queries_seen = source.queries_seen;
  }
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t a = from_first + done;
    const std::int64_t b = first + done;
    const std::int64_t step =
        std::min({count - done, impl.tokens() - a % impl.tokens(), impl.tokens() - b % impl.tokens()});
    copy_run(*origin.impl_, a, b, step);
    done += step;
  }
  if (this != &from) impl.take_probes(source);
}

// Cells of one page to cells of one page.
void PageStore::copy_run(const Impl& source, std::int64_t from, std::int64_t to, std::int64_t count) {
  Impl& impl = *impl_;
  const std::int64_t from_page = from / impl.tokens();
  const std::int64_t to_page = to / impl.tokens();
  const Page& page = source.pages[static_cast<std::size_t>(from_page)];
  const bool aligned = from % impl.tokens() == to % impl.tokens();
  const bool whole =
      from % impl.tokens() == 0 && count >= source.valid_cells(from_page) && count >= impl.valid_cells(to_page);
  if (aligned && whole && page.sealed && source.valid_cells(from_page) == impl.valid_cells(to_page)) {
    impl.release(to_page);
    Page& target = impl.pages[static_cast<std::size_t>(to_page)];
    target.sealed = page.sealed;
    target.key_written = page.key_written;
    target.value_written = page.value_written;
    target.exact = page.exact;
    if (page.positions) target.positions = impl.make_positions(&page);
    return;
  }
  forget(to, count);
  for (const Side side : {Side::key, Side::value}) {
    std::vector<std::int64_t> read_cells, write_cells, positions;
    const cache::CellSet& written = side == Side::key ? page.key_written : page.value_written;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto token = static_cast<std::size_t>((from + i) % impl.tokens());
      if (!written[token]) continue;
      read_cells.push_back(from + i);
      write_cells.push_back(to + i);
      positions.push_back(page.exact[token] ? 0 : impl.recipe.sink);  // keeps a sink a sink
    }
    if (read_cells.empty()) continue;
    const int dim = dim_of(impl.shape, side);
    std::vector<float> rows(read_cells.size() * static_cast<std::size_t>(impl.shape.kv_heads) *
                            static_cast<std::size_t>(dim));
    const auto n = static_cast<std::int64_t>(read_cells.size());
    PageReader reader(source, side);
    for (std::int64_t i = 0, at = 0; i < n; ++i) {
      for (int head = 0; head < impl.shape.kv_heads; ++head) {
        for (int d = 0; d < dim; ++d, ++at) {
          rows[static_cast<std::size_t>(at)] = reader.at(read_cells[static_cast<std::size_t>(i)], head, d);
        }
      }
    }
    write(side, write_cells, dense_view(rows.data(), DType::f32, n, impl.shape.kv_heads, dim), positions);
    if (side == Side::value || !page.positions) continue;
    cache::Page& target = impl.pages[static_cast<std::size_t>(to_page)];
    for (std::int64_t i = 0; i < count; ++i) {
      target.positions[static_cast<std::size_t>((to + i) % impl.tokens())] =
          page.positions[static_cast<std::size_t>((from + i) % impl.tokens())];
    }
  }
  impl.copy_query_cells(page, from % impl.tokens(), to, count);
}

}  // namespace kvant
