// PageStore: views, refusals, sealing and reopening, sharing.
#include "cache/store.hpp"

#include <gtest/gtest.h>

#include "kvant/page_store.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

using testing::cell_numbers;
using testing::dump;
using testing::expect_error;
using testing::make_rows;
using testing::read_all;
using testing::Rows;
using testing::write_cells;

constexpr CacheShape kShape{2, 5, 7, DType::f16};

PageStore make_store(const char* recipe, std::int64_t cells, const CacheShape& shape = kShape) {
  return PageStore(parse_recipe(recipe), shape, cells);
}

TEST(PageStore, StartsUnwrittenAndReadsZeros) {
  const PageStore store = make_store("kivi", 300);
  EXPECT_EQ(store.cells(), 300);
  EXPECT_FALSE(store.is_written(0));
  EXPECT_FALSE(store.is_written(-1));
  EXPECT_FALSE(store.is_written(300));
  EXPECT_FALSE(store.is_sealed(-1));
  EXPECT_FALSE(store.is_sealed(99));
  EXPECT_TRUE(store.sealed_block(0).empty());
  for (const float x : read_all(store, Side::key, 300)) EXPECT_EQ(x, 0.0F);
  EXPECT_EQ(store.bytes().open + store.bytes().sealed + store.bytes().exact, 0U);
}

TEST(PageStore, StridedPermutedAndNarrowInputsAreTheSame) {
  const Rows rows = make_rows(kShape, 40, 3);
  PageStore dense = make_store("kivi:page=32,window=0", 64);
  write_cells(dense, rows, cell_numbers(5, 40));

  // [heads][dim][tokens], every second element, and rows written backwards through a negative stride.
  PageStore strided = make_store("kivi:page=32,window=0", 64);
  for (const Side side : {Side::key, Side::value}) {
    const int dim = side == Side::key ? 5 : 7;
    const std::vector<float>& from = side == Side::key ? rows.keys : rows.values;
    std::vector<float> odd(static_cast<std::size_t>(2 * dim * 40 * 2), std::numeric_limits<float>::quiet_NaN());
    for (int t = 0; t < 40; ++t) {
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < dim; ++d) {
          odd[static_cast<std::size_t>(((h * dim + d) * 40 + 39 - t) * 2)] =
              from[static_cast<std::size_t>((t * 2 + h) * dim + d)];
        }
      }
    }
    const ConstView view{odd.data() + 39 * 2, DType::f32, {40, 2, dim}, {-2, dim * 80, 80}};
    strided.write(side, cell_numbers(5, 40), view);
  }
  EXPECT_EQ(dump(strided), dump(dense));

  for (const DType type : {DType::f16, DType::bf16}) {
    const auto keys = testing::as_type(rows.keys, type);
    const auto values = testing::as_type(rows.values, type);
    PageStore typed = make_store("kivi:page=32,window=0", 64);
    typed.write(Side::key, cell_numbers(5, 40), dense_view(keys.data(), type, 40, 2, 5));
    typed.write(Side::value, cell_numbers(5, 40), dense_view(values.data(), type, 40, 2, 7));
    const std::vector<float> stored = read_all(typed, Side::key, 64);
    for (std::size_t i = 0; i < rows.keys.size(); ++i) {
      EXPECT_EQ(stored[i + 50], testing::rounded_to(DType::f16, testing::rounded_to(type, rows.keys[i])));
    }
  }
}

TEST(PageStore, BroadcastInputThroughAZeroStride) {
  PageStore store = make_store("f16", 32);
  const std::vector<float> row = {1, 2, 3, 4, 5};
  store.write(Side::key, cell_numbers(0, 3), {row.data(), DType::f32, {3, 2, 5}, {0, 0, 1}});
  const std::vector<float> stored = read_all(store, Side::key, 3);
  for (std::size_t i = 0; i < stored.size(); ++i) EXPECT_EQ(stored[i], row[i % 5]);
}

