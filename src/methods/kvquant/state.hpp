// What a KVQuantKVCache is made of.
#pragma once

#include <cstdint>
#include <vector>

#include "kvant/kvquant.hpp"
#include "methods/kvquant/packed.hpp"

namespace kvant::kvquant {

constexpr std::int64_t kMaxChannels = 1024;

// One thread where the work is so little that others cost more than they save.
inline int threads_for(const SideShape& shape, std::int64_t tokens, int threads) {
  constexpr std::int64_t kSmall = 1 << 15;  // values
  return shape.all_heads() * tokens * shape.channels < kSmall ? 1 : threads;
}

// The reference's byte counters: arithmetic on counts, not memory.
struct Counters {
  std::int64_t compressed_key = 0;
  std::int64_t compressed_value = 0;
  std::int64_t fp16_key = 0;
  std::int64_t fp16_value = 0;

  // The reference's trim: each counter times kept / before, truncated in double.
  void scale(std::int64_t kept, std::int64_t before);
};

struct KVQuantKVCache::State {
  explicit State(const KVCacheConfig& config);

  KVCacheConfig config;
  int bits = 3;
  double fraction = 0.01;
  std::int64_t sweeps = 8;
  std::int64_t refit_interval = 0;
  std::int64_t n_sink = 1;

  bool has_shape = false;  // the first update fixes shape and type
  PackedSide keys;
  PackedSide values;
  std::vector<float> key_levels;    // [H][L][D], empty until fitted
  std::vector<float> threshold;     // [D], empty: none
  std::vector<float> value_levels;  // [L][S] of the last call
  std::int64_t value_level_tokens = -1;
  std::int64_t tokens = 0;
  std::int64_t sink_kept = 0;
  std::int64_t outliers = 0;
  Counters counters;

  std::int64_t level_count() const { return std::int64_t{1} << bits; }
  void check_call(const ConstArray& keys, const ConstArray& values) const;
  void set_shape(std::int64_t batch, std::int64_t heads, std::int64_t channels, DType type);
  void transfer(exact::Archive& archive);
  void forget();  // as after construction, the shape kept
};

}  // namespace kvant::kvquant
