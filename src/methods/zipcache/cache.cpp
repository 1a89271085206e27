// ZipCacheKVCache: every call is compressed alone; salient rows and the others are two packed matrices per head.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "base/threads.hpp"
#include "exact/attend.hpp"
#include "exact/head_rows.hpp"
#include "exact/packed.hpp"
#include "exact/sequence.hpp"
#include "exact/sums.hpp"
#include "methods/zipcache/reference.hpp"

namespace kvant::zipcache {
namespace {

using exact::ceil_divide;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

struct Settings {
  double hi_fraction = 0;
  int hi_bits = 0;
  int lo_bits = 0;
  std::int64_t group_size = 0;
  bool quantize_values = true;
};

// One side of one call. Per head: the mask, one bit per token (absent when all tokens are salient), the packed salient
// rows, the packed others; both in original order.
class ZipBlock final : public exact::Block {
 public:
  ZipBlock(const exact::SideShape& shape, std::int64_t tokens, std::int64_t hi, int hi_bits, int lo_bits,
           std::int64_t group_size)
      : Block(shape, tokens),
        hi_(hi),
        hi_widths_(exact::Widths::uniform(shape.dim, hi_bits)),
        lo_widths_(exact::Widths::uniform(shape.dim, lo_bits)),
        hi_layout_(hi, shape.dim, group_size, shape.type, hi_widths_),
        lo_layout_(tokens - hi, shape.dim, group_size, shape.type, lo_widths_),
        mask_bytes_(hi == tokens ? 0 : base::round_up(size(ceil_divide(tokens, 8)), std::size_t{4})),
        data_(base::allocate_zeroed(base::checked_multiply(size(shape.all_heads()), head_bytes()))) {}

  void pack_head(std::int64_t head, const ConstArray& x) {
    const exact::HeadRows rows(x, head / shape().heads, head % shape().heads);
    std::vector<const void*> salient;
    std::vector<const void*> others;
    choose_rows(head, rows, salient, others);
    const auto as_rows = [&](const std::vector<const void*>& part) {
      return exact::ConstRows{part.data(), static_cast<std::int64_t>(part.size()), rows.type()};
    };
    std::byte* data = head_data(head) + mask_bytes_;
    exact::Packer(hi_layout_, hi_widths_).pack(as_rows(salient), data);
    exact::Packer(lo_layout_, lo_widths_).pack(as_rows(others), data + hi_layout_.bytes);
  }

  std::size_t bytes() const override {
    return sizeof(ZipBlock) + hi_widths_.bits.capacity() + lo_widths_.bits.capacity() +
           size(shape().all_heads()) * head_bytes();
  }

 protected:
  void decode(std::int64_t head, std::int64_t first, const exact::Rows& out) const override {
    std::vector<void*> salient;
    std::vector<void*> others;
    for (std::int64_t r = 0; r < out.count; ++r) (is_salient(head, first + r) ? salient : others).push_back(out.row[r]);
    const auto as_rows = [&](const std::vector<void*>& part) {
      return exact::Rows{part.data(), static_cast<std::int64_t>(part.size()), out.type};
    };
    const std::int64_t salient_before = count_salient(head, first);
    const std::byte* data = head_data(head) + mask_bytes_;
    exact::PackedReader(hi_layout_, hi_widths_, data).read(salient_before, as_rows(salient));
    exact::PackedReader(lo_layout_, lo_widths_, data + hi_layout_.bytes).read(first - salient_before, as_rows(others));
  }

  std::int64_t saved_tokens() const override { return hi_layout_.rows + lo_layout_.rows; }
  void transfer(exact::Archive& archive) override {
    archive.bytes(data_.get(), size(shape().all_heads()) * head_bytes());
    if (!archive.reads()) return;
    for (std::int64_t head = 0; head < shape().all_heads(); ++head) {
      archive.require(count_salient(head, saved_tokens()) == hi_layout_.rows, "number of salient tokens");
    }
  }

 private:
  std::size_t head_bytes() const { return mask_bytes_ + hi_layout_.bytes + lo_layout_.bytes; }
  std::byte* head_data(std::int64_t head) const { return data_.get() + size(head) * head_bytes(); }
  bool is_salient(std::int64_t head, std::int64_t token) const {
    return mask_bytes_ == 0 || (head_data(head)[token / 8] >> (token % 8) & std::byte{1}) != std::byte{0};
  }
  // Salient tokens before `token`.
  std::int64_t count_salient(std::int64_t head, std::int64_t token) const {
    if (mask_bytes_ == 0) return token;
    std::int64_t count = 0;
    for (std::int64_t byte = 0; byte < token / 8; ++byte) {
      count += std::popcount(static_cast<unsigned>(head_data(head)[byte]));
    }
    for (std::int64_t t = token / 8 * 8; t < token; ++t) count += is_salient(head, t) ? 1 : 0;
    return count;
  }

