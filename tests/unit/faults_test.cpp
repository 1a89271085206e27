// Rows of the fault list (known faults of KV-cache quantization) that concern tiles, attention, windows, shapes and
// numeric range.
#include <gtest/gtest.h>

#include <cstring>

#include "base/half.hpp"
#include "cache/rows.hpp"
#include "support/oracle.hpp"
#include "tiles/plane.hpp"

namespace kvant {
namespace {

using testing::Case;
using testing::o1_error;
using testing::random_floats;

// One cache with given rows, [tokens][1][dim], and what it decodes.
struct Filled {
  Cache cache;
  std::vector<float> keys, values;

  Filled(const std::string& recipe, const CacheShape& shape, const std::vector<float>& k, const std::vector<float>& v)
      : cache(parse_recipe(recipe), shape) {
    const auto tokens = static_cast<std::int64_t>(k.size()) / (shape.kv_heads * shape.key_dim);
    cache.append(dense_view(k.data(), DType::f32, tokens, shape.kv_heads, shape.key_dim),
                 dense_view(v.data(), DType::f32, tokens, shape.kv_heads, shape.value_dim));
    keys = testing::read_all(cache.store(), Side::key, tokens);
    values = testing::read_all(cache.store(), Side::value, tokens);
  }

  std::vector<float> attend(const std::vector<float>& queries, int heads, AttentionOptions options = {}) const {
    const auto rows = static_cast<std::int64_t>(queries.size()) / (heads * cache.shape().key_dim);
    std::vector<float> out(static_cast<std::size_t>(rows * heads * cache.shape().value_dim));
    cache.attend(dense_view(queries.data(), DType::f32, rows, heads, cache.shape().key_dim),
                 dense_view(out.data(), DType::f32, rows, heads, cache.shape().value_dim), options);
    return out;
  }
};

const CacheShape kSmall{1, 64, 64, DType::f16};

void expect_finite(const std::vector<float>& values) {
  for (const float value : values) ASSERT_TRUE(std::isfinite(value));
}

// O2: mean KL divergence of the softmax over the original keys from the one over the decoded keys.
double softmax_kl(const std::string& recipe, const std::vector<float>& keys, const std::vector<float>& queries,
                  int dim) {
  const CacheShape shape{1, dim, dim, DType::f16};
  const auto values = random_floats(keys.size(), 77);
  const Filled filled(recipe, shape, keys, values);
  const auto tokens = static_cast<std::int64_t>(keys.size()) / dim;
  double total = 0;
  const auto logits = [&](const std::vector<float>& k, const float* q) {
    std::vector<double> out(static_cast<std::size_t>(tokens));
    double peak = -1e300;
    for (std::int64_t t = 0; t < tokens; ++t) {
      double sum = 0;
      for (int d = 0; d < dim; ++d) sum += static_cast<double>(q[d]) * k[static_cast<std::size_t>(t * dim + d)];
      out[static_cast<std::size_t>(t)] = sum / std::sqrt(dim);
      peak = std::max(peak, out[static_cast<std::size_t>(t)]);
    }
    double norm = 0;
    for (double& x : out) norm += std::exp(x - peak);
    for (double& x : out) x -= peak + std::log(norm);
    return out;
  };
  const auto count = static_cast<std::int64_t>(queries.size()) / dim;
  for (std::int64_t n = 0; n < count; ++n) {
    const auto p = logits(keys, queries.data() + n * dim);
    const auto q = logits(filled.keys, queries.data() + n * dim);
    for (std::size_t t = 0; t < p.size(); ++t) total += std::exp(p[t]) * (p[t] - q[t]);
  }
  return total / static_cast<double>(count);
}

// Loud key channels destroy formats that share a scale along the channels; per-channel grids do not notice them.
TEST(Faults, D01_LoudKeyChannelsSurviveFourBits) {
  auto keys = random_floats(std::size_t{512} * 128, 1);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t d = i % 128;
    if (d == 7 || d == 71) keys[i] += 60;
    if (d == 20 || d == 21 || d == 90) keys[i] *= 10;
  }
  const auto queries = random_floats(std::size_t{8} * 128, 2, 0.3F);
  EXPECT_LT(softmax_kl("kivi:k=4,v=4,window=0", keys, queries, 128), 0.02);
  // The test has teeth: a symmetric 4-bit block of 32 along D loses the channels beside the loud ones.
  double naive = 0;
  for (std::size_t block = 0; block < keys.size(); block += 32) {
    const float peak = std::fabs(*std::max_element(keys.begin() + static_cast<std::ptrdiff_t>(block),
                                                   keys.begin() + static_cast<std::ptrdiff_t>(block) + 32,
                                                   [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
    for (std::size_t i = block; i < block + 32; ++i) {
      const float error = std::nearbyint(keys[i] / (peak / 7)) * (peak / 7) - keys[i];
      naive += error * error;
    }
  }
  EXPECT_GT(naive / static_cast<double>(keys.size()), 0.5);
}

TEST(Faults, D03_SmallChannelsThatMatterKeepTheirScale) {
  auto keys = random_floats(std::size_t{256} * 128, 3);
  auto queries = random_floats(std::size_t{8} * 128, 4, 0.3F);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] *= std::exp2(6.0F * static_cast<float>(i % 128) / 128);
  for (std::size_t i = 0; i < queries.size(); ++i) queries[i] /= std::exp2(6.0F * static_cast<float>(i % 128) / 128);
  EXPECT_LT(softmax_kl("kivi:k=4,v=4,window=0", keys, queries, 128), 0.002);
}

TEST(Faults, D04_SinksAreExactAndOutsideEveryStatistic) {
  auto keys = random_floats(std::size_t{256} * 64, 5);
  auto values = random_floats(keys.size(), 6);
  for (std::size_t d = 0; d < 64; ++d) {
    keys[d] *= 20;
    values[d] *= 1e-3F;
  }
  const Filled none("kivi:k=2,v=2,window=0", kSmall, keys, values);
  const Filled sink("kivi:k=2,v=2,window=0,sink=1", kSmall, keys, values);
  double error[2] = {0, 0};
  for (std::size_t i = 64; i < keys.size(); ++i) {
    error[0] += std::fabs(none.keys[i] - keys[i]);
    error[1] += std::fabs(sink.keys[i] - keys[i]);
  }
  EXPECT_LT(error[1], 0.9 * error[0]);
  for (std::size_t d = 0; d < 64; ++d) {
    EXPECT_EQ(sink.keys[d], base::half_to_float(base::float_to_half(keys[d])));
    EXPECT_EQ(sink.values[d], base::half_to_float(base::float_to_half(values[d])));
  }
}

TEST(Faults, D07_ZeroRowsDecodeToExactZeros) {
  const CacheShape shape{2, 64, 64, DType::f16};
  auto keys = random_floats(std::size_t{128} * 128, 7);
  auto values = random_floats(keys.size(), 8);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i / 64 % 2 == 1) keys[i] = 0;
    if (i / 128 % 3 == 0) values[i] = 0;
  }
  const Filled filled("kivi:k=2,v=2,window=0", shape, keys, values);
  expect_finite(filled.attend(random_floats(256, 9), 4));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == 0) {
      EXPECT_EQ(filled.keys[i], 0.0F);
    }
    if (values[i] == 0) {
      EXPECT_EQ(filled.values[i], 0.0F);
    }
  }
}

