// O5: reported bytes against an allocator that counts. A program of its own, because it replaces operator new.
#include <gtest/gtest.h>

#include "cache/store.hpp"
#include "support/counting.hpp"
#include "support/oracle.hpp"

namespace kvant {
namespace {

// What filling and then shortening a cache leaves allocated, next to what it says.
void check_cache(const std::string& recipe, const CacheShape& shape, std::int64_t tokens) {
  const auto keys = testing::random_keys(tokens, shape.kv_heads, shape.key_dim, 1);
  const auto values = testing::random_floats(static_cast<std::size_t>(tokens * shape.kv_heads * shape.value_dim), 2);
  const Recipe parsed = parse_recipe(recipe);
  const std::int64_t before = testing::live_bytes();
  const auto pool = make_page_pool();
  PageStore store(parsed, shape, tokens, pool);
  if (store.needs_rotation()) store.set_key_rotation(make_rotation({.rotated = shape.key_dim}));
  std::vector<std::int64_t> cells(static_cast<std::size_t>(tokens));
  std::iota(cells.begin(), cells.end(), 0);
  const auto held = [&] {
    return testing::live_bytes() - before - static_cast<std::int64_t>(cells.capacity() * sizeof(std::int64_t));
  };
  store.write(Side::key, cells, dense_view(keys.data(), DType::f32, tokens, shape.kv_heads, shape.key_dim));
  store.write(Side::value, cells, dense_view(values.data(), DType::f32, tokens, shape.kv_heads, shape.value_dim));
  // Statistics in every open page, then only in those that stay open.
  store.observe(cells, dense_view(keys.data(), DType::f32, tokens, shape.kv_heads, shape.key_dim));
  EXPECT_NEAR(static_cast<double>(store.bytes().total()), static_cast<double>(held()),
              0.01 * static_cast<double>(held()));
  store.seal_ready();
  const auto said = [&] { return static_cast<double>(store.bytes().total() + idle_bytes(*pool)); };
  EXPECT_NEAR(said(), static_cast<double>(held()), 0.01 * static_cast<double>(held())) << recipe << " " << tokens;

  const std::size_t full = store.bytes().total();
  // From a page boundary on: inside a sealed page the rest would be reopened, and grow.
  const std::int64_t kept = tokens / 2 / parsed.page * parsed.page;
  store.forget(kept, tokens - kept);
  EXPECT_LT(store.bytes().total(), full) << recipe;
  EXPECT_NEAR(said(), static_cast<double>(held()), 0.01 * static_cast<double>(held())) << recipe << " after forget";
}

TEST(Bytes, EqualTheAllocatorsCount) {
  for (const char* recipe :
       {"f16", "kivi:k=4,v=4,window=0", "kivi:k=2,v=2,window=128,sink=4", "kitty", "kivi:k=8,v=3,page=64",
        "waterfill:window=0", "waterfill:k=3,high=6,v=3,shared=1,page=64", "waterfill:feedback=1", "kvquant:window=0",
        "kvquant:k=4,v=2,outliers=0.05,page=32", "kvquant:rope=before", "zipcache", "k=zipcache,v=kivi:4,page=32"}) {
    check_cache(recipe, {8, 128, 128, DType::f16}, 2048);
    check_cache(recipe, {3, 64, 64, DType::f16}, 1000);
    check_cache(recipe, {2, 80, 112, DType::f32}, 700);
  }
}

// Sealed bytes follow from the layout alone: what `kvant info` estimates is what is allocated (D56).
TEST(Faults, D56_LayoutPredictsSealedBytes) {
  for (const char* recipe : {"kivi:k=4,v=4,window=0", "kitty:window=0,sink=0", "waterfill:window=0,sink=0,shared=1",
                             "kvquant:window=0,sink=0", "zipcache:window=0"}) {
    const CacheShape shape{8, 128, 128, DType::f16};
    Cache cache(parse_recipe(recipe), shape);
    const auto rows = testing::random_floats(std::size_t{1024} * 8 * 128, 3);
    const ConstView view = dense_view(rows.data(), DType::f32, 1024, 8, 128);
    cache.append(view, view);
    const PageLayout layout = make_layout(cache.recipe(), shape);
    EXPECT_EQ(cache.bytes().sealed, layout.page_bytes * 8);
    EXPECT_EQ(cache.bytes().open, 0U);
    EXPECT_NEAR(8.0 * static_cast<double>(cache.bytes().sealed) / (1024.0 * 8 * 256), layout.bits_per_value, 1e-12);
  }
}

// A cache gives memory back: what it no longer says it holds is with the allocator again.
TEST(Bytes, FallAfterTrimAndClear) {
  const CacheShape shape{4, 64, 64, DType::f16};
  const auto rows = testing::random_floats(std::size_t{2000} * 4 * 64, 5);
  // The tables of kernel sets and methods are made on first use and stay.
  ASSERT_FALSE(active_kernel().empty());
  ASSERT_EQ(Cache(parse_recipe("kivi"), shape).length(), 0);
  for (const char* recipe :
       {"f16", "kivi:window=0", "kitty:sink=4", "waterfill:window=0", "waterfill:feedback=1", "zipcache:window=0"}) {
    const std::int64_t before = testing::live_bytes();
    {
      Cache cache(parse_recipe(recipe), shape);
      const ConstView view = dense_view(rows.data(), DType::f32, 2000, 4, 64);
      cache.append(view, view);
      const auto held = [&] { return static_cast<double>(testing::live_bytes() - before); };
      const auto said = [&] { return static_cast<double>(cache.bytes().total()); };
      EXPECT_NEAR(said(), held(), 0.01 * held()) << recipe;
      const std::size_t full = cache.bytes().total();
      cache.trim(1000);
      EXPECT_LT(cache.bytes().total(), full * 65 / 100) << recipe;  // a reopened page is in it
      EXPECT_NEAR(said(), held(), 0.01 * held()) << recipe;
      cache.clear();
      EXPECT_EQ(cache.bytes().total(), cache.bytes().tables) << recipe;
      EXPECT_NEAR(said(), held(), 0.01 * held() + 512) << recipe;  // 512: the vectors inside the pool and the layout
    }
    EXPECT_EQ(testing::live_bytes(), before) << recipe << " leaks";
  }
}

// Whatever allocation fails, the object is as it was, and the same call after it does what it would have done.
template <class Object, class Call, class Bytes>
void expect_all_or_nothing(const char* recipe, const Object& before, const Call& call, const Bytes& bytes) {
  SCOPED_TRACE(recipe);
  const auto was = bytes(before);
  Object done = before;
  call(done);
  const auto becomes = bytes(done);
  for (std::int64_t after = 0;; after += 1 + after / 8) {
    Object copy = before;
    testing::fail_allocation_after(after);
    bool failed = false;
    try {
      call(copy);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    testing::fail_allocation_after(-1);
    if (!failed) return;
    ASSERT_EQ(bytes(copy), was) << "allocation " << after;
    call(copy);
    ASSERT_EQ(bytes(copy), becomes) << "after allocation " << after;
  }
}

TEST(Bytes, FailedAllocationsChangeNothing) {
  const CacheShape shape{2, 16, 16, DType::f16};
  const auto rows = testing::random_floats(std::size_t{700} * 2 * 16, 5);
  const auto view = [&](std::int64_t first, std::int64_t count) {
    return dense_view(rows.data() + first * 2 * 16, DType::f32, count, 2, 16);
  };
  for (const char* recipe :
       {"f16", "kivi:page=32,window=0,sink=4", "kitty:page=32,window=20", "waterfill:page=32,window=20,feedback=1",
        "zipcache:page=32,window=0,sink=4", "zipcache:page=32,window=20", "kvquant:page=32,window=20,rope=before"}) {
    Cache cache(parse_recipe(recipe), shape);
    if (cache.store().needs_rotation()) cache.set_key_rotation(make_rotation({RotaryPairs::halves, 16}));
    cache.append(view(0, 90), view(0, 90), view(0, 90));
    const auto image = [](const Cache& c) { return c.save(); };
    for (const std::int64_t count : {1, 70, 600}) {
      const auto append = [&](Cache& c) { c.append(view(90, count), view(90, count), view(90, count)); };
      expect_all_or_nothing(recipe, cache, append, image);
    }
    expect_all_or_nothing(
        recipe, cache, [](Cache& c) { c.trim(33); }, image);
    if (!cache.store().needs_rotation()) continue;
    std::vector<std::int64_t> cells(90);
    std::iota(cells.begin(), cells.end(), 0);
    const std::vector<std::int64_t> distances(90, 7);
    expect_all_or_nothing(
        recipe, cache.store(), [&](PageStore& s) { s.shift_keys(cells, distances); },
        [&](const PageStore& s) {
          std::vector<float> keys(90 * 2 * 16);
          s.read(Side::key, cells, dense_view(keys.data(), DType::f32, 90, 2, 16));
          return keys;
        });
  }
}

TEST(Bytes, WorkspaceIsCounted) {
  const CacheShape shape{8, 128, 128, DType::f16};
  PageStore store(parse_recipe("kivi"), shape, 256);
  const auto rows = testing::random_floats(std::size_t{256} * 8 * 128, 3);
  std::vector<std::int64_t> cells(256);
  std::iota(cells.begin(), cells.end(), 0);
  for (const Side side : {Side::key, Side::value})
    store.write(side, cells, dense_view(rows.data(), DType::f32, 256, 8, 128));
  std::vector<float> out(std::size_t{64} * 32 * 128);
  const auto queries = testing::random_floats(out.size(), 4);
  const std::int64_t before = testing::live_bytes();
  const auto workspace = make_workspace();
  attend(store, 256, dense_view(queries.data(), DType::f32, 64, 32, 128),
         dense_view(out.data(), DType::f32, 64, 32, 128), {}, *workspace);
  const auto held = static_cast<double>(testing::live_bytes() - before);
  EXPECT_NEAR(static_cast<double>(bytes_of(*workspace)), held, 0.01 * held);
}

}  // namespace
}  // namespace kvant
