// KittyKVCache: every call's keys are ranked, packed and held as one block; statistics follow the reconstructed keys.
#include <algorithm>
#include <limits>
#include <string>

#include "base/threads.hpp"
#include "exact/attend.hpp"
#include "exact/columns.hpp"
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

void round_to_half(float* x, std::int64_t n) {
  std::vector<std::uint16_t> half(size(n));
  tiles::kernels().narrow(x, half.data(), DType::f16, n);
  tiles::kernels().widen(half.data(), DType::f16, x, n);
}

// The keys of one call. Per head: the mask of hi channels, one bit each, then the packed matrix.
class KittyBlock final : public exact::Block {
 public:
  // masks: one byte per channel, [heads][dim].
  KittyBlock(const exact::SideShape& shape, std::int64_t tokens, const Settings& settings,
             const std::vector<std::uint8_t>& masks)
      : Block(shape, tokens),
        settings_(settings),
        mask_bytes_(base::round_up(size(ceil_divide(shape.dim, 8)), std::size_t{4})),
        layout_(tokens, shape.dim, settings.group_size, shape.type, widths(masks.data())),
        data_(base::allocate_zeroed(base::checked_multiply(size(shape.all_heads()), head_bytes()))) {
    for (std::int64_t head = 0; head < shape.all_heads(); ++head) {
      for (std::int64_t c = 0; c < shape.dim; ++c) {
        if (masks[size(head * shape.dim + c)] != 0) head_data(head)[c / 8] |= std::byte{1} << (c % 8);
      }
    }
  }

  void pack_head(std::int64_t head, const ConstArray& keys) {
    const exact::Widths widths = head_widths(head);
    exact::Packer(layout_, widths)
        .pack([&](std::int64_t row,
                  float* out) { exact::row_of(keys, head / shape().heads, head % shape().heads, row).load(out); },
              head_data(head) + mask_bytes_);
  }

  // Rows as the reference's functions return them: rounded to fp16, not yet to the input's type.
  void read_half(std::int64_t head, std::int64_t first, std::int64_t count, float* out) const {
    const exact::Widths widths = head_widths(head);
    exact::PackedReader reader(layout_, widths, head_data(head) + mask_bytes_);
    for (std::int64_t r = 0; r < count; ++r) {
      reader.read(first + r, out + r * shape().dim);
      round_to_half(out + r * shape().dim, shape().dim);
    }
  }

  std::size_t bytes() const override { return sizeof(KittyBlock) + size(shape().all_heads()) * head_bytes(); }

 protected:
  void decode(std::int64_t head, std::int64_t first, std::int64_t count, float* out,
              std::int64_t stride) const override {
    const exact::Widths widths = head_widths(head);
    exact::PackedReader reader(layout_, widths, head_data(head) + mask_bytes_);
    for (std::int64_t r = 0; r < count; ++r) {
      reader.read(first + r, out + r * stride);
      if (shape().type != DType::f16) round_to_half(out + r * stride, shape().dim);
    }
  }

 private:
  std::size_t head_bytes() const { return mask_bytes_ + layout_.bytes; }
  std::byte* head_data(std::int64_t head) const { return data_.get() + size(head) * head_bytes(); }

  exact::Widths widths(const std::uint8_t* mask) const {
    return exact::Widths::mixed({mask, size(shape().dim)}, settings_.hi_bit, settings_.lo_bit);
  }
  exact::Widths head_widths(std::int64_t head) const {
    std::vector<std::uint8_t> mask(size(shape().dim));
    for (std::int64_t c = 0; c < shape().dim; ++c) {
      mask[size(c)] = static_cast<std::uint8_t>(head_data(head)[c / 8] >> (c % 8)) & 1U;
    }
    return widths(mask.data());
  }

  Settings settings_;
  std::size_t mask_bytes_ = 0;
  exact::PackedLayout layout_;
  base::AlignedBytes data_;
};