TEST(Faults, D08_ConstantsDecodeToThemselves) {
  auto keys = random_floats(std::size_t{128} * 64, 10);
  const std::vector<float> values(keys.size(), 3.25F);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i % 64 < 4) keys[i] = -7.5F;
  }
  const Filled filled("kitty:window=0,sink=0", kSmall, keys, values);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(filled.values[i], 3.25F);
    if (i % 64 < 4) {
      EXPECT_EQ(filled.keys[i], -7.5F);
    }
  }
}

TEST(Faults, D09_TinyRangesStayFiniteAndClose) {
  for (const int bits : {2, 3, 4, 8}) {
    auto keys = random_floats(std::size_t{128} * 64, 11);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] *= std::pow(10.0F, -4.0F - static_cast<float>(i % 64 % 6));
    const Filled filled("kivi:k=" + std::to_string(bits) + ",v=4,window=0", kSmall, keys, keys);
    expect_finite(filled.attend(random_floats(64, 12), 1));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      // Six standard deviations bound the range; one fp16 subnormal is the resolution of the input type.
      const double range = 9.0 * std::pow(10.0, -4.0 - static_cast<double>(i % 64 % 6));
      ASSERT_LE(std::fabs(filled.keys[i] - keys[i]), range / ((1 << bits) - 1) + 6e-8);
    }
  }
}

