// Inputs at the edges of what is allowed, and just beyond: each was wrong once.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "cache/workspace.hpp"
#include "kvant/kvant.hpp"
#include "support/model.hpp"

namespace kvant {
namespace {

using testing::expect_error;

std::vector<std::int64_t> first_cells(std::int64_t count) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(count));
  std::iota(cells.begin(), cells.end(), 0);
  return cells;
}

// What codes decode to may leave the type where values are rotated, divided or keys turned back: it ends at its limit.
TEST(Edges, RowsNextToTheLimitComeBackFinite) {
  const CacheShape shape{1, 64, 64, DType::f16};
  std::vector<float> rows = testing::random_floats(std::size_t{32} * 64, 7);
  for (float& x : rows) x = std::copysign(std::fmod(std::fabs(x) * 7e4F, 65504.0F), x);
  const ConstView view = dense_view(std::as_const(rows).data(), DType::f32, 32, 1, 64);
  for (const char* recipe : {"balanced:page=32,window=0", "zipcache:page=32,window=0",
                             "kvquant:rope=before,page=32,window=0", "kitty:page=32,window=0,sink=0"}) {
    SCOPED_TRACE(recipe);
    PageStore store(parse_recipe(recipe), shape, 32);
    if (store.needs_rotation()) store.set_key_rotation(make_rotation({RotaryPairs::halves, 64}));
    const auto cells = first_cells(32);
    store.write(Side::key, cells, view);
    store.write(Side::value, cells, view);
    ASSERT_EQ(store.seal_ready(), 1);
    std::vector<float> back(rows.size());
    for (const Side side : {Side::key, Side::value}) {
      store.read(side, cells, dense_view(back.data(), DType::f32, 32, 1, 64));
      for (const float x : back) ASSERT_LE(std::fabs(x), 65504.0F);
    }
    PageStore copy(parse_recipe(recipe), shape, 32);
    copy.copy_cells(store, 1, 3, 20);  // rows of a sealed page are written again
    EXPECT_TRUE(copy.is_written(3) && copy.is_written(22));
    std::vector<std::uint16_t> out(64);
    Workspace workspace;
    std::vector<float> query(64, 1e-6F);
    attend(store, 32, dense_view(std::as_const(query).data(), DType::f32, 1, 1, 64),
           dense_view(out.data(), DType::f16, 1, 1, 64), {}, workspace);
    for (const std::uint16_t bits : out) EXPECT_NE(bits & 0x7C00, 0x7C00);
  }
}

// The options of both sides belong to the recipe that its first two words only begin.
TEST(Edges, WidthsBeyondTheDefaultsSurviveTheirText) {
  Recipe recipe = parse_recipe("kvquant");
  WaterfillKeys keys;
  keys.bits = 5.5;
  keys.high = 6;
  recipe.key = keys;
  EXPECT_EQ(parse_recipe(to_text(recipe)), recipe);
  const Cache cache(recipe, {1, 64, 64, DType::f16});
  EXPECT_EQ(Cache::load(cache.save()).recipe(), recipe);
  expect_error(ErrorCode::invalid_argument, {"5.5"}, [] { parse_recipe("k=waterfill:5.5,v=kivi:4"); });
}

// A page that a trim has opened goes on as the one of its image does.
TEST(Edges, TrimmedZipcacheGoesOnAsItsImage) {
  const CacheShape shape{2, 64, 64, DType::f16};
  for (const char* recipe : {"zipcache:page=32,window=0", "zipcache:page=32,window=10"}) {
    const testing::Rows rows = testing::make_rows(shape, 128, 5);
    for (const std::int64_t trimmed : {1, 7, 20, 31, 33}) {
      Cache cache(parse_recipe(recipe), shape);
      cache.append(rows.key_view(0, 64), rows.value_view(0, 64), rows.query_view(0, 64));
      cache.trim(trimmed);
      Cache loaded = Cache::load(cache.save());
      for (Cache* each : {&cache, &loaded}) {
        each->append(rows.key_view(64, 64), rows.value_view(64, 64), rows.query_view(64, 64));
      }
      EXPECT_EQ(cache.save(), loaded.save()) << recipe << ", trimmed by " << trimmed;
    }
  }
}

TEST(Edges, RefusedQueriesLeaveACacheItsSize) {
  const CacheShape shape{2, 64, 64, DType::f16};
  const testing::Rows rows = testing::make_rows(shape, 300, 5);
  Cache cache(parse_recipe("zipcache:page=32,window=0"), shape);
  cache.append(rows.key_view(0, 40), rows.value_view(0, 40), rows.query_view(0, 40));
  const std::size_t bytes = cache.bytes().total();
  const std::vector<float> others(std::size_t{260} * 64 * 64);
  const auto append = [&](std::int64_t heads) {
    ConstView queries = dense_view(others.data(), DType::f32, 260, heads, 64);
    if (heads > 64) queries.stride[0] = queries.stride[1] = 0;
    cache.append(rows.key_view(40, 260), rows.value_view(40, 260), queries);
  };
  expect_error(ErrorCode::invalid_argument, {"query heads are 64"}, [&] { append(64); });
  expect_error(ErrorCode::invalid_argument, {"query heads are 70000", "65536"}, [&] { append(70000); });
  EXPECT_EQ(cache.bytes().total(), bytes);
  EXPECT_EQ(cache.length(), 40);
}