TEST(PageStore, ReadWritesIntoAnyView) {
  const Rows rows = make_rows(kShape, 32);
  PageStore store = make_store("kivi:page=32,window=0", 32);
  write_cells(store, rows, cell_numbers(0, 32));
  ASSERT_EQ(store.seal_ready(), 1);
  const std::vector<float> dense = read_all(store, Side::value, 32);
  std::vector<std::uint16_t> out(3 * 2 * 7 * 3, 0xABCD);
  store.read(Side::value, std::vector<std::int64_t>{31, 0, 7}, {out.data(), DType::bf16, {3, 2, 7}, {3, 63, 9}});
  for (int i = 0; i < 3; ++i) {
    for (int h = 0; h < 2; ++h) {
      for (int d = 0; d < 7; ++d) {
        const int cell = i == 0 ? 31 : (i == 1 ? 0 : 7);
        EXPECT_EQ(out[static_cast<std::size_t>(i * 3 + h * 63 + d * 9)],
                  base::float_to_bfloat(dense[static_cast<std::size_t>((cell * 2 + h) * 7 + d)]));
      }
    }
  }
  EXPECT_EQ(out[1], 0xABCD);
}

TEST(PageStore, RefusesAndStaysUnchanged) {
  PageStore store = make_store("kivi:page=32,window=0", 100);
  write_cells(store, make_rows(kShape, 50), cell_numbers(0, 50));
  ASSERT_EQ(store.seal_ready(), 1);
  const std::string before = dump(store);
  Rows rows = make_rows(kShape, 3, 9);
  const std::vector<std::int64_t> cells = {1, 60, 99};
  const auto write_keys = [&](const ConstView& view, std::vector<std::int64_t> positions = {}) {
    store.write(Side::key, cells, view, positions);
  };
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 65520.0F,
                              -1e30F};
  for (const float bad : bad_values) {
    for (const std::size_t at : {std::size_t{0}, rows.keys.size() - 1}) {
      const float saved = std::exchange(rows.keys[at], bad);
      expect_error(ErrorCode::not_finite, {"key row", "f16"}, [&] { write_keys(rows.key_view(0, 3)); });
      rows.keys[at] = saved;
    }
    rows.values[8] = bad;
    expect_error(ErrorCode::not_finite, {"value row 0"},
                 [&] { store.write(Side::value, cells, rows.value_view(0, 3)); });
  }
  expect_error(ErrorCode::invalid_argument, {"2 x 2 x 5", "3 x 2 x 5"}, [&] { write_keys(rows.key_view(0, 2)); });
  expect_error(ErrorCode::invalid_argument, {"3 x 2 x 7"}, [&] { write_keys(rows.value_view(0, 3)); });
  expect_error(ErrorCode::invalid_argument, {"no data"}, [&] {
    write_keys({nullptr, DType::f32, {3, 2, 5}, {10, 5, 1}});
  });
  expect_error(ErrorCode::invalid_argument, {"positions", "2", "3"}, [&] { write_keys(rows.key_view(0, 3), {1, 2}); });
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{100}, std::int64_t{1} << 60}) {
    const std::vector<std::int64_t> outside = {1, 2, bad};
    expect_error(ErrorCode::out_of_range, {std::to_string(bad), "0..99"},
                 [&] { store.write(Side::key, outside, rows.key_view(0, 3)); });
    std::vector<float> out(30);
    expect_error(ErrorCode::out_of_range, {std::to_string(bad)},
                 [&] { store.read(Side::key, outside, dense_view(out.data(), DType::f32, 3, 2, 5)); });
  }
  expect_error(ErrorCode::out_of_range, {"forget"}, [&] { store.forget(0, 101); });
  expect_error(ErrorCode::out_of_range, {"forget"}, [&] { store.forget(-1, 2); });
  expect_error(ErrorCode::out_of_range, {"forget"}, [&] { store.forget(1, std::numeric_limits<std::int64_t>::max()); });
  expect_error(ErrorCode::out_of_range, {"copy_cells"}, [&] { store.copy_cells(store, 0, 90, 11); });
  expect_error(ErrorCode::out_of_range, {"copy_cells"},
               [&] { store.copy_cells(store, 1, 1, std::numeric_limits<std::int64_t>::max()); });
  const PageStore other = make_store("kivi:page=32,window=1", 100);
  expect_error(ErrorCode::invalid_argument, {"recipe or shape"}, [&] { store.copy_cells(other, 0, 0, 1); });
  EXPECT_EQ(dump(store), before);
  expect_error(ErrorCode::invalid_argument, {"cells is -1"}, [] { make_store("kivi", -1); });
}

TEST(PageStore, LargestValuesOfEachTypeAreKept) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const float largest = dtype == DType::f16 ? base::kMaxHalf : base::max_finite(dtype) / 2;
    Rows rows = make_rows({1, 4, 4, dtype}, 32);
    rows.key(3, 0, 1) = largest;
    rows.key(4, 0, 1) = -largest;
    rows.value(3, 0, 1) = largest;
    rows.value(3, 0, 2) = -largest;
    PageStore store = make_store("kivi:page=32,window=0", 32, rows.shape);
    write_cells(store, rows, cell_numbers(0, 32));
    ASSERT_EQ(store.seal_ready(), 1);
    for (const Side side : {Side::key, Side::value}) {
      for (const float x : read_all(store, side, 32)) ASSERT_TRUE(std::isfinite(x)) << name_of(dtype);
    }
  }
}

