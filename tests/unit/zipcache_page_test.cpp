// zipcache on pages: which tokens are salient, against the definition in fp64, and the probes that tell.
#include <gtest/gtest.h>
#include <xxhash.h>

#include "cache/saliency.hpp"
#include "support/model.hpp"

namespace kvant {
namespace {

using testing::make_rows;
using testing::Rows;

constexpr int kGroup = 2;  // query heads per KV head of Rows

// Queries that a page may see by the definition: 5 % recent ones and 5 % by a hash (SplitMix64) of the position + 1.
bool is_probe(std::int64_t position, std::int64_t end, std::int64_t span) {
  const std::int64_t clock = position + 1;
  if (clock > end || clock <= end - span) return false;
  if (clock > end - std::max<std::int64_t>(1, std::llround(0.05 * static_cast<double>(span)))) return true;
  std::uint64_t x = static_cast<std::uint64_t>(clock) + 0x5A69704361636865U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  return static_cast<double>(x) / 18446744073709551616.0 < 0.05;
}

double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// Normalised attention to the tokens of a page: probabilities over the keys as they were when the page was sealed, that
// is decoded before the page and exact from it on.
std::vector<double> expected_saliency(const Rows& rows, const Cache& cache, std::int64_t page, int head) {
  const Recipe& recipe = cache.recipe();
  const int dim = rows.shape.key_dim;
  const std::int64_t first = page * recipe.page;
  const std::int64_t end = first + recipe.page + recipe.window;
  std::vector<float> keys = testing::read_all(cache.store(), Side::key, cache.length());
  std::copy(rows.keys.begin() + first * rows.shape.kv_heads * dim, rows.keys.end(),
            keys.begin() + first * rows.shape.kv_heads * dim);
  std::vector<double> sums(static_cast<std::size_t>(recipe.page)), seen(sums.size());
  for (std::int64_t t = 0; t < end; ++t) {
    if (!is_probe(t, end, recipe.page + recipe.window)) continue;
    for (int g = 0; g < kGroup; ++g) {
      const float* query = rows.queries.data() + (t * kGroup * rows.shape.kv_heads + head * kGroup + g) * dim;
      std::vector<double> weights;
      for (std::int64_t k = 0; k <= t; ++k) {
        const float* key = keys.data() + (k * rows.shape.kv_heads + head) * dim;
        weights.push_back(std::exp(dot(query, key, dim) / std::sqrt(dim)));
      }
      const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (std::int64_t k = first; k <= std::min(t, first + recipe.page - 1); ++k) {
        sums[static_cast<std::size_t>(k - first)] += weights[static_cast<std::size_t>(k)] / total;
        seen[static_cast<std::size_t>(k - first)] += g == 0 ? 1 : 0;
      }
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = seen[i] > 0 ? sums[i] / seen[i] : 0;
  return sums;
}

// The set has the right size, and no token outside beats one inside by more than what float arithmetic may differ.
void expect_largest(const std::vector<bool>& salient, const std::vector<double>& scores, int count,
                    std::int64_t first_ranked = 0) {
  double least = 1e300, most = -1e300;
  for (std::size_t i = static_cast<std::size_t>(first_ranked); i < scores.size(); ++i) {
    salient[i] ? least = std::min(least, scores[i]) : most = std::max(most, scores[i]);
  }
  EXPECT_EQ(std::count(salient.begin(), salient.end(), true), count);
  EXPECT_GE(least, most * (1 - 1e-3));
}

Rows quiet_rows(const CacheShape& shape, std::int64_t tokens, std::uint32_t seed) {
  Rows rows = make_rows(shape, tokens, seed);
  for (float& q : rows.queries) q *= 0.15F;  // attention over many tokens, not one
  return rows;
}

TEST(Zipcache, SalientTokensAreThoseThatProbesAttendTo) {
  const Rows rows = quiet_rows({2, 32, 16, DType::f32}, 620, 5);
  for (const char* text : {"zipcache", "zipcache:window=0,page=64", "zipcache:salient=0.2,page=32,window=300,sink=3",
                           "k=kivi:3,v=zipcache,salient=0.33,page=64,window=17"}) {
    SCOPED_TRACE(text);
    Cache cache(parse_recipe(text), rows.shape);
    testing::append(cache, rows, 0, 333);
    testing::append(cache, rows, 333, 287);
    const int salient = cache.store().layout().salient;
    ASSERT_GE(cache.counts().sealed_pages, 3);
    EXPECT_EQ(cache.counts().blind_seals, 0);
    for (std::int64_t page = 0; page < cache.counts().sealed_pages; ++page) {
      for (int head = 0; head < 2; ++head) {
        SCOPED_TRACE("page " + std::to_string(page) + " head " + std::to_string(head));
        expect_largest(testing::salient_tokens(cache.store(), page, head), expected_saliency(rows, cache, page, head),
                       salient, page == 0 ? cache.recipe().sink : 0);
      }
    }
  }
}

TEST(Zipcache, LogSumExpsOfTheHostAreTakenAsTheyAre) {
  const Rows rows = quiet_rows({1, 32, 16, DType::f32}, 160, 6);
  const auto sealed = [&](const float* lse) {
    PageStore store(parse_recipe("zipcache:page=64,window=96"), rows.shape, 192);
    testing::write_cells(store, rows, testing::cell_numbers(0, 160));
    store.observe(testing::cell_numbers(0, 160), rows.query_view(0, 160), {0, 0, lse});
    EXPECT_EQ(store.seal_ready(), 1);
    return store;
  };
  Cache plain(parse_recipe("f16"), rows.shape);
  testing::append(plain, rows, 0, 160);
  std::vector<float> lse = testing::attend(plain, rows.queries, 160, kGroup).lse;
  const PageStore computed = sealed(nullptr);
  EXPECT_EQ(testing::salient_tokens(computed, 0, 0), testing::salient_tokens(sealed(lse.data()), 0, 0));
  // Probes whose rows the host says are dominated by something else count for nothing: only the last one decides.
  std::fill(lse.begin(), lse.end() - kGroup, 300.0F);
  std::vector<double> scores;
  for (int t = 0; t < 64; ++t) {
    double sum = 0;
    for (int g = 0; g < kGroup; ++g) {
      const double logit =
          dot(rows.queries.data() + (159 * kGroup + g) * 32, rows.keys.data() + t * 32, 32) / std::sqrt(32);
      sum += std::exp(logit - lse[static_cast<std::size_t>(159 * kGroup + g)]);
    }
    int seeing = 0;
    for (int position = t; position < 160; ++position) seeing += is_probe(position, 160, 160) ? 1 : 0;
    scores.push_back(sum / seeing);
  }
  const PageStore told = sealed(lse.data());
  expect_largest(testing::salient_tokens(told, 0, 0), scores, told.layout().salient);
}

// All scores alike: every query gives 1 / n to each of the n tokens it sees. Sums favour the tokens that more probes
// see; divided by the number of probes they are nearly level, whatever the place in the page.
TEST(Zipcache, UniformAttentionDoesNotFavourEarlyTokens) {
  Rows rows = make_rows({1, 16, 16, DType::f32}, 64 * 16, 7);
  std::fill(rows.queries.begin(), rows.queries.end(), 0.0F);
  Cache cache(parse_recipe("zipcache:page=64,window=32,saliency=attention"), rows.shape);
  testing::append(cache, rows, 0, 64 * 15 + 31);
  const PageStore::Impl& store = cache.store().impl();
  ASSERT_FALSE(cache.store().is_sealed(14));
  testing::append(cache, rows, 64 * 15 + 31, 0);
  const auto probes = cache::probes_of(store, 14);
  ASSERT_GE(probes.size(), 5U);
  const auto scores = cache::attention_saliency(store, 14, 0, probes);
  int early = 0, late = 0;
  for (const std::size_t i : probes) {
    early += store.probes->clock(i) > 64 * 14 ? 1 : 0;
    late += store.probes->clock(i) > 64 * 15 ? 1 : 0;
  }
  ASSERT_GT(early, late);  // the bias that raw sums would have
  for (const double score : scores) {
    EXPECT_GT(score, kGroup / (64.0 * 15 + 32));
    EXPECT_LT(score, kGroup / (64.0 * 14));
  }
  // Equal scores: the lower token first.
  std::vector<std::byte> block(cache.store().layout().page_bytes);
  cache::store_token_order(cache.store().layout(), std::vector<double>(64, 0.5), {}, 0, block.data());
  const std::uint8_t* order = cache::token_order(cache.store().layout(), block.data(), 0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(order[i], i);
}

TEST(Zipcache, WithoutQueriesTheKeyNormDecidesAndIsCounted) {
  Rows rows = make_rows({2, 32, 16, DType::f32}, 512, 8);
  const Cache norm = testing::filled("zipcache:saliency=norm,window=0", rows);
  EXPECT_FALSE(norm.store().weighs_queries());
  EXPECT_EQ(norm.counts().blind_seals, 0);  // asked for
  rows.queries.clear();
  const Cache blind = testing::filled("zipcache:window=0", rows);
  EXPECT_EQ(blind.counts().seals, 4);
  EXPECT_EQ(blind.counts().blind_seals, 4);
  for (std::int64_t page = 0; page < 4; ++page) {
    for (int head = 0; head < 2; ++head) {
      std::vector<double> norms;
      for (std::int64_t t = page * 128; t < (page + 1) * 128; ++t) {
        const float* key = rows.keys.data() + (t * 2 + head) * 32;
        norms.push_back(std::sqrt(dot(key, key, 32)));
      }
      expect_largest(testing::salient_tokens(blind.store(), page, head), norms, 77);
      EXPECT_EQ(testing::salient_tokens(blind.store(), page, head), testing::salient_tokens(norm.store(), page, head));
    }
  }
}

// Every class size that a page can have, both ends included, and sinks in it.
TEST(Zipcache, ClassesOfEverySizeAreReadBack) {
  const Rows rows = quiet_rows({1, 16, 24, DType::f16}, 64, 9);
  const auto queries = testing::random_queries(5, 3, 16);
  for (int salient = 1; salient < 32; ++salient) {
    for (const int sink : {0, 1, 31}) {
      Recipe recipe = parse_recipe("zipcache:page=32,window=0");
      recipe.sink = sink;
      std::get<ZipcacheKeys>(recipe.key).salient = std::get<ZipcacheValues>(recipe.value).salient = salient / 32.0;
      Cache cache(recipe, rows.shape);
      testing::append(cache, rows, 0, 64);
      ASSERT_EQ(cache.counts().sealed_pages, 2);
      ASSERT_EQ(cache.store().layout().key.rows, salient);
      ASSERT_EQ(cache.store().layout().key_rest.rows, 32 - salient);
      const auto expected = testing::expected_from(cache.store(), 64, queries, 5, 3, testing::causal_bias(3, 64, 5, 0));
      EXPECT_LT(testing::relative_error(testing::attend(cache, queries, 5, 3).out, expected.out), testing::kTolerance)
          << salient << " " << sink;
      EXPECT_TRUE(Cache::load(cache.save()).save() == cache.save());
    }
  }
}

// The point of channel-separable values: one loud channel does not set the step of all others.
TEST(Zipcache, ValueChannelsOfUnlikeSizeKeepTheirPrecision) {
  Rows rows = make_rows({1, 16, 64, DType::f16}, 128, 10);
  for (std::int64_t t = 0; t < 128; ++t) {
    rows.value(t, 0, 7) *= 60;
    rows.value(t, 0, 20) = 0;
  }
  const auto quiet_error = [&](const char* recipe) {
    const Cache cache = testing::filled(recipe, rows);
    const auto stored = testing::read_all(cache.store(), Side::value, 128);
    double sum = 0;
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (i % 64 != 7) sum += std::pow(static_cast<double>(stored[i]) - rows.values[i], 2);
      if (i % 64 == 20 && recipe[0] == 'z') {
        EXPECT_EQ(stored[i], 0);
      }
    }
    return sum;
  };
  EXPECT_LT(quiet_error("zipcache:window=0,vhigh=5,vlow=4"), 0.3 * quiet_error("kivi:v=4,window=0"));
}

TEST(Zipcache, ProbesAreFewAndFollowForksImagesTrimsAndCopies) {
  const Rows rows = quiet_rows({1, 16, 16, DType::f32}, 3000, 11);
  const Recipe recipe = parse_recipe("zipcache:page=64,window=36");
  Cache cache(recipe, rows.shape);
  std::size_t most = 0;
  for (std::int64_t t = 0; t < 1500; ++t) {
    testing::append(cache, rows, t, 1);
    most = std::max(most, cache.store().impl().probes->size());
  }
  EXPECT_LT(most, 60U);  // a tenth of the spans of three pages, as the hash falls
  EXPECT_GT(cache.store().impl().probes->size(), 2U);
  EXPECT_GE(cache.bytes().tables, cache.store().impl().probes->bytes());

  Cache fork = cache.fork();
  Cache loaded = Cache::load(cache.save());
  for (Cache* one : {&cache, &fork, &loaded}) testing::append(*one, rows, 1500, 720);
  EXPECT_TRUE(fork.save() == cache.save());
  EXPECT_TRUE(loaded.save() == cache.save());

  // Tokens that go take their queries along: what follows is as if they had never been there.
  const std::int64_t length = cache.length();
  const Rows other = quiet_rows(rows.shape, 20, 12);
  testing::append(fork, other, 0, 20);
  ASSERT_EQ(fork.counts().seals, cache.counts().seals);
  fork.trim(20);
  for (std::size_t i = 0; i < fork.store().impl().probes->size(); ++i) {
    EXPECT_LE(fork.store().impl().probes->clock(i), length);
  }
  Cache plain = cache.fork();
  for (Cache* one : {&plain, &fork}) testing::append(*one, rows, length, 200);
  EXPECT_TRUE(fork.save() == plain.save());

  PageStore copy(recipe, rows.shape, 4096);
  copy.copy_cells(cache.store(), 0, 0, length);
  EXPECT_GT(copy.impl().probes->size(), 0U);
  cache.clear();
  EXPECT_EQ(cache.store().impl().probes->size(), 0U);
  testing::append(cache, rows, 0, 2220);
  EXPECT_TRUE(cache.save() == loaded.save());
}

TEST(Zipcache, QueriesWithAnotherHeadCountAreRefused) {
  const Rows rows = quiet_rows({1, 16, 16, DType::f32}, 64, 13);
  PageStore store(parse_recipe("zipcache:page=32,window=0"), rows.shape, 64);
  testing::write_cells(store, rows, testing::cell_numbers(0, 20));
  store.observe(testing::cell_numbers(0, 20), rows.query_view(0, 20));
  const std::size_t before = store.impl().probes->size();
  const auto three = testing::random_queries(20, 3, 16);
  testing::expect_error(ErrorCode::invalid_argument, {"3", "2"}, [&] {
    store.observe(testing::cell_numbers(0, 20), dense_view(three.data(), DType::f32, 20, 3, 16));
  });
  EXPECT_EQ(store.impl().probes->size(), before);
}

TEST(Zipcache, ForgedOrdersAndProbesAreRefused) {
  const Rows rows = quiet_rows({1, 16, 16, DType::f16}, 70, 14);
  const Cache cache = testing::filled("zipcache:page=32,window=0,salient=0.5", rows);
  const std::vector<std::byte> image = cache.save();
  const auto block = cache.store().sealed_block(0);
  const auto found = std::search(image.begin(), image.end(), block.begin(), block.end());
  ASSERT_NE(found, image.end());
  const auto refused = [&](std::size_t at, std::byte value) {
    std::vector<std::byte> forged = image;
    forged[at] = value;
    const std::size_t body = forged.size() - 8;
    const std::uint64_t checksum = XXH64(forged.data(), body, 0);
    std::memcpy(forged.data() + body, &checksum, sizeof checksum);
    testing::expect_error(ErrorCode::bad_format, {}, [&] { Cache::load(forged); });
  };
  const auto start = static_cast<std::size_t>(found - image.begin());
  const std::size_t order = start + cache.store().layout().tokens_offset;
  refused(order, std::byte{32});     // no token of the page
  refused(order, image[order + 1]);  // one twice
  refused(order + 20, image[order + 21]);
  refused(start + cache.store().layout().value.factor_offset + 1, std::byte{0x7C});  // an infinite factor
}

}  // namespace
}  // namespace kvant
