// Cache: the keys and values of one layer of one sequence, [sinks | sealed pages | open tail] on top of a PageStore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvant/attention.hpp"
#include "kvant/page_store.hpp"

namespace kvant {

// Thread-compatible. What is stored after n tokens does not depend on how they arrived (one call, chunks, one by one).
// Copying a Cache forks the sequence: sealed pages are shared, open ones copied.
class Cache {
 public:
  Cache(const Recipe& recipe, const CacheShape& shape);

  const Recipe& recipe() const { return store_.recipe(); }
  const CacheShape& shape() const { return store_.shape(); }
  const PageStore& store() const { return store_; }
  std::int64_t length() const { return length_; }

  // Appends tokens: keys [n, kv_heads, key_dim], values [n, kv_heads, value_dim], any DType and strides. Full pages
  // behind the recent window are sealed. queries [n, query_heads, key_dim] are those of the same tokens; recipes that
  // weigh key channels or tokens by them (waterfill, zipcache; logits scaled by 1 / sqrt(key_dim)) store better pages
  // with them, the others ignore them. Default: none. positions [n] are what PageStore::write does with them; default:
  // the number of the token.
  void append(const ConstView& keys, const ConstView& values, const ConstView& queries = {},
              std::span<const std::int64_t> positions = {});

  // PageStore::set_key_rotation; recipes with rope=before need it before the first token.
  void set_key_rotation(const KeyRotation& rotation) { store_.set_key_rotation(rotation); }

  // Causal attention of the last `rows` tokens' queries: row i is token length() - rows + i. options.first_position is
  // set here; everything else in options is honoured. See kvant::attend for shapes.
  void attend(const ConstView& queries, const View& out, AttentionOptions options = {}, float* lse = nullptr) const;

  // append, then the whole cache as stored: keys and values [length(), kv_heads, dim] in any DType.
  void fetch(const View& keys, const View& values) const;

  // Drops the last n tokens (n <= length()). Tokens that stay in a page that was already sealed keep their decoded
  // values; trims no deeper than recipe.window lose nothing.
  void trim(std::int64_t n);
  void clear();

  Cache fork() const { return *this; }

  // A self-describing image (docs/format.md) and its inverse. load throws Error(bad_format) on anything else.
  std::vector<std::byte> save() const;
  static Cache load(std::span<const std::byte> image);

  StoreBytes bytes() const { return store_.bytes(); }
  StoreCounts counts() const { return store_.counts(); }

 private:
  PageStore store_;
  std::int64_t length_ = 0;
};

// Reorders, drops or duplicates the sequences of a batch: result[i] is batch[indices[i]] (sealed pages shared).
std::vector<Cache> gather(std::span<const Cache> batch, std::span<const std::int64_t> indices);

}  // namespace kvant
