// KittyKVCache: every call's keys are ranked, packed and held as one block; statistics follow the reconstructed keys.
#include <algorithm>
#include <limits>
#include <string>

#include "base/threads.hpp"
#include "exact/attend.hpp"
#include "exact/head_rows.hpp"
#include "exact/packed.hpp"
#include "exact/sequence.hpp"
#include "exact/sums.hpp"
#include "methods/kitty/reference.hpp"

namespace kvant::kitty {
namespace {

using exact::at;
using exact::ceil_divide;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

struct Settings {
  double hi_fraction = 0;
  int hi_bit = 0;
  int lo_bit = 0;
  std::int64_t group_size = 0;
};

// The keys of one call. Per head: the mask of hi channels, one bit each, then the packed matrix.
class KittyBlock final : public exact::Block {
 public:
  // Every head has as many hi channels as the others, so that one layout fits all.
  KittyBlock(const exact::SideShape& shape, std::int64_t tokens, const Settings& settings)
      : Block(shape, tokens),
        settings_(settings),
        mask_bytes_(base::round_up(size(ceil_divide(shape.dim, 8)), std::size_t{4})),
        layout_(tokens, shape.dim, settings.group_size, shape.type, widths(any_mask())),
        data_(base::allocate_zeroed(base::checked_multiply(size(shape.all_heads()), head_bytes()))) {}

  // mask: one byte per channel.
  void pack_head(std::int64_t head, const std::vector<std::uint8_t>& mask, const exact::ConstRows& keys) {
    for (std::int64_t c = 0; c < shape().dim; ++c) {
      if (mask[size(c)] != 0) head_data(head)[c / 8] |= std::byte{1} << (c % 8);
    }
    const exact::Widths head_widths = widths(mask);
    exact::Packer(layout_, head_widths).pack(keys, head_data(head) + mask_bytes_);
  }

  // Rows as the reference's functions return them: rounded to fp16, not yet to the input's type.
  void decode(std::int64_t head, std::int64_t first, const exact::Rows& out) const override {
    const exact::Widths widths = head_widths(head);
    exact::PackedReader(layout_, widths, head_data(head) + mask_bytes_, exact::Rounding::through_half).read(first, out);
  }

  std::size_t bytes() const override { return sizeof(KittyBlock) + size(shape().all_heads()) * head_bytes(); }

  std::int64_t saved_tokens() const override { return layout_.rows; }
  void transfer(exact::Archive& archive) override {
    archive.bytes(data_.get(), size(shape().all_heads()) * head_bytes());
    if (!archive.reads()) return;
    const std::size_t wide = widths(any_mask()).wide.size();
    for (std::int64_t head = 0; head < shape().all_heads(); ++head) {
      archive.require(head_widths(head).wide.size() == wide, "number of hi channels");
    }
  }

 private:
  std::size_t head_bytes() const { return mask_bytes_ + layout_.bytes; }
  std::byte* head_data(std::int64_t head) const { return data_.get() + size(head) * head_bytes(); }

  exact::Widths widths(const std::vector<std::uint8_t>& mask) const {
    return exact::Widths::mixed(mask, settings_.hi_bit, settings_.lo_bit);
  }
  std::vector<std::uint8_t> any_mask() const {
    std::vector<std::uint8_t> mask(size(shape().dim));
    std::fill_n(mask.begin(), hi_count(shape().dim, settings_.hi_fraction), std::uint8_t{1});
    return mask;
  }
  exact::Widths head_widths(std::int64_t head) const {
    std::vector<std::uint8_t> mask(size(shape().dim));
    for (std::int64_t c = 0; c < shape().dim; ++c) {
      mask[size(c)] = static_cast<std::uint8_t>(head_data(head)[c / 8] >> (c % 8)) & 1U;
    }
    return widths(mask);
  }