TEST(Faults, D10_LargeBfloatValuesKeepTheirNeighbours) {
  auto values = random_floats(std::size_t{128} * 64, 13);
  for (std::size_t d = 1; d < 64; ++d) values[d] = -1.0F + 5.0F * static_cast<float>(d) / 64;
  values[0] = -125000.0F;
  const Filled filled("kivi:k=4,v=4,window=0", {1, 64, 64, DType::bf16}, random_floats(values.size(), 14), values);
  expect_finite(filled.values);
  for (std::size_t i = 64; i < values.size(); ++i) EXPECT_NEAR(filled.values[i], values[i], 0.4);
}

TEST(Faults, D12_D13_SumsAndLogitsBeyondHalfRange) {
  std::vector<float> keys(std::size_t{4096} * 128, 39.9F);
  const std::vector<float> values(keys.size(), 30.0F);
  for (std::size_t d = 0; d < 128; ++d) keys[d] = 40.0F;
  for (const char* recipe : {"f16", "kivi:k=4,v=4,window=0,sink=1"}) {
    const Filled filled(recipe, {1, 128, 128, DType::f16}, keys, values);
    const std::vector<float> queries(128, 40.0F);
    AttentionOptions options;
    options.scale = 1;
    for (const float value : filled.attend(queries, 1, options)) EXPECT_NEAR(value, 30.0F, 0.05F);
  }
}

TEST(Faults, D14_WhatTheTypeCannotHoldIsRefused) {
  for (const float bad :
       {1e5F, -1e5F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Cache cache(parse_recipe("kivi"), kSmall);
    auto keys = random_floats(std::size_t{10} * 64, 15);
    const auto values = keys;
    keys[100] = bad;
    const auto append = [&] {
      cache.append(dense_view(keys.data(), DType::f32, 10, 1, 64), dense_view(values.data(), DType::f32, 10, 1, 64));
    };
    EXPECT_THROW(append(), Error);
    EXPECT_EQ(cache.length(), 0);
    EXPECT_EQ(cache.bytes().open, 0U);
  }
}

TEST(Faults, D17_D18_HeadSizesThatNoBlockDivides) {
  for (const int dim : {40, 72, 80, 96, 5, 1}) {
    for (const std::int64_t tokens : {1, 31, 33, 160}) {
      EXPECT_LT(o1_error(parse_recipe("kivi:k=4,v=4,window=0"), {{2, dim, dim, DType::f16}, 2, tokens, 1}),
                testing::kTolerance)
          << dim << " " << tokens;
    }
  }
}

TEST(Faults, D21_LayersOfDifferentShape) {
  EXPECT_LT(o1_error(parse_recipe("kivi:k=8,v=2,window=0"), {{8, 256, 256, DType::f16}, 1, 200, 1}),
            testing::kTolerance);
  EXPECT_LT(o1_error(parse_recipe("kivi:k=2,v=8,window=0"), {{2, 512, 512, DType::f16}, 4, 200, 1}),
            testing::kTolerance);
}

TEST(Faults, D22_OnePastATileThroughStridedViews) {
  const CacheShape shape{2, 256, 256, DType::f16};
  const std::int64_t tokens = 1025;
  const auto big = random_floats(static_cast<std::size_t>(tokens + 3) * 2 * 300, 16);  // [heads][tokens + 3][300]
  const ConstView view{big.data() + 7, DType::f32, {tokens, 2, 256}, {300, (tokens + 3) * 300, 1}};
  Cache cache(parse_recipe("kivi:k=8,v=8,window=0"), shape);
  cache.append(view, view);
  const auto queries = random_floats(std::size_t{64} * 32 * 256, 17, 0.2F);
  std::vector<float> out(queries.size());
  cache.attend(dense_view(queries.data(), DType::f32, 64, 32, 256), dense_view(out.data(), DType::f32, 64, 32, 256));
  const auto expected = testing::attend_fp64(shape, 16, tokens, 64, testing::read_all(cache.store(), Side::key, tokens),
                                             testing::read_all(cache.store(), Side::value, tokens), queries, 1.0 / 16,
                                             0, testing::causal_bias(32, tokens, 64, 0));
  EXPECT_LT(testing::relative_error(out, expected.out), testing::kTolerance);
}

TEST(Faults, D24_QueryHeadsReadTheirKvHead) {
  for (const auto& [query_heads, kv_heads] :
       {std::pair{32, 32}, std::pair{9, 3}, std::pair{8, 1}, std::pair{28, 4}, std::pair{32, 8}}) {
    const CacheShape shape{kv_heads, 64, 64, DType::f16};
    auto values = random_floats(static_cast<std::size_t>(200 * kv_heads * 64), 18);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i / 64 % static_cast<std::size_t>(kv_heads));
    const Filled filled("kivi:k=2,v=2,window=0", shape, random_floats(values.size(), 19), values);
    const auto out = filled.attend(random_floats(static_cast<std::size_t>(query_heads * 64), 20), query_heads);
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], static_cast<float>(static_cast<int>(i / 64) / (query_heads / kv_heads)), 1e-2)
          << query_heads << "/" << kv_heads;
    }
  }
}