  void choose_rows(std::int64_t head, const exact::HeadRows& rows, std::vector<const void*>& salient,
                   std::vector<const void*>& others) {
    const std::int64_t tokens = rows.count();
    std::vector<std::uint8_t> mask(size(tokens), 1);
    if (mask_bytes_ != 0) {
      std::vector<float> norms(size(tokens));
      exact::row_norms(rows.all(), shape().dim, norms.data());
      mark_salient(norms.data(), tokens, hi_, mask.data());
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      (mask[size(t)] != 0 ? salient : others).push_back(rows.row(t));
      if (mask_bytes_ != 0 && mask[size(t)] != 0) head_data(head)[t / 8] |= std::byte{1} << (t % 8);
    }
  }

  std::int64_t hi_ = 0;
  exact::Widths hi_widths_;
  exact::Widths lo_widths_;
  exact::PackedLayout hi_layout_;
  exact::PackedLayout lo_layout_;
  std::size_t mask_bytes_ = 0;
  base::AlignedBytes data_;
};

Settings checked(const KVCacheConfig& config) {
  if (!(config.zipcache_hi_fraction >= 0 && config.zipcache_hi_fraction <= 1)) {
    base::fail(ErrorCode::invalid_argument,
               "zipcache_hi_fraction = " + std::to_string(config.zipcache_hi_fraction) + " is outside 0..1");
  }
  exact::require_bits("zipcache_hi_bits", config.zipcache_hi_bits);
  exact::require_bits("zipcache_lo_bits", config.zipcache_lo_bits);
  exact::require_group_size("zipcache_group_size", config.zipcache_group_size);
  return {config.zipcache_hi_fraction, static_cast<int>(config.zipcache_hi_bits),
          static_cast<int>(config.zipcache_lo_bits), config.zipcache_group_size, config.zipcache_quantize_values};
}

// The reference's counters of one side.
struct Counters {
  std::int64_t compressed = 0;
  std::int64_t baseline = 0;
  std::int64_t fp16 = 0;
};

}  // namespace

struct ZipCacheKVCache::Impl {
  KVCacheConfig config;
  Settings settings;
  exact::Sequence keys;
  exact::Sequence values;
  Counters key_counters;
  Counters value_counters;

  // The values of a call are all salient.
  std::unique_ptr<ZipBlock> make_block(const exact::SideShape& shape, std::int64_t tokens, bool is_keys) const {
    return std::make_unique<ZipBlock>(shape, tokens, is_keys ? hi_count(tokens, settings.hi_fraction) : tokens,
                                      settings.hi_bits, is_keys ? settings.lo_bits : settings.hi_bits,
                                      settings.group_size);
  }

  // Packs one side of a call.
  std::unique_ptr<ZipBlock> pack(const ConstArray& x, bool is_keys, int threads) const {
    auto block = make_block(exact::side_shape(x), x.extent[2], is_keys);
    base::parallel_for(x.extent[0] * x.extent[1], threads, [&](std::int64_t head, int) { block->pack_head(head, x); });
    return block;
  }

  static void add(exact::Sequence& side, std::unique_ptr<ZipBlock> block, int threads) {
    const exact::SideShape shape = block->shape();
    const std::size_t row_bytes = size(shape.all_heads() * block->tokens()) * shape.row_bytes();
    if (block->bytes() < row_bytes) {
      side.push(std::move(block));
    } else {
      side.append_rows(block->tokens(), threads, [&](std::int64_t head, std::int64_t row, float* out) {
        block->read(head, row, 1, out, shape.dim);
      });
    }
  }