  Settings settings_;
  std::size_t mask_bytes_ = 0;
  exact::PackedLayout layout_;
  base::AlignedBytes data_;
};

// Sums over the tokens of the batch mean of rows, and of its square, per head and channel.
struct Statistics {
  std::vector<float> sum;             // [heads][dim]
  std::vector<float> sum_of_squares;  // [heads][dim]
};

// read(head, first, rows) fills rows with those of one batch element and head from `first` on.
template <typename Read>
Statistics sum_rows(const exact::SideShape& shape, std::int64_t tokens, int threads, const Read& read) {
  constexpr std::int64_t kAtOnce = 32;  // rows that stay in the first-level cache
  const exact::ColumnKernels& kernels = exact::columns();
  Statistics result{std::vector<float>(size(shape.heads * shape.dim)),
                    std::vector<float>(size(shape.heads * shape.dim))};
  base::parallel_for(shape.heads, threads, [&](std::int64_t head, int) {
    exact::FloatRows rows(std::min(kAtOnce, tokens), shape.dim);
    exact::FloatRows means(shape.batch == 1 ? 0 : std::min(kAtOnce, tokens), shape.dim);
    for (std::int64_t first = 0; first < tokens; first += kAtOnce) {
      const std::int64_t count = std::min(kAtOnce, tokens - first);
      exact::FloatRows& mean = shape.batch == 1 ? rows : means;
      if (shape.batch > 1) std::fill_n(mean.row(0), count * shape.dim, 0.0F);
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        read(b * shape.heads + head, first, rows.writable(count));
        if (shape.batch == 1) break;  // the mean of one is that one
        kernels.add(rows.as_one(), count * shape.dim, mean.row(0));
      }
      if (shape.batch > 1) kernels.multiply(exact::reciprocal(shape.batch), count * shape.dim, mean.row(0));
      kernels.add(mean.first(count), shape.dim, result.sum.data() + head * shape.dim);
      kernels.add_squares(mean.first(count), shape.dim, result.sum_of_squares.data() + head * shape.dim);
    }
  });
  return result;
}

// sum[i] += x[i]
void add(const std::vector<float>& x, std::vector<float>& sum) {
  const void* row = x.data();
  exact::columns().add({&row, 1, DType::f32}, static_cast<std::int64_t>(x.size()), sum.data());
}

Settings checked(const KVCacheConfig& config) {
  if (!(config.kitty_hi_fraction >= 0 && config.kitty_hi_fraction <= 1)) {
    base::fail(ErrorCode::invalid_argument,
               "kitty_hi_fraction = " + std::to_string(config.kitty_hi_fraction) + " is outside 0..1");
  }
  exact::require_bits("kitty_hi_bit", config.kitty_hi_bit);
  exact::require_bits("kitty_lo_bit", config.kitty_lo_bit);
  exact::require_group_size("kitty_group_size", config.kitty_group_size);
  exact::require_between("head_dim", config.head_dim, 1, 1 << 20);
  return {config.kitty_hi_fraction, static_cast<int>(config.kitty_hi_bit), static_cast<int>(config.kitty_lo_bit),
          config.kitty_group_size};
}

}  // namespace

struct KittyKVCache::Impl {
  KVCacheConfig config;
  Settings settings;
  std::int64_t head_dim = 0;
  exact::Sequence keys;
  exact::Sequence values;
  std::vector<float> sum;
  std::vector<float> sum_of_squares;
  std::int64_t n_keys = 0;
  std::int64_t compressed = 0;
  std::int64_t fp16_keys = 0;
  std::int64_t fp16_values = 0;

  // The reference's price of `tokens` keys of one head as one call.
  std::int64_t price(std::int64_t tokens, std::int64_t dim) const {
    const std::int64_t hi = hi_count(dim, settings.hi_fraction);
    const std::int64_t groups = ceil_divide(tokens, settings.group_size);
    const auto part = [&](std::int64_t channels, int bits) {
      return ceil_divide(tokens * channels * bits, 8) + groups * channels * 4;
    };
    return part(hi, settings.hi_bit) + part(dim - hi, settings.lo_bit);
  }

  // One byte per channel: the first block ranks its own rows, later ones follow the statistics.
  void choose_channels(const exact::HeadRows& rows, std::int64_t head, std::int64_t dim, std::uint8_t* mask) const {
    std::vector<float> means(size(dim));
    std::vector<float> variance(size(dim));
    if (n_keys == 0) {
      exact::column_variances(rows.all(), dim, means.data(), variance.data());
    } else {
      running_variance(sum.data() + head * dim, sum_of_squares.data() + head * dim, n_keys, dim, variance.data());
    }
    hi_mask(variance.data(), dim, hi_count(dim, settings.hi_fraction), mask);
  }

