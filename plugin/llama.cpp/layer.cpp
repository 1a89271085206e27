#include "layer.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "rotation.hpp"

namespace kvant::llama {
namespace {

// Rows converted at a time between the store and the host's type; bounds the scratch memory of a state file.
constexpr std::int64_t kChunkRows = 256;

DType store_type(std::int32_t key_type, std::int32_t value_type) {
  if (key_type == abi::kF32 && value_type == abi::kF32) return DType::f32;
  if (key_type == abi::kBF16 && value_type == abi::kBF16) return DType::bf16;
  return DType::f16;
}

std::vector<std::int64_t> consecutive(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

bool all_zero(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return value == 0.0F; });
}

}  // namespace

void Layer::add(Side side, CacheTensor tensor) {
  tensors_[static_cast<std::size_t>(side)] = std::move(tensor);
}

void Layer::pack(const Recipe& recipe, const Heads& heads, const std::shared_ptr<PagePool>& pool) {
  const CacheTensor& key = tensor(Side::key);
  const CacheTensor& value = tensor(Side::value);
  if (key.data == nullptr || value.data == nullptr) throw std::runtime_error("keys and values are not both cached");
  if (key.cells != value.cells || key.streams != value.streams) throw std::runtime_error("K and V differ in cells");
  if (key.row_values != std::int64_t{heads.kv_heads} * heads.key_dim ||
      value.row_values != std::int64_t{heads.kv_heads} * heads.value_dim) {
    throw std::runtime_error("rows are not made of the heads that attention reads");
  }
  const CacheShape shape{heads.kv_heads, heads.key_dim, heads.value_dim,
                         store_type(key.codec.type(), value.codec.type())};
  std::vector<PageStore> stores;
  stores.reserve(static_cast<std::size_t>(key.streams));
  for (std::int64_t s = 0; s < key.streams; ++s) stores.emplace_back(recipe, shape, key.cells, pool);
  stores_ = std::move(stores);
  heads_ = heads;
  dirty_.assign(static_cast<std::size_t>(key.streams), 0);
  written_.assign(static_cast<std::size_t>(key.streams * key.cells), 0);
  mode_ = Mode::packed;
}

void Layer::pass_through(std::string reason) {
  reason_ = std::move(reason);
  mode_ = Mode::raw;
}

void Layer::notice_rotation(const abi::Tensor* rows) {
  if (rotation_ || mode_ != Mode::packed) return;  // before an attention was seen, heads are unknown
  try {
    rotation_ = rotation_of_keys(rows, heads_.key_dim);
    for (PageStore& s : stores_) s.set_key_rotation(*rotation_);
  } catch (const std::exception& error) {
    rotation_.reset();
    rotation_problem_ = error.what();
  }
}

const KeyRotation& Layer::known_rotation() const {
  if (rotation_) return *rotation_;
  throw std::runtime_error("layer " + std::to_string(index_) + ": keys before RoPE are asked for, but " +
                           rotation_problem_);
}

void Layer::shift_keys(std::span<const std::int64_t> rows, std::span<const std::int64_t> distances) {
  for_each_stream_run(rows, [&](std::int64_t stream, std::size_t first, std::span<const std::int64_t> cells) {
    stores_[static_cast<std::size_t>(stream)].shift_keys(cells, distances.subspan(first, cells.size()));
    dirty_[static_cast<std::size_t>(stream)] = 1;
  });
}

// Calls visit(stream, index of the first row, cells) for every run of rows that lie in one stream.
template <typename Visit>
void Layer::for_each_stream_run(std::span<const std::int64_t> rows, Visit visit) const {
  const CacheTensor& key = tensors_[0];
  std::vector<std::int64_t> cells;
  for (std::size_t first = 0; first < rows.size();) {
    const std::int64_t stream = stream_of(rows[first]);
    if (rows[first] < 0 || stream >= key.streams) throw std::runtime_error("a row index is outside of the cache");
    cells.clear();
    std::size_t i = first;
    for (; i < rows.size() && rows[i] >= 0 && stream_of(rows[i]) == stream; ++i) {
      cells.push_back(rows[i] - stream * key.cells);
    }
    visit(stream, first, std::span<const std::int64_t>(cells));
    first = i;
  }
}

void Layer::write(Side side, std::span<const std::int64_t> rows, const ConstView& values,
                  std::span<const std::int64_t> positions) {
  if (side == Side::key && needs_rotation()) static_cast<void>(known_rotation());
  for_each_stream_run(rows, [&](std::int64_t stream, std::size_t first, std::span<const std::int64_t> cells) {
    ConstView part = values;
    part.extent[0] = static_cast<std::int64_t>(cells.size());
    part.data = static_cast<const std::byte*>(values.data) +
                static_cast<std::int64_t>(first) * values.stride[0] * static_cast<std::int64_t>(size_of(values.type));
    stores_[static_cast<std::size_t>(stream)].write(
        side, cells, part, positions.empty() ? positions : positions.subspan(first, cells.size()));
    dirty_[static_cast<std::size_t>(stream)] = 1;
    mark(stream, cells);
  });
}

void Layer::write(Side side, std::span<const std::int64_t> rows, const float* values,
                  std::span<const std::int64_t> positions) {
  const auto count = static_cast<std::int64_t>(rows.size());
  write(side, rows, dense_view(values, DType::f32, count, heads_.kv_heads, dim(side)), positions);
}

void Layer::read(Side side, std::span<const std::int64_t> rows, float* values) const {
  const std::int64_t row_values = tensor(side).row_values;
  for_each_stream_run(rows, [&](std::int64_t stream, std::size_t first, std::span<const std::int64_t> cells) {
    float* out = values + static_cast<std::int64_t>(first) * row_values;
    const auto count = static_cast<std::int64_t>(cells.size());
    store(stream).read(side, cells, dense_view(out, DType::f32, count, heads_.kv_heads, dim(side)));
  });
}

