#include "cache/probes.hpp"

#include <algorithm>

namespace kvant::cache {
namespace {

constexpr double kShare = 0.05;  // of recent probes, and of random ones (ZipCache's)
constexpr std::uint64_t kSeed = 0x5A69704361636865U;

// SplitMix64: a bijection of the clock whose upper bits are as good as random.
bool is_random_probe(std::int64_t clock) {
  std::uint64_t x = static_cast<std::uint64_t>(clock) + kSeed;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53 < kShare;
}

}  // namespace

ProbeSpan::ProbeSpan(const Recipe& recipe)
    : span(std::int64_t{recipe.page} + recipe.window),
      recent(std::max<std::int64_t>(1, static_cast<std::int64_t>(kShare * static_cast<double>(span) + 0.5))),
      window(recipe.window),
      page(recipe.page) {}

bool ProbeSpan::holds(std::int64_t end, std::int64_t clock) const {
  return clock <= end && clock > end - span && (clock > end - recent || is_random_probe(clock));
}

// Such a page ends at rows_written + 1 + window or later.
bool ProbeSpan::may_hold(std::int64_t rows_written, std::int64_t clock) const {
  return clock > rows_written - page && (clock > rows_written + window - recent || is_random_probe(clock));
}

void Probes::reserve(std::size_t count, int query_heads) {
  if (size() == 0) heads_ = query_heads;
  const std::size_t total = size() + count;
  clocks_.reserve(total);
  vectors_.reserve(total * row());
  lse_.reserve(total * static_cast<std::size_t>(heads_));
}

void Probes::add(std::int64_t clock) {
  resize(size() + 1);
  clocks_.back() = clock;
  std::fill_n(query(size() - 1).begin(), row(), 0.0F);
  std::fill_n(lse(size() - 1).begin(), heads_, kUnknown);
}

void Probes::move(std::size_t from, std::size_t to) {
  if (from == to) return;
  clocks_[to] = clocks_[from];
  std::copy_n(query(from).begin(), row(), query(to).begin());
  std::copy_n(lse(from).begin(), heads_, lse(to).begin());
}

void Probes::resize(std::size_t count) {
  clocks_.resize(count);
  vectors_.resize(count * row());
  lse_.resize(count * static_cast<std::size_t>(heads_));
}

}  // namespace kvant::cache
