// O3: what a Cache stores does not depend on how its tokens arrived, and forks, trims and images keep it that way.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "support/model.hpp"

namespace kvant {
namespace {

using testing::append;
using testing::filled;
using testing::make_rows;
using testing::Rows;

const char* const kRecipes[] = {"f16",
                                "kivi:k=4,v=4,window=0",
                                "kivi:k=2,v=3,window=16,sink=4,page=32",
                                "kivi:k=8,v=8,window=128,page=64",
                                "kitty:boost=0.25,window=0,sink=32,page=32",
                                "kitty:boost=0.25,window=128,page=32",
                                "kitty:selector=query,window=40,page=32",
                                "waterfill:k=2.5,v=2,window=0,sink=4,page=32",
                                "waterfill:k=3,high=6,v=3,shared=1,window=40,page=64",
                                "waterfill:feedback=1,window=0,sink=3,page=32",
                                "waterfill:feedback=1,k=3,high=6,window=40,page=32",
                                "kvquant:k=2,v=3,window=0,page=32",
                                "kvquant:k=3,v=4,outliers=0.1,voutliers=0.05,window=24,sink=5,page=32",
                                "zipcache:window=0,sink=4,page=32",
                                "zipcache:salient=0.3,high=5,low=1,window=40,page=64",
                                "k=kitty,v=zipcache,saliency=norm,window=40,page=32"};
const CacheShape kShape{2, 20, 12, DType::f16};

Cache in_chunks(const std::string& recipe, const Rows& rows, const std::function<std::int64_t()>& next) {
  Cache cache(parse_recipe(recipe), rows.shape);
  for (std::int64_t done = 0; done < rows.tokens;) {
    const std::int64_t count = std::min(next(), rows.tokens - done);
    append(cache, rows, done, count);
    done += count;
    EXPECT_EQ(cache.length(), done);
  }
  return cache;
}

void expect_same(const Cache& a, const Cache& b) {
  ASSERT_TRUE(a.save() == b.save());
  for (std::int64_t page = 0; page * a.recipe().page < a.length(); ++page) {
    const auto x = a.store().sealed_block(page);
    const auto y = b.store().sealed_block(page);
    ASSERT_TRUE(std::equal(x.begin(), x.end(), y.begin(), y.end())) << "page " << page;
  }
}

struct Invariance : ::testing::TestWithParam<const char*> {};

TEST_P(Invariance, OneCallChunksOrOneByOne) {
  for (const std::int64_t tokens : {1, 31, 33, 130, 700}) {
    const Rows rows = make_rows(kShape, tokens, static_cast<std::uint32_t>(tokens));
    const Cache whole = filled(GetParam(), rows);
    expect_same(in_chunks(GetParam(), rows, [] { return 1; }), whole);
    for (std::uint32_t seed = 1; seed <= 5; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      std::mt19937 random(seed);
      // Chunks of 0 tokens are allowed and change nothing.
      expect_same(in_chunks(GetParam(), rows, [&] { return random() % 3 == 0 ? random() % 200 : random() % 9; }),
                  whole);
    }
  }
}

// Drafts that are rejected again: as long as no trim reaches deeper than the window, the accepted tokens decide.
TEST_P(Invariance, TrimsInsideTheWindowLeaveNoTrace) {
  const std::int64_t window = parse_recipe(GetParam()).window;
  if (window == 0) return;  // any trim would be too deep
  // Salient tokens are told by the queries of the window, which rejected drafts that seal a page early have taken part
  // in.
  if (testing::filled(GetParam(), make_rows(kShape, 1)).store().impl().probes) return;
  const Rows rows = make_rows(kShape, 500, 3);
  const Rows drafts = make_rows(kShape, 500, 4);
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Cache cache(parse_recipe(GetParam()), kShape);
    for (std::int64_t done = 0; done < rows.tokens;) {
      const std::int64_t accepted = std::min<std::int64_t>(1 + random() % 20, rows.tokens - done);
      append(cache, rows, done, accepted);
      done += accepted;
      const std::int64_t rejected = random() % static_cast<std::uint32_t>(std::min<std::int64_t>(window, 16) + 1);
      append(cache, drafts, 0, rejected);
      cache.trim(rejected);
      ASSERT_EQ(cache.length(), done);
    }
    // Drafts may have sealed a page a few tokens early; once the length has passed it, all is as without drafts.
    const Rows tail = make_rows(kShape, 20, 5);
    Cache plain = filled(GetParam(), rows);
    append(cache, tail, 0, 20);
    append(plain, tail, 0, 20);
    expect_same(cache, plain);
  }
}

TEST_P(Invariance, ThreadsDoNotChangeTheBytes) {
  const Rows rows = make_rows({5, 20, 12, DType::f16}, 512);
  std::string expected;
  for (const int threads : {1, 2, 3, 7, 16}) {
    PageStore store(parse_recipe(GetParam()), rows.shape, 512);
    testing::write_cells(store, rows, testing::cell_numbers(0, 512));
    store.seal_ready(threads);
    if (expected.empty()) expected = testing::dump(store);
    EXPECT_TRUE(testing::dump(store) == expected) << threads;
  }
}

TEST_P(Invariance, KernelSetsWriteTheSameBytes) {
  const Rows rows = make_rows({2, 80, 72, DType::f16}, 300);
  std::vector<std::byte> expected;
  for (const std::string& name : kernel_names()) {
    const testing::ForcedKernel forced(name);
    const auto image = filled(GetParam(), rows).save();
    if (expected.empty()) expected = image;
    EXPECT_TRUE(image == expected) << name;
  }
}

TEST_P(Invariance, SavedAndLoadedCachesGoOnAlike) {
  for (const std::int64_t tokens : {0, 1, 31, 32, 33, 200}) {
    const Rows rows = make_rows(kShape, 400, 6);
    Cache cache(parse_recipe(GetParam()), kShape);
    append(cache, rows, 0, tokens);
    Cache loaded = Cache::load(cache.save());
    EXPECT_EQ(loaded.length(), tokens);
    EXPECT_EQ(loaded.recipe(), cache.recipe());
    expect_same(loaded, cache);
    append(cache, rows, tokens, 400 - tokens);
    append(loaded, rows, tokens, 400 - tokens);
    expect_same(loaded, cache);
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Invariance, ::testing::ValuesIn(kRecipes), [](const auto& info) {
  return std::to_string(info.index) + std::string(info.param).substr(0, std::string(info.param).find_first_of(":="));
});

// ---- random sequences over a batch of caches, each beside a plain list of its tokens

struct Tracked {
  Cache cache;
  testing::StoreModel model;
  std::int64_t length = 0;
};

class Batch {
 public:
  Batch(const char* recipe, std::uint32_t seed) : random_(seed) {
    for (int i = 0; i < 3; ++i) {
      batch_.push_back({Cache(parse_recipe(recipe), kShape), {parse_recipe(recipe), kShape, kLimit}, 0});
    }
  }

  void step() {
    Tracked& one = batch_[random_() % batch_.size()];
    switch (random_() % 8) {
      case 0:
        return trim(one);
      case 1: {  // fork over another sequence
        const Tracked copy{one.cache.fork(), one.model, one.length};
        batch_[random_() % batch_.size()] = copy;
        return;
      }
      case 2:
        return reorder();
      case 3: {
        one.cache = Cache::load(one.cache.save());
        return;
      }
      case 4:
        if (random_() % 4 == 0) {
          one.cache.clear();
          one.model = {one.cache.recipe(), kShape, kLimit};
          one.length = 0;
        }
        return;
      default:
        return grow(one);
    }
  }

  void check() {
    for (const Tracked& one : batch_) {
      ASSERT_EQ(one.cache.length(), one.length);
      std::vector<float> keys(static_cast<std::size_t>(one.length) * 2 * 20),
          values(static_cast<std::size_t>(one.length) * 2 * 12);
      one.cache.fetch(dense_view(keys.data(), DType::f32, one.length, 2, 20),
                      dense_view(values.data(), DType::f32, one.length, 2, 12));
      ASSERT_TRUE(keys == one.model.read(Side::key, one.length));
      ASSERT_TRUE(values == one.model.read(Side::value, one.length));
    }
    const Tracked& one = batch_[random_() % batch_.size()];
    const std::int64_t rows = std::min<std::int64_t>(one.length, 1 + random_() % 5);
    if (rows == 0) return;
    const auto queries = testing::random_queries(rows, 4, 20, random_());
    const auto result = testing::attend(one.cache, queries, rows, 4);
    const auto expected = testing::expected_from(one.cache.store(), one.length, queries, rows, 4,
                                                 testing::causal_bias(4, one.length, rows, 0));
    ASSERT_LT(testing::relative_error(result.out, expected.out), testing::kTolerance);
  }

 private:
  static constexpr std::int64_t kLimit = 1024;

  void grow(Tracked& one) {
    const std::int64_t count =
        std::min<std::int64_t>(random_() % 2 == 0 ? random_() % 5 : random_() % 90, kLimit - one.length);
    const Rows rows = make_rows(kShape, count, random_());
    append(one.cache, rows, 0, count);
    for (std::int64_t i = 0; i < count; ++i) {
      one.model.write(Side::key, one.length + i, rows.keys.data() + i * 40, one.length + i);
      one.model.write(Side::value, one.length + i, rows.values.data() + i * 24, one.length + i);
    }
    one.length += count;
    const testing::Snapshot after(one.cache.store());
    for (std::int64_t page = 0; page * one.cache.recipe().page < one.length; ++page) {
      if (!one.cache.store().is_sealed(page) || one.model.is_sealed(page)) continue;
      const std::int64_t behind = one.length - (page + 1) * one.cache.recipe().page;
      ASSERT_GE(behind, one.cache.recipe().window) << "sealed inside the window";
      testing::Snapshot before;
      before.keys = one.model.read(Side::key, one.cache.store().cells());
      before.values = one.model.read(Side::value, one.cache.store().cells());
      ASSERT_NO_FATAL_FAILURE(testing::expect_close(one.cache.store(), page, before, after));
      one.model.seal(page, after);
    }
  }

  void trim(Tracked& one) {
    const std::int64_t count = std::min<std::int64_t>(random_() % 2 == 0 ? random_() % 6 : random_() % 120, one.length);
    one.cache.trim(count);
    one.model.forget(one.length - count, count);
    one.length -= count;
  }

  void reorder() {
    std::vector<std::int64_t> order(3);
    for (std::int64_t& index : order) index = static_cast<std::int64_t>(random_() % 3);
    std::vector<Cache> caches;
    for (const Tracked& one : batch_) caches.push_back(one.cache);
    const std::vector<Cache> gathered = gather(caches, order);
    const std::vector<Tracked> old = batch_;
    for (std::size_t i = 0; i < 3; ++i) {
      batch_[i] = old[static_cast<std::size_t>(order[i])];
      batch_[i].cache = gathered[i];
    }
  }

  std::mt19937 random_;
  std::vector<Tracked> batch_;
};

struct RandomCache : ::testing::TestWithParam<const char*> {};

TEST_P(RandomCache, EqualsAPlainList) {
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Batch batch(GetParam(), seed);
    for (int i = 0; i < 80; ++i) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_NO_FATAL_FAILURE(batch.step());
      ASSERT_NO_FATAL_FAILURE(batch.check());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, RandomCache, ::testing::ValuesIn(kRecipes), [](const auto& info) {
  return std::to_string(info.index) + std::string(info.param).substr(0, std::string(info.param).find_first_of(":="));
});

// Forks share buffers and sealed pages behind the scenes; each may live in a thread of its own.
TEST(Cache, ForksInThreadsAreIndependent) {
  const Rows rows = make_rows(kShape, 600, 8);
  Cache parent(parse_recipe("kivi:page=32,window=16"), kShape);
  append(parent, rows, 0, 100);
  std::vector<std::vector<std::byte>> images(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < images.size(); ++i) {
    threads.emplace_back([&, i, cache = parent.fork()]() mutable {
      for (std::int64_t done = 100; done < 600; done += 10) {
        append(cache, rows, done, 10);
        Cache probe = cache.fork();
        probe.trim(40);
      }
      images[i] = cache.save();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto expected = filled("kivi:page=32,window=16", rows).save();
  for (const auto& image : images) EXPECT_TRUE(image == expected);
}

TEST(Cache, RefusesAndStaysUnchanged) {
  Rows rows = make_rows(kShape, 70);
  Cache cache(parse_recipe("kivi:page=32,window=0"), kShape);
  append(cache, rows, 0, 50);
  const auto before = cache.save();
  const auto bytes = cache.bytes().total();
  using testing::expect_error;
  expect_error(ErrorCode::invalid_argument, {"values"},
               [&] { cache.append(rows.key_view(0, 3), rows.value_view(0, 2)); });
  expect_error(ErrorCode::invalid_argument, {"-5"},
               [&] { cache.append(rows.key_view(0, -5), rows.value_view(0, -5)); });
  rows.values[20] = std::numeric_limits<float>::quiet_NaN();
  expect_error(ErrorCode::not_finite, {"value row 0"}, [&] { append(cache, rows, 0, 20); });
  expect_error(ErrorCode::invalid_argument, {"51", "50"}, [&] { cache.trim(51); });
  expect_error(ErrorCode::invalid_argument, {"-1"}, [&] { cache.trim(-1); });
  std::vector<float> queries(51 * 4 * 20), out(51 * 4 * 12);
  const auto attend = [&](std::int64_t n, int heads, int dim) {
    cache.attend(dense_view(queries.data(), DType::f32, n, heads, dim),
                 dense_view(out.data(), DType::f32, n, heads, 12));
  };
  expect_error(ErrorCode::invalid_argument, {"51", "50"}, [&] { attend(51, 4, 20); });
  expect_error(ErrorCode::invalid_argument, {"3", "multiple of the 2"}, [&] { attend(1, 3, 20); });
  expect_error(ErrorCode::invalid_argument, {"19", "20"}, [&] { attend(1, 4, 19); });
  expect_error(ErrorCode::invalid_argument, {"-1"}, [&] { attend(-1, 4, 20); });
  const std::vector<Cache> batch = {cache};
  const std::vector<std::int64_t> outside = {1};
  expect_error(ErrorCode::out_of_range, {"1"}, [&] { gather(batch, outside); });
  EXPECT_TRUE(cache.save() == before);
  EXPECT_EQ(cache.bytes().total(), bytes);
}

}  // namespace
}  // namespace kvant