// Keys that arrive one by one are quantized like those of one call: not stored exactly and billed as 2 bits.
TEST(Faults, D28_TokensOneByOneAreReallyQuantized) {
  const auto rows = random_floats(std::size_t{256} * 64, 21);
  const Filled once("kivi:k=2,v=2,page=32,window=32", kSmall, rows, rows);
  Cache stepwise(parse_recipe("kivi:k=2,v=2,page=32,window=32"), kSmall);
  for (std::int64_t t = 0; t < 256; ++t) {
    const ConstView row = dense_view(rows.data() + t * 64, DType::f32, 1, 1, 64);
    stepwise.append(row, row);
    // D29, D31: the unquantized part slides, it neither grows without bound nor is emptied at once.
    ASSERT_LE(stepwise.counts().open_pages, 3);
    ASSERT_GE(stepwise.counts().open_pages * 32, std::min<std::int64_t>(t + 1, 32));
  }
  EXPECT_TRUE(stepwise.save() == once.cache.save());
  double error = 0;
  for (std::size_t i = 0; i < std::size_t{128} * 64; ++i) error += std::fabs(once.keys[i] - rows[i]);
  EXPECT_GT(error / (128 * 64), 0.1);
}

TEST(Faults, D31_TheLastTokensOfTheWindowAreExactAtEveryStep) {
  const auto rows = random_floats(std::size_t{120} * 64, 22);
  Cache cache(parse_recipe("kivi:k=2,v=2,page=32,window=16"), kSmall);
  for (std::int64_t t = 0; t < 120; ++t) {
    const ConstView row = dense_view(rows.data() + t * 64, DType::f32, 1, 1, 64);
    cache.append(row, row);
    const auto keys = testing::read_all(cache.store(), Side::key, t + 1);
    for (std::int64_t i = std::max<std::int64_t>(0, t - 15) * 64; i < (t + 1) * 64; ++i) {
      ASSERT_EQ(keys[static_cast<std::size_t>(i)],
                base::half_to_float(base::float_to_half(rows[static_cast<std::size_t>(i)])));
    }
  }
}

TEST(Faults, D39_D40_SlidingWindowsAroundTheirEdge) {
  AttentionOptions options;
  options.sliding_window = 64;
  for (const char* recipe : {"f16", "kivi:k=8,v=8,page=32,window=0"}) {
    for (const std::int64_t tokens : {63, 64, 65, 67, 96, 129}) {
      for (const std::int64_t rows : {1, 4}) {
        EXPECT_LT(o1_error(parse_recipe(recipe), {kSmall, 2, tokens, rows}, options), testing::kTolerance)
            << recipe << " " << tokens;
      }
    }
  }
}

