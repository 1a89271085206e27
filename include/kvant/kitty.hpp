// Kitty as the reference package defines it: keys per channel in two widths, the loud channels in the wider one.
// The paper form is the recipe "kitty:..." (recipe.hpp); src/methods/kitty/README.md compares them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvant/array.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant::kitty {

struct ChannelRanks {
  std::vector<std::int64_t> hi;  // ascending
  std::vector<std::int64_t> lo;  // ascending, the rest
};

// keys [S, D]: channels by variance, descending, ties to the lower channel; the first max(1, trunc(D * hi_fraction))
// are hi. Error(invalid_argument) when hi_fraction is not finite, Error(not_finite) when a channel holds NaN or
// infinity.
ChannelRanks rank_channels_by_sensitivity(const ConstArray& keys, double hi_fraction = 0.25);

// out [S, D] = keys quantized and reconstructed: hi channels at hi_bit, lo channels at lo_bit, the others as they are;
// a channel in both lists counts as lo. Negative indices count from the end; Error(out_of_range) for others outside.
// The reference's result when out is f16.
void quantize_mixed_channels(const ConstArray& keys, const std::vector<std::int64_t>& hi_indices,
                             const std::vector<std::int64_t>& lo_indices, const Array& out, int hi_bit = 4,
                             int lo_bit = 2, std::int64_t group_size = 32);

// variance [D] from sums of n tokens: max(sumsq/n - (sum/n)^2, 0), zeros for n < 2. Arguments are read as fp32.
void compute_running_variance(const ConstArray& key_sum, const ConstArray& key_sq_sum, std::int64_t n,
                              const Array& variance);

// mask [N, D] (0 or 1) from variance [N, D]: the ranking of rank_channels_by_sensitivity, row by row;
// a NaN variance ranks last.
void hi_mask_from_variance_batched(const ConstArray& variance, double hi_fraction, const Strided<std::uint8_t>& mask);

// quantize_mixed_channels over keys [N, S, D] with mask [N, D].
void quantize_mixed_channels_batched(const ConstArray& keys, const Strided<const std::uint8_t>& hi_mask,
                                     const Array& out, int hi_bit = 4, int lo_bit = 2, std::int64_t group_size = 32);

// KittyKVCache: keys packed per call, values as rows. A call whose packed form would not be smaller (one token, which
// the reference keeps losslessly) is held as rows.
class KittyKVCache : public ReferenceCache {
 public:
  // Reads the kitty_* fields and head_dim.
  explicit KittyKVCache(const KVCacheConfig& config);
  ~KittyKVCache() override;
  KittyKVCache(KittyKVCache&&) noexcept;
  KittyKVCache& operator=(KittyKVCache&&) noexcept;

  void update(const ConstArray& keys, const ConstArray& values) override;
  void fetch(const Array& keys, const Array& values, std::int64_t first = 0) const override;
  std::int64_t trim(std::int64_t n) override;
  void attend(const ConstArray& queries, const Array& out,
              const ReferenceAttentionOptions& options = {}) const override;
  std::int64_t offset() const override;
  ReferenceShape shape() const override;
  const KVCacheConfig& config() const override;
  std::size_t key_nbytes() const override;
  std::size_t value_nbytes() const override;

  // The reference's own counters: arithmetic on counts, not bytes held (nbytes() is that).
  std::int64_t compressed_key_bytes() const;
  std::int64_t fp16_key_bytes() const;
  std::int64_t value_fp16_bytes() const;
  double assigned_avg_bits() const;

  double hi_fraction() const;
  std::int64_t hi_bit() const;
  std::int64_t lo_bit() const;
  std::int64_t group_size() const;

  // Running statistics per head and channel, [H, D]; empty before the first token.
  const std::vector<float>& key_sum() const;
  const std::vector<float>& key_sq_sum() const;
  std::int64_t n_keys() const;

 protected:
  void transfer(exact::Archive& archive) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvant::kitty