// Population variance of each channel over the rows of one head.
void block_variance(const ConstArray& keys, std::int64_t batch, std::int64_t head, float* variance) {
  const exact::ColumnKernels& kernels = exact::columns();
  const std::int64_t rows = keys.extent[2];
  const std::int64_t dim = keys.extent[3];
  std::vector<float> row(size(dim));
  std::vector<float> mean(size(dim));
  for (std::int64_t r = 0; r < rows; ++r) {
    exact::row_of(keys, batch, head, r).load(row.data());
    kernels.add(row.data(), dim, mean.data());
  }
  kernels.multiply(exact::reciprocal(rows), dim, mean.data());
  std::fill_n(variance, dim, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    exact::row_of(keys, batch, head, r).load(row.data());
    kernels.add_squared_differences(row.data(), mean.data(), dim, variance);
  }
  kernels.multiply(exact::reciprocal(rows), dim, variance);
}

// Sums over the tokens of the batch mean of rows, and of its square, per head and channel.
struct Statistics {
  std::vector<float> sum;             // [heads][dim]
  std::vector<float> sum_of_squares;  // [heads][dim]
};

// read(head, first, count, float* out) gives rows of one batch element and head.
template <typename Read>
Statistics sum_rows(const exact::SideShape& shape, std::int64_t tokens, int threads, const Read& read) {
  const std::int64_t at_once = std::min<std::int64_t>(128, tokens);
  const exact::ColumnKernels& kernels = exact::columns();
  Statistics result{std::vector<float>(size(shape.heads * shape.dim)),
                    std::vector<float>(size(shape.heads * shape.dim))};
  base::parallel_for(shape.heads, threads, [&](std::int64_t head, int) {
    std::vector<float> rows(size(at_once * shape.dim));
    std::vector<float> mean(size(at_once * shape.dim));
    for (std::int64_t first = 0; first < tokens; first += at_once) {
      const std::int64_t count = std::min(at_once, tokens - first);
      std::fill(mean.begin(), mean.end(), 0.0F);
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        read(b * shape.heads + head, first, count, rows.data());
        kernels.add(rows.data(), count * shape.dim, mean.data());
      }
      kernels.multiply(exact::reciprocal(shape.batch), count * shape.dim, mean.data());
      for (std::int64_t r = 0; r < count; ++r) {
        kernels.add(mean.data() + r * shape.dim, shape.dim, result.sum.data() + head * shape.dim);
        kernels.add_squares(mean.data() + r * shape.dim, shape.dim, result.sum_of_squares.data() + head * shape.dim);
      }
    }
  });
  return result;
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

  // One byte per channel, [batch * heads][dim]: the first block ranks itself, later ones follow the statistics.
  std::vector<std::uint8_t> masks(const ConstArray& x, int threads) const {
    const std::int64_t heads = x.extent[1];
    const std::int64_t dim = x.extent[3];
    const std::int64_t hi = hi_count(dim, settings.hi_fraction);
    std::vector<std::uint8_t> result(size(x.extent[0] * heads * dim));
    base::parallel_for(x.extent[0] * heads, threads, [&](std::int64_t head, int) {
      std::vector<float> variance(size(dim));
      if (n_keys == 0) {
        block_variance(x, head / heads, head % heads, variance.data());
      } else {
        const std::int64_t first = head % heads * dim;
        running_variance(sum.data() + first, sum_of_squares.data() + first, n_keys, dim, variance.data());
      }
      hi_mask(variance.data(), dim, hi, result.data() + head * dim);
    });
    return result;
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

  auto block = std::make_unique<KittyBlock>(shape, tokens, m.settings, m.masks(keys, threads()));
  base::parallel_for(shape.all_heads(), threads(), [&](std::int64_t head, int) { block->pack_head(head, keys); });
  Statistics added =
      sum_rows(shape, tokens, threads(), [&](std::int64_t head, std::int64_t first, std::int64_t count, float* out) {
        block->read_half(head, first, count, out);
      });
  const std::int64_t before = m.keys.tokens();
  try {
    m.add_keys(std::move(block), threads());
    m.values.append_rows(values, threads());
  } catch (...) {
    m.keys.shorten(before);
    m.values.shorten(before);
    throw;
  }
  exact::columns().add(added.sum.data(), shape.heads * shape.dim, m.sum.data());
  exact::columns().add(added.sum_of_squares.data(), shape.heads * shape.dim, m.sum_of_squares.data());
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
        sum_rows(shape, dropped, threads(), [&](std::int64_t head, std::int64_t first, std::int64_t count, float* out) {
          m.keys.read(head, kept + first, count, out, shape.dim);
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
