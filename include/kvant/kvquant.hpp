// KVQuant-NUQ (arXiv:2401.18079) as the reference does it: Lloyd-Max levels, per channel for keys and per token for
// values, with the largest magnitudes kept exact and the first tokens as sinks. Same numbers, to the bit;
// src/methods/kvquant/README.md has the equations, the layout and what is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvant/array.hpp"
#include "kvant/config.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant::kvquant {

// All functions take finite numbers only (Error(not_finite) otherwise), bits of 1..8 and L of 1..256 levels. Columns
// are the vectors that are quantized: x is [N, D] with N samples per column, the batched forms take [B, N, D].
// threads: 0 is OpenMP's default.

// Per column the k = min(max(1, round(N * outlier_fraction)), N - 1) largest |x| (ties: the lower row) are outliers;
// none if outlier_fraction <= 0 or N < 2. inliers: x with the column's mean in the outlier cells; values: x there, 0
// elsewhere. All outputs have x's shape.
void split_dense_sparse(const ConstArray& x, double outlier_fraction, const Strided<float>& inliers,
                        const Strided<bool>& outlier_mask, const Strided<float>& outlier_values);
void split_dense_sparse_batched(const ConstArray& x, double outlier_fraction, const Strided<float>& inliers,
                                const Strided<bool>& outlier_mask, const Strided<float>& outlier_values,
                                int threads = 0);

// levels [2^bits, D] (batched: [B, 2^bits, D]), ascending: max(1, n_iters) Lloyd sweeps from evenly spaced quantiles.
// The batched form is another algorithm with other results: centred samples, midpoints, differences of prefix sums.
void fit_nuq_levels(const ConstArray& x, std::int64_t bits, std::int64_t n_iters, const Strided<float>& levels);
void fit_nuq_levels_batched(const ConstArray& x, std::int64_t bits, std::int64_t n_iters, const Strided<float>& levels,
                            int threads = 0);

// codes in x's shape. Nearest level, ties to the lowest index; the batched form counts the midpoints strictly below x.
void quantize_nuq(const ConstArray& x, const ConstArray& levels, const Strided<std::int32_t>& codes);
void quantize_nuq_batched(const ConstArray& x, const ConstArray& levels, const Strided<std::int32_t>& codes,
                          int threads = 0);

// levels[code] rounded to fp16 (infinite beyond 65504), then to out's type. A code outside 0..L-1 is
// Error(out_of_range).
void dequant_nuq(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out);
void dequant_nuq_batched(const Strided<const std::int32_t>& codes, const ConstArray& levels, const Array& out,
                         int threads = 0);

// split, fit_nuq_levels on the inliers, quantize, dequant, outliers put back; rounded to fp16, then to out's type.
void nuq_quant_dequant(const ConstArray& x, std::int64_t bits, double outlier_fraction, std::int64_t lloyd_iters,
                       const Array& out);

// Mean squared error of quantize and dequant.
double nuq_distortion(const ConstArray& x, const ConstArray& levels);

// The reference's cache. Keys and values have the same head size. What it holds is packed: see ReferenceCache.
class KVQuantKVCache final : public ReferenceCache {
 public:
  explicit KVQuantKVCache(const KVCacheConfig& config);
  ~KVQuantKVCache() override;
  KVQuantKVCache(KVQuantKVCache&&) noexcept;
  KVQuantKVCache& operator=(KVQuantKVCache&&) noexcept;

  void update(const ConstArray& keys, const ConstArray& values) override;
  void fetch(const Array& keys, const Array& values, std::int64_t first = 0) const override;
  std::int64_t trim(std::int64_t n) override;
  void attend(const ConstArray& queries, const Array& out, const ReferenceAttentionOptions& options) const override;
  std::int64_t offset() const override;
  ReferenceShape shape() const override;
  const KVCacheConfig& config() const override;
  std::size_t key_nbytes() const override;
  std::size_t value_nbytes() const override;

  // The reference's properties and counters; none of them says what is held.
  std::int64_t nuq_bits() const;
  double outlier_fraction() const;
  std::int64_t outlier_count() const;  // outliers of all calls so far, keys and values, sinks included
  std::int64_t n_sink() const;
  std::int64_t sink_kept() const;
  std::int64_t compressed_key_bytes() const;
  std::int64_t compressed_value_bytes() const;
  std::int64_t fp16_key_bytes() const;
  std::int64_t fp16_value_bytes() const;
  double effective_bits() const;

  // Rank 0 where the reference has None; valid until the next call that changes the cache.
  Strided<const float> key_outlier_thresh() const;  // [1, D]
  Strided<const float> key_levels() const;          // [H, L, D]
  Strided<const float> value_levels() const;        // [L, S] of the last call, batch element 0, head 0

 protected:
  void transfer(exact::Archive& archive) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvant::kvquant
