// Bytes that KVQuantKVCache holds: what it says against the allocator (O5), and the limits per value.
#include <gtest/gtest.h>

#include <random>

#include "base/half.hpp"
#include "kvant/kvquant.hpp"
#include "support/counting.hpp"

namespace kvant::kvquant {
namespace {

constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kDim = 128;

class Feeder {
 public:
  explicit Feeder(DType type) : type_(type) {}

  void update(KVQuantKVCache& cache, std::int64_t tokens) {
    const std::vector<std::byte> keys = rows(tokens);
    const std::vector<std::byte> values = rows(tokens);
    const auto view = [&](const std::vector<std::byte>& bytes) {
      return dense_array(static_cast<const void*>(bytes.data()), type_, {1, kHeads, tokens, kDim});
    };
    cache.update(view(keys), view(values));
  }

 private:
  std::vector<std::byte> rows(std::int64_t tokens) {
    const std::int64_t count = kHeads * tokens * kDim;
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(type_));
    for (std::int64_t i = 0; i < count; ++i) base::store_float(bytes.data(), type_, i, normal_(random_));
    return bytes;
  }

  DType type_;
  std::mt19937 random_{11};
  std::normal_distribution<float> normal_;
};

KVCacheConfig config_of(std::int64_t bits, std::int64_t refit_interval = 0) {
  KVCacheConfig config;
  config.method = "kvquant";
  config.kvquant_bits = bits;
  config.kvquant_refit_interval = refit_interval;
  return config;
}

// Within 1 % of what the allocator says, at every step of a history.
void expect_counted(const KVCacheConfig& config, DType type, const std::vector<std::int64_t>& plan) {
  Feeder feeder(type);
  {
    KVQuantKVCache first(config);  // tables that the process builds once
    feeder.update(first, 40);
  }
  const std::int64_t before = testing::live_bytes();
  KVQuantKVCache cache(config);
  cache.set_threads(1);
  for (const std::int64_t step : plan) {
    if (step < 0) {
      cache.trim(-step);
    } else {
      feeder.update(cache, step);
    }
    const auto held = static_cast<double>(testing::live_bytes() - before);
    EXPECT_NEAR(static_cast<double>(cache.nbytes()), held, 0.01 * held) << "after step " << step;
  }
}

TEST(KvquantMemory, SaysWhatTheAllocatorHolds) {
  expect_counted(config_of(3), DType::f16, {1024, 1, 1, 70, -3, -100, 5, -900, 40});
  expect_counted(config_of(3), DType::f32, {1, 1, 300, -200, 64});
  expect_counted(config_of(2, 16), DType::bf16, {64, 16, 16, 1, 1, 200, -120});
  expect_counted(config_of(8), DType::f16, {300, 1, 1});
}

TEST(KvquantMemory, BitsPerValueOfAPrefill) {
  KVQuantKVCache cache(config_of(3));
  Feeder(DType::f16).update(cache, 1024);
  const double values = 1024.0 * kHeads * kDim;
  const double key_bits = 8.0 * static_cast<double>(cache.key_nbytes()) / values;
  const double value_bits = 8.0 * static_cast<double>(cache.value_nbytes()) / values;
  EXPECT_LE(key_bits, 3.6);
  EXPECT_LE(value_bits, 4.5);
  RecordProperty("key_bits", std::to_string(key_bits));
  RecordProperty("value_bits", std::to_string(value_bits));
}

TEST(KvquantMemory, ShrinksWithTrimAndIsEmptyAfterwards) {
  KVQuantKVCache cache(config_of(3));
  const std::size_t empty = cache.nbytes();
  Feeder feeder(DType::f16);
  feeder.update(cache, 1024);
  const std::size_t full = cache.nbytes();
  cache.trim(512);
  EXPECT_LT(cache.nbytes(), full * 6 / 10);
  cache.trim(512);
  EXPECT_EQ(cache.nbytes(), empty);
}

// Levels of an ended run are kept only where they cost less than its rows.
TEST(KvquantMemory, FrequentRefitsCostNoMoreThanRows) {
  KVQuantKVCache cache(config_of(3, 4));
  Feeder feeder(DType::f16);
  for (int i = 0; i < 40; ++i) feeder.update(cache, i == 0 ? 64 : 4);
  const double rows = 2.0 * 220 * kHeads * kDim;
  EXPECT_LT(static_cast<double>(cache.key_nbytes()), 1.25 * rows);
}

// One-token calls stay coded: 64 of them fill a page.
TEST(KvquantMemory, DecodedTokensAreCoded) {
  KVQuantKVCache cache(config_of(3));
  Feeder feeder(DType::f16);
  feeder.update(cache, 1024);
  const std::size_t before = cache.nbytes() - 4 * 8 * 1024;  // value_levels is that of the last call
  for (int i = 0; i < 512; ++i) feeder.update(cache, 1);
  const double bits = 8.0 * static_cast<double>(cache.nbytes() - before) / (512.0 * kHeads * kDim * 2);
  EXPECT_LE(bits, 4.3);
}

}  // namespace
}  // namespace kvant::kvquant
