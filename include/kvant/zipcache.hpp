// ZipCache as the reference package defines it: tokens with a large key norm in one width, the others in a narrower
// one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kvant/array.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant::zipcache {

// A compressed matrix; dense row-major members with the reference's names.
struct ZipCacheState {
  std::vector<std::uint8_t> hi_codes;  // [n_hi, D]
  std::vector<float> hi_scales;        // [hi groups, D]
  std::vector<float> hi_zeros;         // [hi groups, D]
  std::vector<std::uint8_t> lo_codes;  // [n_lo, D]
  std::vector<float> lo_scales;
  std::vector<float> lo_zeros;
  std::vector<std::uint8_t> hi_mask;  // [S], 1 = salient
  int hi_bits = 4;
  int lo_bits = 2;
  std::int64_t seq_len = 0;
  std::int64_t head_dim = 0;
  std::int64_t group_size = 32;
};

struct ChannelCodes {
  std::vector<std::uint8_t> codes;  // [N, D]
  std::vector<float> scales;        // [G, D]
  std::vector<float> zeros;         // [G, D], the groups' minima
};

// L2 norm of every row of keys [S, D].
std::vector<float> token_key_norms(const ConstArray& keys);

// 1 for the ceil(S * hi_fraction) largest norms (at most S, at least 0), ties to the later token; NaN counts as the
// largest. Error(invalid_argument) when hi_fraction is NaN.
std::vector<std::uint8_t> saliency_mask(const ConstArray& norms, double hi_fraction);

// x [N, D] in groups of group_size rows, and back into out [N, D] (exact when out is f32).
ChannelCodes channel_quant(const ConstArray& x, int bits, std::int64_t group_size = 32);
void channel_dequant(const Strided<const std::uint8_t>& codes, const Strided<const float>& scales,
                     const Strided<const float>& zeros, const Array& out, std::int64_t group_size = 32);

// x [S, D]; the salient rows and the others are quantized separately, each in original order.
ZipCacheState zipcache_compress(const ConstArray& x, int hi_bits = 4, int lo_bits = 2, double hi_fraction = 0.2,
                                std::int64_t group_size = 32);
// out [S, D]; the reference's result when out is f16.
void zipcache_reconstruct(const ZipCacheState& state, const Array& out);
void zipcache_quant_dequant(const ConstArray& x, const Array& out, int hi_bits = 4, int lo_bits = 2,
                            double hi_fraction = 0.2, std::int64_t group_size = 32);

// The reference's accounting: packed codes, 4 bytes per group and channel, one byte of mask per token.
std::int64_t zipcache_bytes(const ZipCacheState& state, std::optional<std::int64_t> group_size = {});
// All S tokens at one width.
std::int64_t base_only_bytes(std::int64_t S, std::int64_t D, int bits, std::int64_t group_size = 32);

// ZipCacheKVCache: every call is compressed alone and held packed. A call whose packed form would not be smaller (one
// token, which the reference keeps losslessly) is held as rows.
class ZipCacheKVCache : public ReferenceCache {
 public:
  // Reads the zipcache_* fields.
  explicit ZipCacheKVCache(const KVCacheConfig& config);
  ~ZipCacheKVCache() override;
  ZipCacheKVCache(ZipCacheKVCache&&) noexcept;
  ZipCacheKVCache& operator=(ZipCacheKVCache&&) noexcept;

  void update(const ConstArray& keys, const ConstArray& values) override;
  void fetch(const Array& keys, const Array& values, std::int64_t first = 0) const override;
  std::int64_t trim(std::int64_t n) override;  // counters keep the trimmed tokens, as in the reference
  void attend(const ConstArray& queries, const Array& out,
              const ReferenceAttentionOptions& options = {}) const override;
  std::int64_t offset() const override;
  ReferenceShape shape() const override;
  const KVCacheConfig& config() const override;
  std::size_t key_nbytes() const override;
  std::size_t value_nbytes() const override;

  // The reference's own counters: arithmetic on counts, not bytes held (nbytes() is that).
  std::int64_t compressed_key_bytes() const;
  std::int64_t compressed_value_bytes() const;
  std::int64_t baseline_key_bytes() const;
  std::int64_t baseline_value_bytes() const;
  std::int64_t fp16_key_bytes() const;
  std::int64_t fp16_value_bytes() const;
  double compression_ratio() const;
  double effective_avg_bits() const;

 protected:
  void transfer(exact::Archive& archive) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvant::zipcache
