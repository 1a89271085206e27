// Queries that a store keeps to tell which tokens of a page are salient.
//
// The probes of a page are those among the queries that came while it was filled and while the recent window behind it
// was: the last 5 % of that span, and 5 % at random. Older queries cannot see any of its tokens. A query is known by
// its clock, the store's count of rows when the key of its token was written; the random ones are a hash of the clock.
// So which queries are probes, and which of them a page sees, does not depend on how tokens arrived in calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvant/page_store.hpp"

namespace kvant::cache {

// The probes of a page that may be sealed from the clock `end` on: those with a clock in end - span + 1..end that are
// either random or newer than end - recent.
struct ProbeSpan {
  std::int64_t span = 0;    // page + window
  std::int64_t recent = 0;  // 5 % of it, at least 1
  std::int64_t window = 0;
  std::int64_t page = 0;

  explicit ProbeSpan(const Recipe& recipe);
  bool holds(std::int64_t end, std::int64_t clock) const;
  // True when a page that is not full yet, so that its end is not known, may come to need the query.
  bool may_hold(std::int64_t rows_written, std::int64_t clock) const;
};

class Probes {
 public:
  static constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

  explicit Probes(int key_dim) : key_dim_(key_dim) {}

  int query_heads() const { return clocks_.empty() ? 0 : heads_; }  // 0 where there is no probe
  std::size_t size() const { return clocks_.size(); }
  std::int64_t clock(std::size_t i) const { return clocks_[i]; }
  std::span<const float> query(std::size_t i) const { return {vectors_.data() + i * row(), row()}; }
  std::span<float> query(std::size_t i) { return {vectors_.data() + i * row(), row()}; }
  // The log-sum-exp of each query head, or kUnknown.
  std::span<const float> lse(std::size_t i) const {
    return {lse_.data() + i * static_cast<std::size_t>(heads_), static_cast<std::size_t>(heads_)};
  }
  std::span<float> lse(std::size_t i) {
    return {lse_.data() + i * static_cast<std::size_t>(heads_), static_cast<std::size_t>(heads_)};
  }

  // Room for `count` more; then add() cannot fail. Only an empty set may change its number of heads.
  void reserve(std::size_t count, int query_heads);
  // A probe with zeros for its query; the log-sum-exps are unknown.
  void add(std::int64_t clock);
  template <typename Keep>
  void keep_if(const Keep& keep) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size(); ++i) {
      if (keep(clocks_[i])) move(i, kept++);
    }
    resize(kept);
  }
  void clear() { resize(0); }

  std::size_t bytes() const {
    return clocks_.capacity() * sizeof(std::int64_t) + (vectors_.capacity() + lse_.capacity()) * sizeof(float);
  }

  float scale = 0;  // of the logits, 0: 1 / sqrt(key_dim)
  float softcap = 0;

 private:
  std::size_t row() const { return static_cast<std::size_t>(heads_) * static_cast<std::size_t>(key_dim_); }
  void move(std::size_t from, std::size_t to);
  void resize(std::size_t count);

  int key_dim_;
  int heads_ = 0;
  std::vector<std::int64_t> clocks_;
  std::vector<float> vectors_;  // [size][query_heads][key_dim]
  std::vector<float> lse_;      // [size][query_heads]
};

}  // namespace kvant::cache