TEST(Faults, D63_OffsetsBeyond32Bits) {
  // Address arithmetic at token 2^21 + 4 of a page table, head 7, channel 127, in a page as large as the shapes allow.
  const cache::RowsLayout rows({1024, 1024, 1024, DType::f32}, 256);
  EXPECT_EQ(rows.key_at(1023, 1023, 255), (std::size_t{1023} * 1024 * 256 + std::size_t{1023} * 256 + 255) * 4);
  EXPECT_EQ(rows.value_at(1023, 1023, 255), (std::size_t{1} << 31) - 4);
  EXPECT_EQ(rows.bytes, std::size_t{1} << 31);
  // A store of 2^21 + 5 cells costs its table only, and the last cell is found.
  const std::int64_t cells = (std::int64_t{1} << 21) + 5;
  PageStore store(parse_recipe("kivi:k=2,v=2,window=0"), {8, 128, 128, DType::f16}, cells);
  const std::vector<std::int64_t> last = {cells - 1};
  const auto spike = random_floats(std::size_t{8} * 128, 23);
  for (const Side side : {Side::key, Side::value})
    store.write(side, last, dense_view(spike.data(), DType::f32, 1, 8, 128));
  std::vector<float> out(std::size_t{8} * 128);
  const auto workspace = make_workspace();
  attend(store, cells, dense_view(spike.data(), DType::f32, 1, 8, 128), dense_view(out.data(), DType::f32, 1, 8, 128),
         {}, *workspace);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], spike[i], 2e-3);
}

TEST(Faults, D66_D67_TypesAreArgumentsAndOutputsFollowThem) {
  const float samples[] = {0.1621F, 188.0F, 436.0F, -0.5F};
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    std::vector<std::byte> stored(std::size_t{64} * size_of(type));
    for (std::int64_t i = 0; i < 64; ++i) base::store_float(stored.data(), type, i, samples[i % 4]);
    Cache cache(parse_recipe("kivi"), {1, 64, 64, type});
    const ConstView row = dense_view(stored.data(), type, 1, 1, 64);
    cache.append(row, row);
    std::vector<std::byte> out(stored.size());
    cache.attend(row, dense_view(out.data(), type, 1, 1, 64));
    EXPECT_EQ(std::memcmp(out.data(), stored.data(), out.size()), 0)
        << name_of(type);  // one token: its value comes back
  }
}

TEST(Faults, D69_UnequalScalesOfKeysAndValues) {
  auto keys = random_floats(std::size_t{200} * 64, 24);
  auto values = random_floats(keys.size(), 25);
  for (float& k : keys) k *= 0.5F;
  for (float& v : values) v *= 2.0F;
  const Filled filled("kivi:k=4,v=4,window=0", kSmall, keys, values);
  for (const std::int64_t rows : {1, 40}) {
    const auto queries = random_floats(static_cast<std::size_t>(rows * 64), 26);
    const auto out = filled.attend(queries, 1);
    const auto bias = testing::causal_bias(1, 200, rows, 0);
    const auto right = testing::attend_fp64(kSmall, 1, 200, rows, filled.keys, filled.values, queries, 0.125, 0, bias);
    const auto swapped =
        testing::attend_fp64(kSmall, 1, 200, rows, filled.values, filled.keys, queries, 0.125, 0, bias);
    EXPECT_LT(testing::relative_error(out, right.out), testing::kTolerance);
    EXPECT_GT(testing::relative_error(out, swapped.out), 0.1);
  }
}

TEST(Faults, D72_EmptyAndOneTokenCalls) {
  const auto rows = random_floats(std::size_t{301} * 64, 27);
  for (const std::int64_t first : {0, 1, 2}) {
    Cache cache(parse_recipe("kitty:window=0"), kSmall);
    const auto append = [&](std::int64_t from, std::int64_t count) {
      const ConstView part = dense_view(rows.data() + from * 64, DType::f32, count, 1, 64);
      cache.append(part, part);
    };
    append(0, first);
    EXPECT_EQ(cache.length(), first);
    for (std::int64_t t = first; t < 301; ++t) append(t, 1);
    EXPECT_TRUE(cache.save() == Filled("kitty:window=0", kSmall, rows, rows).cache.save());
  }
}

}  // namespace
}  // namespace kvant
