// What the packed caches of kitty and zipcache owe beyond the golden vectors: random call sequences against models made
// of the modules' functions, attention, bytes held, and calls that are refused.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

#include "kvant/error.hpp"
#include "kvant/kitty.hpp"
#include "kvant/zipcache.hpp"
#include "reference/cache_data.hpp"
#include "support/counting.hpp"

namespace kvant {
namespace {

using testing::random_rows;
using testing::Rows;

// The rows that a cache must return, kept as plain lists per head.
struct Model {
  explicit Model(const KVCacheConfig& c) : config(c) {}

  KVCacheConfig config;
  std::vector<std::vector<float>> keys;  // per batch * head, rows one after the other
  std::vector<std::vector<float>> values;
  std::int64_t tokens = 0;
  std::vector<float> sum;  // kitty: [heads][dim]
  std::vector<float> squares;

  void update(const Rows& k, const Rows& v);
  void trim(std::int64_t n, const Rows& k, const Rows& v);

 private:
  Rows kitty_keys(const Rows& k);
  Rows zipcache(const Rows& x, int lo_bits, double fraction) const;
  void add_statistics(const Rows& rows, float sign);
};

void append(std::vector<std::vector<float>>& lists, const Rows& rows) {
  lists.resize(static_cast<std::size_t>(rows.batch * rows.heads));
  const std::int64_t count = rows.tokens * rows.dim;
  for (std::int64_t i = 0; i < rows.batch * rows.heads * count; ++i) {
    lists[static_cast<std::size_t>(i / std::max<std::int64_t>(count, 1))].push_back(rows.at(i));
  }
}

// Sums of the batch mean of rows, formed first and then added (or subtracted): numerics.md section 3.2.
void Model::add_statistics(const Rows& rows, float sign) {
  sum.resize(static_cast<std::size_t>(rows.heads * rows.dim));
  squares.resize(sum.size());
  for (std::int64_t h = 0; h < rows.heads; ++h) {
    for (std::int64_t d = 0; d < rows.dim; ++d) {
      float total = 0;
      float total_squares = 0;
      for (std::int64_t t = 0; t < rows.tokens; ++t) {
        float mean = 0;
        for (std::int64_t b = 0; b < rows.batch; ++b) mean += rows.at(rows.index(b * rows.heads + h, t) + d);
        mean *= static_cast<float>(1.0 / static_cast<double>(rows.batch));
        total += mean;
        total_squares += mean * mean;
      }
      sum[static_cast<std::size_t>(h * rows.dim + d)] += sign * total;
      squares[static_cast<std::size_t>(h * rows.dim + d)] += sign * total_squares;
    }
  }
}

Rows Model::kitty_keys(const Rows& k) {
  Rows half(DType::f16, k.batch, k.heads, k.tokens, k.dim);
  const std::int64_t all = k.batch * k.heads;
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(all * k.dim));
  for (std::int64_t head = 0; head < all; ++head) {
    const std::int64_t first = head * k.dim;
    if (tokens == 0) {
      for (const std::int64_t c : kitty::rank_channels_by_sensitivity(k.matrix(head), config.kitty_hi_fraction).hi) {
        mask[static_cast<std::size_t>(first + c)] = 1;
      }
      continue;
    }
    std::vector<float> variance(static_cast<std::size_t>(k.dim));
    const std::int64_t at = head % k.heads * k.dim;
    kitty::compute_running_variance(dense_array(sum.data() + at, DType::f32, {k.dim}),
                                    dense_array(squares.data() + at, DType::f32, {k.dim}), tokens,
                                    dense_array(variance.data(), DType::f32, {k.dim}));
    kitty::hi_mask_from_variance_batched(dense_array(variance.data(), DType::f32, {1, k.dim}), config.kitty_hi_fraction,
                                         dense_grid(mask.data() + first, {1, k.dim}));
  }
  kitty::quantize_mixed_channels_batched(
      dense_array(static_cast<const void*>(k.bytes.data()), k.type, {all, k.tokens, k.dim}),
      dense_grid(static_cast<const std::uint8_t*>(mask.data()), {all, k.dim}),
      dense_array(static_cast<void*>(half.bytes.data()), DType::f16, {all, k.tokens, k.dim}),
      static_cast<int>(config.kitty_hi_bit), static_cast<int>(config.kitty_lo_bit), config.kitty_group_size);
  add_statistics(half, 1.0F);
  Rows result(k.type, k.batch, k.heads, k.tokens, k.dim);
  for (std::int64_t i = 0; i < all * k.tokens * k.dim; ++i) result.set(i, half.at(i));
  return result;
}

Rows Model::zipcache(const Rows& x, int lo_bits, double fraction) const {
  Rows result(x.type, x.batch, x.heads, x.tokens, x.dim);
  for (std::int64_t head = 0; head < x.batch * x.heads; ++head) {
    const auto skip = static_cast<std::size_t>(x.index(head, 0)) * size_of(x.type);
    zipcache::zipcache_quant_dequant(
        x.matrix(head), dense_array(static_cast<void*>(result.bytes.data() + skip), x.type, {x.tokens, x.dim}),
        static_cast<int>(config.zipcache_hi_bits), lo_bits, fraction, config.zipcache_group_size);
  }
  return result;
}

void Model::update(const Rows& k, const Rows& v) {
  if (config.method == "kitty") {
    append(keys, kitty_keys(k));
    append(values, v);
  } else {
    append(keys, zipcache(k, static_cast<int>(config.zipcache_lo_bits), config.zipcache_hi_fraction));
    append(values, config.zipcache_quantize_values ? zipcache(v, static_cast<int>(config.zipcache_hi_bits), 1.0) : v);
  }
  tokens += k.tokens;
}

void Model::trim(std::int64_t n, const Rows& k, const Rows& v) {
  if (config.method == "kitty" && n < tokens) {
    Rows gone(k.type, k.batch, k.heads, n, k.dim);
    for (std::int64_t head = 0; head < k.batch * k.heads; ++head) {
      for (std::int64_t i = 0; i < n * k.dim; ++i) {
        gone.set(gone.index(head, 0) + i,
                 keys[static_cast<std::size_t>(head)][static_cast<std::size_t>((tokens - n) * k.dim + i)]);
      }
    }
    add_statistics(gone, -1.0F);
  }
  tokens -= n;
  if (tokens == 0) {
    sum.clear();
    squares.clear();
  }
  for (auto& list : keys) list.resize(static_cast<std::size_t>(tokens * k.dim));
  for (auto& list : values) list.resize(static_cast<std::size_t>(tokens * v.dim));
}

template <std::size_t N>
std::int64_t pick(std::mt19937& random, const std::int64_t (&choices)[N]) {
  return choices[random() % N];
}

KVCacheConfig random_config(const std::string& method, std::int64_t dim, std::mt19937& random) {
  KVCacheConfig config;
  config.method = method;
  config.head_dim = dim;
  config.kitty_hi_bit = config.zipcache_hi_bits = pick(random, {4, 4, 1, 3, 8, 6});
  config.kitty_lo_bit = config.zipcache_lo_bits = pick(random, {2, 2, 2, 1, 7, 4});
  config.kitty_group_size = config.zipcache_group_size = pick(random, {32, 32, 1, 5, 8, 200});
  const double fractions[] = {0.25, 0.25, 0.0, 1.0, 0.6, 0.1};
  config.kitty_hi_fraction = config.zipcache_hi_fraction = fractions[random() % 6];
  config.zipcache_quantize_values = random() % 4 != 0;
  return config;
}

::testing::AssertionResult same_rows(const Rows& got, const std::vector<std::vector<float>>& want) {
  for (std::int64_t head = 0; head < got.batch * got.heads; ++head) {
    for (std::int64_t i = 0; i < got.tokens * got.dim; ++i) {
      const float a = got.at(got.index(head, 0) + i);
      const float b = want[static_cast<std::size_t>(head)][static_cast<std::size_t>(i)];
      if (std::memcmp(&a, &b, sizeof a) != 0) {
        return ::testing::AssertionFailure() << "head " << head << " element " << i << ": " << a << " for " << b;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

struct PackedCache : ::testing::TestWithParam<const char*> {};

void run_sequence(const std::string& method, std::uint32_t seed) {
  std::mt19937 random(seed);
  const std::int64_t dim = pick(random, {8, 1, 24, 64, 33, 130});
  const std::int64_t value_dim = random() % 3 == 0 ? pick(random, {8, 40, 3}) : dim;
  const std::int64_t batch = pick(random, {1, 1, 2, 3});
  const std::int64_t heads = pick(random, {1, 2, 3});
  const DType type = static_cast<DType>(random() % 3);
  const KVCacheConfig config = random_config(method, dim, random);
  const auto cache = make_cache(config);
  cache->set_threads(static_cast<int>(random() % 3));
  Model model(config);
  for (int step = 0; step < 12; ++step) {
    const std::int64_t tokens = pick(random, {1, 1, 1, 0, 2, 7, 33, 90});
    const Rows k = random_rows(type, batch, heads, tokens, dim, random);
    const Rows v = random_rows(type, batch, heads, tokens, value_dim, random);
    if (random() % 4 == 0) {
      const std::int64_t n = pick(random, {1, 3, 40, 1000});
      ASSERT_EQ(cache->trim(n), std::min(n, model.tokens));
      model.trim(std::min(n, model.tokens), k, v);
    }
    Rows out_k(type, batch, heads, cache->offset() + tokens, dim);
    Rows out_v(type, batch, heads, cache->offset() + tokens, value_dim);
    cache->update_and_fetch(k.array(), v.array(), out_k.array(), out_v.array());
    model.update(k, v);
    ASSERT_TRUE(same_rows(out_k, model.keys)) << "keys, seed " << seed << " step " << step;
    ASSERT_TRUE(same_rows(out_v, model.values)) << "values, seed " << seed << " step " << step;
  }
  Rows queries = random_rows(DType::f32, batch, heads * 2, std::min<std::int64_t>(3, cache->offset()), dim, random);
  if (cache->offset() > 0) {
    Rows out_k(type, batch, heads, cache->offset(), dim);
    Rows out_v(type, batch, heads, cache->offset(), value_dim);
    cache->fetch(out_k.array(), out_v.array());
    Rows out(DType::f32, batch, heads * 2, queries.tokens, value_dim);
    cache->attend(queries.array(), out.array());
    EXPECT_LT(testing::attention_error(out_k, out_v, queries, out, {}), 2e-3) << "seed " << seed;
  }
}

TEST_P(PackedCache, RandomSequencesGiveTheModelsRows) {
  for (std::uint32_t seed = 1; seed <= 150; ++seed) run_sequence(GetParam(), seed);
}

TEST_P(PackedCache, FetchOfARangeInAnyTypeAndStride) {
  std::mt19937 random(5);
  KVCacheConfig config;
  config.method = GetParam();
  const auto cache = make_cache(config);
  for (const std::int64_t tokens : {70, 1, 1, 40}) {
    cache->update(random_rows(DType::bf16, 2, 2, tokens, 24, random).array(),
                  random_rows(DType::bf16, 2, 2, tokens, 24, random).array());
  }
  Rows all_k(DType::bf16, 2, 2, 112, 24);
  Rows all_v(DType::bf16, 2, 2, 112, 24);
  cache->fetch(all_k.array(), all_v.array());
  for (const auto& [first, count] : {std::pair{0, 112}, std::pair{3, 67}, std::pair{69, 3}, std::pair{75, 37}}) {
    // Channels apart by 3 elements, tokens from last to first.
    std::vector<float> memory(static_cast<std::size_t>(2 * 2 * count * 24 * 3));
    Array k{memory.data() + (count - 1) * 72, DType::f32, 4, {2, 2, count, 24}, {2 * count * 72, count * 72, -72, 3}};
    Rows v(DType::f32, 2, 2, count, 24);
    cache->fetch(k, v.array(), first);
    for (std::int64_t head = 0; head < 4; ++head) {
      for (std::int64_t i = 0; i < count * 24; ++i) {
        const std::int64_t t = i / 24;
        const std::int64_t place = (head * count + count - 1 - t) * 72 + i % 24 * 3;
        ASSERT_EQ(memory[static_cast<std::size_t>(place)], all_k.at(all_k.index(head, first) + i));
        ASSERT_EQ(v.at(v.index(head, 0) + i), all_v.at(all_v.index(head, first) + i));
      }
    }
  }
}

TEST_P(PackedCache, BytesHeldAreTheAllocators) {
  std::mt19937 random(9);
  KVCacheConfig config;
  config.method = GetParam();
  for (const DType type : {DType::f16, DType::f32}) {
    const Rows k = random_rows(type, 1, 8, 512, 128, random);
    const Rows one = random_rows(type, 1, 8, 1, 128, random);
    const std::int64_t before = testing::live_bytes();
    const auto cache = make_cache(config);
    const auto expect_same = [&](const char* when) {
      const auto held = static_cast<double>(testing::live_bytes() - before);
      EXPECT_NEAR(static_cast<double>(cache->nbytes()), held, held * 0.01) << when;
    };
    cache->update(k.array(), k.array());
    expect_same("after a prefill");
    for (int i = 0; i < 100; ++i) cache->update(one.array(), one.array());
    expect_same("after 100 tokens");
    cache->update(k.array(), k.array());
    expect_same("after a chunk");
    cache->trim(600);
    expect_same("after a trim");
    cache->trim(5000);
    EXPECT_LT(cache->nbytes(), 16384U);
  }
}

TEST_P(PackedCache, BitsPerValueOfAPrefill) {
  std::mt19937 random(11);
  KVCacheConfig config;
  config.method = GetParam();
  const Rows k = random_rows(DType::f16, 1, 8, 1024, 128, random);
  const auto cache = make_cache(config);
  cache->update(k.array(), k.array());
  const double values = 8 * 1024 * 128;
  const double key_bits = 8.0 * static_cast<double>(cache->key_nbytes()) / values;
  const double value_bits = 8.0 * static_cast<double>(cache->value_nbytes()) / values;
  RecordProperty("key_bits", std::to_string(key_bits));
  RecordProperty("value_bits", std::to_string(value_bits));
  EXPECT_LE(key_bits, 3.6);
  EXPECT_LE(value_bits, config.method == "zipcache" ? 5.1 : 16.1);
}

TEST_P(PackedCache, Attention) {
  std::mt19937 random(13);
  KVCacheConfig config;
  config.method = GetParam();
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    const auto cache = make_cache(config);
    for (const std::int64_t tokens : {200, 1, 1, 64}) {
      const Rows k = random_rows(type, 2, 2, tokens, 64, random);
      const Rows v = random_rows(type, 2, 2, tokens, 40, random);
      cache->update(k.array(), v.array());
    }
    Rows k(type, 2, 2, 266, 64);
    Rows v(type, 2, 2, 266, 40);
    cache->fetch(k.array(), v.array());
    for (const std::int64_t group : {1, 3}) {
      for (const std::int64_t rows : {1, 5, 64, 266}) {
        for (const bool causal : {true, false}) {
          const Rows queries = random_rows(type, 2, 2 * group, rows, 64, random);
          Rows out(DType::f32, 2, 2 * group, rows, 40);
          ReferenceAttentionOptions options;
          options.causal = causal;
          options.scale = causal ? 0.0F : 0.2F;
          cache->attend(queries.array(), out.array(), options);
          EXPECT_LT(testing::attention_error(k, v, queries, out, options), 2e-3) << rows << " rows, group " << group;
        }
      }
    }
  }
}

TEST_P(PackedCache, RefusedCallsChangeNothing) {
  std::mt19937 random(17);
  KVCacheConfig config;
  config.method = GetParam();
  const auto cache = make_cache(config);
  const Rows k = random_rows(DType::f16, 1, 2, 9, 16, random);
  cache->update(k.array(), k.array());
  const std::size_t held = cache->nbytes();
  const auto refused = [&](const Rows& keys, const Rows& values) {
    EXPECT_THROW(cache->update(keys.array(), values.array()), Error);
  };
  refused(random_rows(DType::f16, 2, 2, 1, 16, random), k);      // batch
  refused(random_rows(DType::f16, 1, 3, 9, 16, random), k);      // heads
  refused(random_rows(DType::f16, 1, 2, 9, 8, random), k);       // channels
  refused(random_rows(DType::f32, 1, 2, 9, 16, random), k);      // type
  refused(k, random_rows(DType::f16, 1, 2, 8, 16, random));      // length
  EXPECT_THROW(cache->update(k.matrix(0), k.matrix(0)), Error);  // rank
  EXPECT_THROW(cache->trim(-1), Error);                          // moves forward in the reference
  Rows out(DType::f16, 1, 2, 4, 16);
  EXPECT_THROW(cache->fetch(out.array(), out.array(), 6), Error);
  EXPECT_THROW(cache->fetch(out.array(), out.array(), -1), Error);
  EXPECT_THROW(cache->fetch(out.array(), out.array(), std::numeric_limits<std::int64_t>::max()), Error);
  EXPECT_THROW(cache->update_and_fetch(k.array(), k.array(), out.array(), out.array()), Error);
  EXPECT_THROW(cache->attend(random_rows(DType::f16, 1, 3, 1, 16, random).array(), out.array()), Error);
  EXPECT_EQ(cache->offset(), 9);
  EXPECT_EQ(cache->nbytes(), held);
}

INSTANTIATE_TEST_SUITE_P(Methods, PackedCache, ::testing::Values("kitty", "zipcache"),
                         [](const auto& info) { return std::string(info.param); });

TEST(PackedCacheConfig, FieldsOutsideTheirRangeAreRefused) {
  const auto refused = [](const char* field, auto change) {
    KVCacheConfig config;
    config.method = std::string(field).substr(0, std::string(field).find('_'));
    change(config);
    try {
      make_cache(config);
      ADD_FAILURE() << field << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(field), std::string::npos) << error.what();
    }
  };
  refused("kitty_hi_bit", [](KVCacheConfig& c) { c.kitty_hi_bit = 9; });
  refused("kitty_lo_bit", [](KVCacheConfig& c) { c.kitty_lo_bit = 0; });
  refused("kitty_group_size", [](KVCacheConfig& c) { c.kitty_group_size = 0; });
  refused("kitty_hi_fraction", [](KVCacheConfig& c) { c.kitty_hi_fraction = 1.01; });
  refused("zipcache_hi_bits", [](KVCacheConfig& c) { c.zipcache_hi_bits = 0; });
  refused("zipcache_lo_bits", [](KVCacheConfig& c) { c.zipcache_lo_bits = -1; });
  refused("zipcache_group_size", [](KVCacheConfig& c) { c.zipcache_group_size = -4; });
  refused("zipcache_hi_fraction", [](KVCacheConfig& c) { c.zipcache_hi_fraction = -0.01; });
}

}  // namespace
}  // namespace kvant