  std::unique_ptr<KittyBlock> pack(const ConstArray& keys, int threads) const {
    const exact::SideShape shape = exact::side_shape(keys);
    auto block = std::make_unique<KittyBlock>(shape, keys.extent[2], settings);
    base::parallel_for(shape.all_heads(), threads, [&](std::int64_t head, int) {
      const exact::HeadRows rows(keys, head / shape.heads, head % shape.heads);
      std::vector<std::uint8_t> mask(size(shape.dim));
      choose_channels(rows, head % shape.heads, shape.dim, mask.data());
      block->pack_head(head, mask, rows.all());
    });
    return block;
  }

  void add_keys(std::unique_ptr<KittyBlock> block, int threads) {
    const exact::SideShape& shape = block->shape();
    const std::size_t row_bytes = size(shape.all_heads() * block->tokens()) * shape.row_bytes();
    if (block->bytes() < row_bytes) {
      keys.push(std::move(block));
    } else {
      keys.append_rows(block->tokens(), threads, [&](std::int64_t head, std::int64_t row, float* out) {
        block->read(head, row, 1, out, shape.dim);
      });
    }
  }
};

KittyKVCache::KittyKVCache(const KVCacheConfig& config) : impl_(std::make_unique<Impl>()) {
  impl_->config = config;
  impl_->config.method = "kitty";
  impl_->settings = checked(config);
  impl_->head_dim = config.head_dim;
}
KittyKVCache::~KittyKVCache() = default;
KittyKVCache::KittyKVCache(KittyKVCache&&) noexcept = default;
KittyKVCache& KittyKVCache::operator=(KittyKVCache&&) noexcept = default;

void KittyKVCache::update(const ConstArray& keys, const ConstArray& values) {
  Impl& m = *impl_;
  exact::check_update(m.keys.shape(), m.values.shape(), keys, values);
  const exact::SideShape shape = exact::side_shape(keys);
  if (m.keys.shape().batch == 0) {
    m.keys = exact::Sequence(shape);
    m.values = exact::Sequence(exact::side_shape(values));
  }
  if (m.sum.empty()) {
    m.sum.resize(size(shape.heads * shape.dim));
    m.sum_of_squares.resize(m.sum.size());
  }
  const std::int64_t tokens = keys.extent[2];
  if (tokens == 0) return;

  auto block = m.pack(keys, threads());
  const Statistics added =
      sum_rows(shape, tokens, threads(),
               [&](std::int64_t head, std::int64_t first, const exact::Rows& out) { block->decode(head, first, out); });
  const std::int64_t before = m.keys.tokens();
  try {
    m.add_keys(std::move(block), threads());
    m.values.append_rows(values, threads());
  } catch (...) {
    m.keys.shorten(before);
    m.values.shorten(before);
    throw;
  }
  add(added.sum, m.sum);
  add(added.sum_of_squares, m.sum_of_squares);
  m.n_keys += tokens;
  m.compressed += shape.all_heads() * m.price(tokens, shape.dim);
  m.fp16_keys += 2 * shape.all_heads() * tokens * shape.dim;
  m.fp16_values += 2 * shape.all_heads() * tokens * shape.dim;
}

void KittyKVCache::fetch(const Array& keys, const Array& values, std::int64_t first) const {
  exact::check_fetch(impl_->keys, impl_->values, keys, values, first);
  impl_->keys.fetch(keys, first, threads());
  impl_->values.fetch(values, first, threads());
}

