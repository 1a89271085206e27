// What the three reference caches have in common: arrays [batch, heads, tokens, channels] go in, the reference's rows
// come out to the bit, and packed tiles are what is held in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvant/array.hpp"
#include "kvant/config.hpp"

namespace kvant {

namespace exact {
class Archive;
}

struct ReferenceAttentionOptions {
  float scale = 0.0F;  // multiplies q.k; 0 means 1/sqrt(key channels)
  bool causal = true;  // query row i of n sees tokens 0..offset-n+i; false: every row sees every token
  int threads = 0;     // 0: OpenMP's default
};

// What the first update fixed; batch is 0 before it.
struct ReferenceShape {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  DType key_type = DType::f16;
  DType value_type = DType::f16;
};

// Thread-compatible. The first update fixes batch, heads, channels and types; a later one that differs is refused with
// Error(invalid_argument) before anything changes.
class ReferenceCache {
 public:
  virtual ~ReferenceCache() = default;

  // Appends keys [B, H, S, D] and values [B, H, S, Dv]; S = 0 is allowed and stores nothing.
  virtual void update(const ConstArray& keys, const ConstArray& values) = 0;

  // Rows first..first+n-1 as the reference returns them: keys [B, H, n, D] and values [B, H, n, Dv] in any type (the
  // cached type is exact). n is the extent of axis 2; first + n <= offset().
  virtual void fetch(const Array& keys, const Array& values, std::int64_t first = 0) const = 0;

  // update, then every row: the reference's update_and_fetch. The outputs have offset() + S tokens.
  void update_and_fetch(const ConstArray& keys, const ConstArray& values, const Array& out_keys,
                        const Array& out_values);

  // Drops the last min(n, offset()) tokens and returns how many. A negative n is Error(invalid_argument).
  virtual std::int64_t trim(std::int64_t n) = 0;

  // out [B, Hq, n, Dv] = softmax(scale * q k^T) v with queries [B, Hq, n, D]; Hq is a multiple of H and query head h
  // reads head h / (Hq / H). Computed tile by tile from the packed codes.
  virtual void attend(const ConstArray& queries, const Array& out,
                      const ReferenceAttentionOptions& options = {}) const = 0;

  virtual std::int64_t offset() const = 0;  // tokens stored
  bool is_empty() const { return offset() == 0; }
  virtual ReferenceShape shape() const = 0;
  virtual const KVCacheConfig& config() const = 0;

  // Everything as bytes: settings, packed tiles, rows, statistics, counters. load_cache() of them goes on to the bit.
  std::vector<std::byte> save() const;

  // Bytes held for keys and for values: codes, endpoints, masks, rows and bookkeeping. These are what the allocator
  // sees, not the reference's own counters.
  virtual std::size_t key_nbytes() const = 0;
  virtual std::size_t value_nbytes() const = 0;
  std::size_t nbytes() const { return key_nbytes() + value_nbytes(); }

  // Threads used by update and fetch; 0: OpenMP's default.
  void set_threads(int threads) { threads_ = threads; }
  int threads() const { return threads_; }

 protected:
  // Writes the cache's parts to an archive, or reads them into a cache that was just made.
  virtual void transfer(exact::Archive& archive) = 0;
  friend std::unique_ptr<ReferenceCache> load_cache(std::span<const std::byte> image);

 private:
  int threads_ = 0;
};

// The cache that config.method names: "kitty", "kvquant" or "zipcache". Anything else is Error(invalid_argument)
// listing the choices.
std::unique_ptr<ReferenceCache> make_cache(const KVCacheConfig& config);

// The cache that save() made the image of. Error(bad_format) for any other bytes.
std::unique_ptr<ReferenceCache> load_cache(std::span<const std::byte> image);

}  // namespace kvant
