// Attention over two sequences, a tile of tokens at a time: nothing but one decoded tile per thread ever exists.
#pragma once

#include "exact/sequence.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant::exact {

// One side of a cache as attention reads it.
class RowSource {
 public:
  virtual ~RowSource() = default;
  virtual SideShape shape() const = 0;
  virtual std::int64_t tokens() const = 0;
  // Rows first..first+count-1 of a head as float, `stride` floats apart.
  virtual void read(std::int64_t head, std::int64_t first, std::int64_t count, float* out,
                    std::int64_t stride) const = 0;
};

// ReferenceCache::attend over any two sides of the same length and heads.
void attend(const RowSource& keys, const RowSource& values, const ConstArray& queries, const Array& out,
            const ReferenceAttentionOptions& options);
// ReferenceCache::attend over sequences of the same length and heads.
void attend(const Sequence& keys, const Sequence& values, const ConstArray& queries, const Array& out,
            const ReferenceAttentionOptions& options);

// Checks keys [B, H, S, D] and values [B, H, S, Dv] of an update against the sequences (an empty shape accepts all).
void check_update(const SideShape& key_shape, const SideShape& value_shape, const ConstArray& keys,
                  const ConstArray& values);
// Checks the outputs of a fetch of rows first.. .
void check_fetch(const Sequence& keys, const Sequence& values, const Array& out_keys, const Array& out_values,
                 std::int64_t first);

inline SideShape side_shape(const ConstArray& x) {
  return {x.extent[0], x.extent[1], x.extent[3], x.type};
}

inline ReferenceShape shape_of(const Sequence& keys, const Sequence& values) {
  const SideShape& k = keys.shape();
  const SideShape& v = values.shape();
  return {k.batch, k.heads, k.dim, v.dim, k.type, v.type};
}
// Do both sides hold as many tokens, of the same heads?
inline bool is_pair(const Sequence& keys, const Sequence& values) {
  return keys.shape().batch == values.shape().batch && keys.shape().heads == values.shape().heads &&
         keys.tokens() == values.tokens();
}

}  // namespace kvant::exact