std::int64_t KittyKVCache::trim(std::int64_t n) {
  Impl& m = *impl_;
  exact::require_between("n", n, 0, std::numeric_limits<std::int64_t>::max());
  const std::int64_t dropped = std::min(n, offset());
  if (dropped == 0) return 0;
  const exact::SideShape& shape = m.keys.shape();
  const std::int64_t kept = offset() - dropped;
  if (m.n_keys <= dropped) {
    m.sum.clear();
    m.sum_of_squares.clear();
    m.n_keys = 0;
  } else {
    const Statistics gone =
        sum_rows(shape, dropped, threads(), [&](std::int64_t head, std::int64_t first, const exact::Rows& out) {
          m.keys.read(head, kept + first, out.count, static_cast<float*>(out.row[0]), shape.dim);
        });
    for (std::size_t i = 0; i < m.sum.size(); ++i) {
      m.sum[i] -= gone.sum[i];
      m.sum_of_squares[i] -= gone.sum_of_squares[i];
    }
    m.n_keys -= dropped;
  }
  const auto subtract = [](std::int64_t& counter, std::int64_t amount) {
    counter = std::max<std::int64_t>(0, counter - amount);
  };
  subtract(m.compressed, shape.all_heads() * m.price(dropped, m.head_dim));
  subtract(m.fp16_keys, 2 * shape.all_heads() * dropped * m.head_dim);
  subtract(m.fp16_values, 2 * shape.all_heads() * dropped * m.head_dim);
  m.keys.shorten(kept);
  m.values.shorten(kept);
  return dropped;
}

void KittyKVCache::attend(const ConstArray& queries, const Array& out, const ReferenceAttentionOptions& options) const {
  exact::attend(impl_->keys, impl_->values, queries, out, options);
}

void KittyKVCache::transfer(exact::Archive& archive) {
  Impl& m = *impl_;
  const auto packed = [&](const exact::SideShape& shape, std::int64_t tokens) {
    return std::make_unique<KittyBlock>(shape, tokens, m.settings);
  };
  m.keys.transfer(archive, packed);
  m.values.transfer(archive, [](const exact::SideShape&, std::int64_t) -> std::unique_ptr<exact::Block> {
    exact::Archive::bad("packed values");
  });
  archive.require(exact::is_pair(m.keys, m.values), "keys and values do not fit each other");
  const std::size_t channels = size(m.keys.shape().heads * m.keys.shape().dim);
  for (std::vector<float>* sums : {&m.sum, &m.sum_of_squares}) {
    archive.numbers(*sums);
    archive.require(sums->empty() || sums->size() == channels, "size of the statistics");
  }
  for (std::int64_t* counter : {&m.n_keys, &m.compressed, &m.fp16_keys, &m.fp16_values}) archive.number(*counter);
  archive.require(m.sum.size() == m.sum_of_squares.size() && (m.n_keys == 0 || m.sum.size() == channels),
                  "size of the statistics");
}

ReferenceShape KittyKVCache::shape() const {
  return exact::shape_of(impl_->keys, impl_->values);
}
const KVCacheConfig& KittyKVCache::config() const {
  return impl_->config;
}
std::int64_t KittyKVCache::offset() const {
  return impl_->keys.tokens();
}
std::size_t KittyKVCache::key_nbytes() const {
  return sizeof(Impl) + impl_->keys.bytes() +
         (impl_->sum.capacity() + impl_->sum_of_squares.capacity()) * sizeof(float);
}
std::size_t KittyKVCache::value_nbytes() const {
  return impl_->values.bytes();
}
std::int64_t KittyKVCache::compressed_key_bytes() const {
  return impl_->compressed;
}
std::int64_t KittyKVCache::fp16_key_bytes() const {
  return impl_->fp16_keys;
}
std::int64_t KittyKVCache::value_fp16_bytes() const {
  return impl_->fp16_values;
}
double KittyKVCache::assigned_avg_bits() const {
  const Settings& s = impl_->settings;
  const std::int64_t hi = hi_count(impl_->head_dim, s.hi_fraction);
  return static_cast<double>(hi * s.hi_bit + (impl_->head_dim - hi) * s.lo_bit) / static_cast<double>(impl_->head_dim);
}
double KittyKVCache::hi_fraction() const {
  return impl_->settings.hi_fraction;
}
std::int64_t KittyKVCache::hi_bit() const {
  return impl_->settings.hi_bit;
}
std::int64_t KittyKVCache::lo_bit() const {
  return impl_->settings.lo_bit;
}
std::int64_t KittyKVCache::group_size() const {
  return impl_->settings.group_size;
}
const std::vector<float>& KittyKVCache::key_sum() const {
  return impl_->sum;
}
const std::vector<float>& KittyKVCache::key_sq_sum() const {
  return impl_->sum_of_squares;
}
std::int64_t KittyKVCache::n_keys() const {
  return impl_->n_keys;
}

}  // namespace kvant::kitty