// Keeps the count of complete cells, which a store does not have.
void Layer::mark(std::int64_t stream, std::span<const std::int64_t> cells) {
  const std::int64_t base = stream * tensors_[0].cells;
  for (const std::int64_t cell : cells) {
    std::uint8_t& seen = written_[static_cast<std::size_t>(base + cell)];
    if (seen == 0 && store(stream).is_written(cell)) {
      seen = 1;
      ++cells_written_;
    }
  }
}

void Layer::recount(std::int64_t stream) {
  const std::int64_t base = stream * tensors_[0].cells;
  for (std::int64_t cell = 0; cell < tensors_[0].cells; ++cell) {
    std::uint8_t& seen = written_[static_cast<std::size_t>(base + cell)];
    cells_written_ -= seen;
    seen = store(stream).is_written(cell) ? 1 : 0;
    cells_written_ += seen;
  }
}

void Layer::get_bytes(Side side, std::size_t offset, void* data, std::size_t size) const {
  const CacheTensor& t = tensor(side);
  auto* out = static_cast<std::byte*>(data);
  std::vector<float> values;
  std::vector<std::byte> image;
  const std::size_t end = offset + size;
  for (std::size_t at = offset; at < end;) {
    const auto first = static_cast<std::int64_t>(at / t.row_bytes);
    const auto behind = static_cast<std::int64_t>((end + t.row_bytes - 1) / t.row_bytes);
    const std::int64_t count = std::min(kChunkRows, behind - first);
    values.resize(static_cast<std::size_t>(count * t.row_values));
    image.resize(static_cast<std::size_t>(count) * t.row_bytes);
    read(side, consecutive(first, count), values.data());
    t.codec.encode(values.data(), image.data(), count * t.row_values);
    const std::size_t skip = at - static_cast<std::size_t>(first) * t.row_bytes;
    const std::size_t part = std::min(image.size() - skip, end - at);
    std::memcpy(out + (at - offset), image.data() + skip, part);
    at += part;
  }
}

void Layer::set_bytes(Side side, std::size_t offset, const void* data, std::size_t size, bool keep_gaps) {
  const CacheTensor& t = tensor(side);
  const auto* in = static_cast<const std::byte*>(data);
  std::vector<float> values;
  std::vector<std::byte> image;
  const std::size_t end = offset + size;
  for (std::size_t at = offset; at < end;) {
    const auto first = static_cast<std::int64_t>(at / t.row_bytes);
    const auto behind = static_cast<std::int64_t>((end + t.row_bytes - 1) / t.row_bytes);
    const std::int64_t count = std::min(kChunkRows, behind - first);
    image.resize(static_cast<std::size_t>(count) * t.row_bytes);
    const std::size_t skip = at - static_cast<std::size_t>(first) * t.row_bytes;
    const std::size_t part = std::min(image.size() - skip, end - at);
    // Rows that are only partly given keep their other values.
    if (part != image.size())
      get_bytes(side, static_cast<std::size_t>(first) * t.row_bytes, image.data(), image.size());
    std::memcpy(image.data() + skip, in + (at - offset), part);
    values.resize(static_cast<std::size_t>(count * t.row_values));
    t.codec.decode(image.data(), values.data(), count * t.row_values);
    std::vector<std::int64_t> rows = consecutive(first, count);
    if (keep_gaps) {
      std::size_t kept = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const float* row = values.data() + static_cast<std::int64_t>(i) * t.row_values;
        if (!any_written(rows[i]) && all_zero(row, t.row_values)) continue;
        std::copy_n(row, t.row_values, values.data() + static_cast<std::int64_t>(kept) * t.row_values);
        rows[kept++] = rows[i];
      }
      rows.resize(kept);
    }
    write(side, rows, values.data());
    at += part;
  }
}

void Layer::copy_stream(std::int64_t from, std::int64_t to) {
  stores_[static_cast<std::size_t>(to)].copy_cells(store(from), 0, 0, tensors_[0].cells);
  recount(to);
}

void Layer::clear() {
  for (PageStore& s : stores_) s.clear();
  std::fill(written_.begin(), written_.end(), std::uint8_t{0});
  std::fill(dirty_.begin(), dirty_.end(), std::uint8_t{0});
  cells_written_ = 0;
}

void Layer::seal(int threads) {
  for (std::size_t s = 0; s < stores_.size(); ++s) {
    if (dirty_[s] != 0) stores_[s].seal_ready(threads);
    dirty_[s] = 0;
  }
}

StoreBytes Layer::bytes() const {
  return PageStore::bytes_of(stores_);
}

LayerReport Layer::report() const {
  LayerReport r;
  r.name = std::string("l").append(std::to_string(index_));
  r.kv_heads = heads_.kv_heads;
  r.key_dim = heads_.key_dim;
  r.value_dim = heads_.value_dim;
  r.cells = tensors_[0].cells * tensors_[0].streams;
  r.cells_written = cells_written_;
  r.bytes = bytes();
  for (const PageStore& s : stores_) {
    const StoreCounts c = s.counts();
    r.counts.sealed_pages += c.sealed_pages;
    r.counts.open_pages += c.open_pages;
    r.counts.seals += c.seals;
    r.counts.reopens += c.reopens;
    r.counts.blind_seals += c.blind_seals;
  }
  const PageStore& any = stores_.front();
  r.recipe = to_text(any.recipe());
  r.asymptotic_bits = any.recipe().quantizes() ? any.layout().bits_per_value : 8.0 * size_of(any.shape().dtype);
  return r;
}

}  // namespace kvant::llama