TEST(Edges, ObservedQueriesAreChecked) {
  PageStore store(parse_recipe("zipcache"), {1, 64, 64, DType::f16}, 128);
  const std::vector<float> row(64, 0.1F);
  const auto observe = [&](std::int64_t rows, float scale, float softcap) {
    store.observe({}, dense_view(row.data(), DType::f32, rows, 1, 64), {scale, softcap});
  };
  expect_error(ErrorCode::invalid_argument, {"-5 rows"}, [&] { observe(-5, 0, 0); });
  expect_error(ErrorCode::invalid_argument, {"scale is nan"}, [&] { observe(1, std::nanf(""), 0); });
  expect_error(ErrorCode::invalid_argument, {"softcap -1"}, [&] { observe(1, 0, -1); });
}

TEST(Edges, AttentionNamesWhatItCannotDo) {
  const CacheShape shape{1, 64, 64, DType::f16};
  const testing::Rows rows = testing::make_rows(shape, 8, 5);
  Cache cache(parse_recipe("kivi"), shape);
  cache.append(rows.key_view(0, 8), rows.value_view(0, 8));
  std::vector<float> query(64, 0.1F), out(64);
  Workspace workspace;
  const auto run = [&](std::int64_t heads, const AttentionOptions& options) {
    ConstView queries = dense_view(std::as_const(query).data(), DType::f32, 1, heads, 64);
    View result = dense_view(out.data(), DType::f32, 1, heads, 64);
    queries.stride[1] = result.stride[1] = 0;
    attend(cache.store(), 8, queries, result, options, workspace);
  };
  for (const std::int64_t heads : {std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{65537}}) {
    expect_error(ErrorCode::invalid_argument, {std::to_string(heads), "65536"}, [&] { run(heads, {}); });
  }
  AttentionOptions options;
  for (const std::int64_t first : {std::numeric_limits<std::int64_t>::max(), std::int64_t{-7}}) {
    options.first_position = first;
    expect_error(ErrorCode::invalid_argument, {"first_position", std::to_string(first)}, [&] { run(1, options); });
  }
  options = {};
  options.sliding_window = -3;
  expect_error(ErrorCode::invalid_argument, {"sliding_window is -3"}, [&] { run(1, options); });
}

TEST(Edges, CellsAreShiftedOnceACall) {
  const CacheShape shape{1, 64, 64, DType::f16};
  const testing::Rows rows = testing::make_rows(shape, 8, 5);
  PageStore store(parse_recipe("kvquant:rope=before"), shape, 8);
  store.set_key_rotation(make_rotation({RotaryPairs::halves, 64}));
  store.write(Side::key, first_cells(8), rows.key_view(0, 8));
  const std::vector<std::int64_t> cells = {5, 1, 5};
  const std::vector<std::int64_t> far(3, 2147483000);
  expect_error(ErrorCode::invalid_argument, {"cell 5", "twice"}, [&] { store.shift_keys(cells, far); });
}

TEST(Edges, RotationsHaveLimits) {
  float row[2] = {};
  const KeyRotation rotation{RotaryPairs::halves, {1.0}, 1};
  const std::vector<std::int64_t> positions = {1};
  expect_error(ErrorCode::invalid_argument, {"-2"}, [&] { undo_rotation(rotation, positions, 1, -2, row); });
  expect_error(ErrorCode::invalid_argument, {"heads is -1"}, [&] { undo_rotation(rotation, positions, -1, 2, row); });
  for (const double attention : {0.0, -1.0, std::nan(""), 1e300}) {
    expect_error(ErrorCode::invalid_argument, {"magnitude"}, [&] {
      RopeParameters rope{RotaryPairs::halves, 64};
      rope.attention = attention;
      make_rotation(rope);
    });
  }
  RopeParameters rope{RotaryPairs::halves, 64};
  rope.scale = 1e300;
  expect_error(ErrorCode::invalid_argument, {"frequency"}, [&] { make_rotation(rope); });
}

// OpenMP ends the process where it cannot start the threads it is asked for.
TEST(Edges, AnyNumberOfThreadsIsServed) {
  constexpr std::int64_t kTokens = 400 * 32;  // 25600 tiles
  PageStore store(parse_recipe("kivi:page=32,window=0"), {32, 8, 8, DType::f16}, kTokens);
  const std::vector<float> row(32 * 8, 0.5F);
  ConstView rows = dense_view(row.data(), DType::f32, kTokens, 32, 8);
  rows.stride[0] = 0;
  store.write(Side::key, first_cells(kTokens), rows);
  store.write(Side::value, first_cells(kTokens), rows);
  EXPECT_EQ(store.seal_ready(INT_MAX), 400);
}

}  // namespace
}  // namespace kvant