  void count(Counters& counters, const ConstArray& x, std::int64_t hi, bool compressed) const {
    const std::int64_t heads = x.extent[0] * x.extent[1];
    const std::int64_t tokens = x.extent[2];
    const std::int64_t dim = x.extent[3];
    counters.fp16 += 2 * heads * tokens * dim;
    if (!compressed) return;
    counters.compressed +=
        heads * mixed_bytes(hi, tokens - hi, dim, settings.hi_bits, settings.lo_bits, settings.group_size);
    counters.baseline += heads * base_only_bytes(tokens, dim, settings.lo_bits, settings.group_size);
  }
};

ZipCacheKVCache::ZipCacheKVCache(const KVCacheConfig& config) : impl_(std::make_unique<Impl>()) {
  impl_->config = config;
  impl_->config.method = "zipcache";
  impl_->settings = checked(config);
}
ZipCacheKVCache::~ZipCacheKVCache() = default;
ZipCacheKVCache::ZipCacheKVCache(ZipCacheKVCache&&) noexcept = default;
ZipCacheKVCache& ZipCacheKVCache::operator=(ZipCacheKVCache&&) noexcept = default;

void ZipCacheKVCache::update(const ConstArray& keys, const ConstArray& values) {
  Impl& m = *impl_;
  exact::check_update(m.keys.shape(), m.values.shape(), keys, values);
  if (m.keys.shape().batch == 0) {
    m.keys = exact::Sequence(exact::side_shape(keys));
    m.values = exact::Sequence(exact::side_shape(values));
  }
  const std::int64_t tokens = keys.extent[2];
  if (tokens == 0) return;

  const std::int64_t hi = hi_count(tokens, m.settings.hi_fraction);
  const bool quantized = m.settings.quantize_values;
  auto key_block = m.pack(keys, true, threads());
  auto value_block = quantized ? m.pack(values, false, threads()) : nullptr;
  const std::int64_t before = m.keys.tokens();
  try {
    Impl::add(m.keys, std::move(key_block), threads());
    if (quantized) {
      Impl::add(m.values, std::move(value_block), threads());
    } else {
      m.values.append_rows(values, threads());
    }
  } catch (...) {
    m.keys.shorten(before);
    m.values.shorten(before);
    throw;
  }
  m.count(m.key_counters, keys, hi, true);
  m.count(m.value_counters, values, tokens, quantized);
}

void ZipCacheKVCache::fetch(const Array& keys, const Array& values, std::int64_t first) const {
  exact::check_fetch(impl_->keys, impl_->values, keys, values, first);
  impl_->keys.fetch(keys, first, threads());
  impl_->values.fetch(values, first, threads());
}

std::int64_t ZipCacheKVCache::trim(std::int64_t n) {
  exact::require_between("n", n, 0, std::numeric_limits<std::int64_t>::max());
  const std::int64_t dropped = std::min(n, offset());
  const std::int64_t kept = offset() - dropped;
  impl_->keys.shorten(kept);
  impl_->values.shorten(kept);
  return dropped;
}

void ZipCacheKVCache::attend(const ConstArray& queries, const Array& out,
                             const ReferenceAttentionOptions& options) const {
  exact::attend(impl_->keys, impl_->values, queries, out, options);
}

void ZipCacheKVCache::transfer(exact::Archive& archive) {
  Impl& m = *impl_;
  const auto packed = [&](bool is_keys) {
    return [&m, is_keys](const exact::SideShape& shape, std::int64_t tokens) {
      return m.make_block(shape, tokens, is_keys);
    };
  };
  m.keys.transfer(archive, packed(true));
  m.values.transfer(archive, packed(false));
  archive.require(exact::is_pair(m.keys, m.values), "keys and values do not fit each other");
  for (Counters* counters : {&m.key_counters, &m.value_counters}) {
    for (std::int64_t* counter : {&counters->compressed, &counters->baseline, &counters->fp16})
      archive.number(*counter);
  }
}

ReferenceShape ZipCacheKVCache::shape() const {
  return exact::shape_of(impl_->keys, impl_->values);
}
const KVCacheConfig& ZipCacheKVCache::config() const {
  return impl_->config;
}
std::int64_t ZipCacheKVCache::offset() const {
  return impl_->keys.tokens();
}
std::size_t ZipCacheKVCache::key_nbytes() const {
  return sizeof(Impl) + impl_->keys.bytes();
}
std::size_t ZipCacheKVCache::value_nbytes() const {
  return impl_->values.bytes();
}
std::int64_t ZipCacheKVCache::compressed_key_bytes() const {
  return impl_->key_counters.compressed;
}
std::int64_t ZipCacheKVCache::compressed_value_bytes() const {
  return impl_->value_counters.compressed;
}
std::int64_t ZipCacheKVCache::baseline_key_bytes() const {
  return impl_->key_counters.baseline;
}
std::int64_t ZipCacheKVCache::baseline_value_bytes() const {
  return impl_->value_counters.baseline;
}
std::int64_t ZipCacheKVCache::fp16_key_bytes() const {
  return impl_->key_counters.fp16;
}
std::int64_t ZipCacheKVCache::fp16_value_bytes() const {
  return impl_->value_counters.fp16;
}
double ZipCacheKVCache::compression_ratio() const {
  const Counters& keys = impl_->key_counters;
  return keys.compressed == 0 ? 1.0 : static_cast<double>(keys.fp16) / static_cast<double>(keys.compressed);
}
double ZipCacheKVCache::effective_avg_bits() const {
  const Counters& keys = impl_->key_counters;
  if (keys.fp16 == 0) return impl_->settings.hi_bits;
  return 16.0 * static_cast<double>(keys.compressed) / static_cast<double>(keys.fp16);
}

}  // namespace kvant::zipcache
