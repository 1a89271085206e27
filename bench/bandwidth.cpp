#include "bench/bandwidth.hpp"

#include <algorithm>

// Wide loads without a machine flag: one copy of the loop per instruction set, chosen by the loader.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define KVANT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KVANT_CLONES
#endif

namespace kvant::bench {
namespace {

// Eight independent sums: reading, not adding, is what takes the time.
KVANT_CLONES std::uint64_t sum_words(const std::uint64_t* words, std::size_t count) {
  constexpr std::size_t kUnroll = 64;
  std::uint64_t sums[kUnroll] = {};
  for (std::size_t i = 0; i + kUnroll <= count; i += kUnroll) {
    for (std::size_t j = 0; j < kUnroll; ++j) sums[j] += words[i + j];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

Reader::Reader(std::size_t bytes, std::size_t ring_bytes)
    : words_(std::max<std::size_t>(bytes / 512, 1) * 64), buffer_(std::max(words_, ring_bytes / 8 / words_ * words_)) {
  for (std::size_t i = 0; i < buffer_.size(); ++i) buffer_[i] = i * 0x9E3779B97F4A7C15U;
}

Work Reader::work() {
  return [this](int units) {
    const double seconds = seconds_of([&] {
      for (int i = 0; i < units; ++i, at_ = (at_ + words_) % buffer_.size()) {
        sum_ += sum_words(buffer_.data() + at_, words_);
      }
    });
    volatile std::uint64_t sink = sum_;  // the sum is used, so the reads stay
    static_cast<void>(sink);
    return seconds;
  };
}

}  // namespace kvant::bench