// Decoding and encoding again without a change in between must be free of drift, for every width and type.
TEST(PageStore, ReopenedAndSealedAgainIsTheSameBlock) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const char* rest : {",page=32,window=0", ",page=32,window=0,sink=5"}) {
        const std::string recipe = "kivi:k=" + std::to_string(bits) + ",v=" + std::to_string(bits) + rest;
        PageStore store = make_store(recipe.c_str(), 32, {2, 20, 18, dtype});
        write_cells(store, make_rows(store.shape(), 32, static_cast<std::uint32_t>(bits)), cell_numbers(0, 32));
        ASSERT_EQ(store.seal_ready(), 1);
        const auto block = store.sealed_block(0);
        const std::vector<std::byte> first(block.begin(), block.end());
        for (int again = 0; again < 3; ++again) {
          store.impl().open(0);
          ASSERT_EQ(store.seal_ready(), 1);
          const auto next = store.sealed_block(0);
          ASSERT_TRUE(std::equal(first.begin(), first.end(), next.begin(), next.end()))
              << recipe << " " << name_of(dtype) << ", round " << again;
        }
      }
    }
  }
}

TEST(PageStore, CopiesShareSealedPagesAndNotOpenOnes) {
  PageStore a = make_store("kivi:page=32,window=0", 96);
  write_cells(a, make_rows(kShape, 70), cell_numbers(0, 70));
  ASSERT_EQ(a.seal_ready(), 2);
  PageStore b = a;
  EXPECT_EQ(a.sealed_block(0).data(), b.sealed_block(0).data());
  PageStore c = make_store("kivi:page=32,window=0", 96);
  c.copy_cells(a, 0, 32, 64);
  EXPECT_EQ(c.sealed_block(1).data(), a.sealed_block(0).data());
  EXPECT_EQ(c.sealed_block(2).data(), a.sealed_block(1).data());
  const std::string before = dump(a);
  write_cells(b, make_rows(kShape, 2, 50), {3, 65});
  c.clear();
  EXPECT_EQ(dump(a), before);
  EXPECT_NE(dump(b), before);
  EXPECT_FALSE(c.is_written(40));
}

TEST(PageStore, ForgettingNothingChangesNothing) {
  PageStore store = make_store("kivi:page=32,window=0", 64);
  write_cells(store, make_rows(kShape, 64), cell_numbers(0, 64));
  ASSERT_EQ(store.seal_ready(), 2);
  const std::string before = dump(store);
  for (const std::int64_t at : {0, 5, 32, 40, 64}) store.forget(at, 0);
  EXPECT_EQ(dump(store), before);
}

// A pool may serve stores whose pages have one size but hold another type: a bfloat16 is often NaN as binary16.
TEST(PageStore, StaleBuffersOfASharedPoolAreNeverRead) {
  const auto pool = make_page_pool();
  const CacheShape bf16{1, 16, 16, DType::bf16};
  {
    PageStore store(parse_recipe("f16"), bf16, 128, pool);
    std::vector<float> ones(128 * 16, 1.6e38F);
    const ConstView view = dense_view(ones.data(), DType::f32, 128, 1, 16);
    store.write(Side::key, cell_numbers(0, 128), view);
    store.write(Side::value, cell_numbers(0, 128), view);
  }
  ASSERT_GT(idle_bytes(*pool), 0U);
  const CacheShape f16{1, 16, 16, DType::f16};
  for (const char* recipe : {"f16", "kivi"}) {
    PageStore reused(parse_recipe(recipe), f16, 128, pool);
    PageStore fresh(parse_recipe(recipe), f16, 128);
    const Rows rows = make_rows(f16, 33);
    write_cells(reused, rows, cell_numbers(0, 33));
    write_cells(fresh, rows, cell_numbers(0, 33));
    for (const std::int64_t count : {1, 7, 8, 9}) {
      const auto queries = testing::random_queries(count, 1, 16);
      EXPECT_EQ(testing::attend(reused, 128, queries, count, 1).out,
                testing::attend(fresh, 128, queries, count, 1).out);
    }
  }
}

}  // namespace
}  // namespace kvant
