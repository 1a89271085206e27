// Rows of the fault list that concern what attention computes: head ratios, stale memory, hidden rows, kernel switches.
#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant {
namespace {

using testing::ForcedKernel;
using testing::make_rows;
using testing::o1_error;
using testing::Rows;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Ratio 7 takes no shortcut for powers of two: each head of a group gets what it gets when nobody shares its keys.
TEST(Faults, D02_GroupsOfSevenEqualHeadsOfTheirOwn) {
  for (const char* recipe : {"kivi:k=2,v=2,window=0", "kivi:k=3,v=3,window=0", "kitty:window=0"}) {
    const Rows shared = make_rows({4, 128, 128, DType::f16}, 300, 2);
    Rows own = make_rows({28, 128, 128, DType::f16}, 300, 3);
    for (std::int64_t t = 0; t < 300; ++t) {
      for (int h = 0; h < 28; ++h) {
        for (int d = 0; d < 128; ++d) {
          own.key(t, h, d) = shared.keys[static_cast<std::size_t>((t * 4 + h / 7) * 128 + d)];
          own.value(t, h, d) = shared.values[static_cast<std::size_t>((t * 4 + h / 7) * 128 + d)];
        }
      }
    }
    const auto queries = testing::random_queries(2, 28, 128);
    const auto few = testing::attend(testing::filled(recipe, shared), queries, 2, 28);
    const auto many = testing::attend(testing::filled(recipe, own), queries, 2, 28);
    const std::vector<double> expected(many.out.begin(), many.out.end());
    EXPECT_LT(testing::relative_error(few.out, expected), 1e-5) << recipe;
  }
}

// Cells that are not written may hold anything that an earlier owner of the memory left.
TEST(Faults, D15_SpareCellsNeverReachTheResult) {
  const CacheShape shape{1, 32, 32, DType::f16};
  const Rows rows = make_rows(shape, 33, 4);
  for (const std::string& name : kernel_names()) {
    const ForcedKernel forced(name);
    PageStore store(parse_recipe("kivi"), shape, 128);
    testing::write_cells(store, rows, testing::cell_numbers(0, 33));
    for (const std::int64_t count : {1, 9}) {
      const auto queries = testing::random_queries(count, 1, 32);
      const auto clean = testing::attend(store, 128, queries, count, 1).out;
      const auto loud = Rows{shape, 95, std::vector<float>(95 * 32, 65504.0F), std::vector<float>(95 * 32, -65504.0F)};
      PageStore dirty = store;
      testing::write_cells(dirty, loud, testing::cell_numbers(33, 95));
      dirty.forget(33, 95);
      EXPECT_EQ(testing::attend(dirty, 128, queries, count, 1).out, clean) << name;
    }
  }
}

TEST(Faults, D16_RowsWhoseFirstTilesAreHidden) {
  const CacheShape shape{1, 32, 32, DType::f16};
  const Rows rows = make_rows(shape, 96, 5);
  for (const std::string& name : kernel_names()) {
    const ForcedKernel forced(name);
    for (const char* recipe : {"f16", "kivi:page=32,window=0", "kivi:page=32,window=0,sink=32"}) {
      PageStore store(parse_recipe(recipe), shape, 96);
      testing::write_cells(store, rows, testing::cell_numbers(0, 96));
      store.seal_ready();
      testing::Bias bias(2 * 96, 0.0);
      std::vector<float> mask(2 * 96, 0.0F);
      for (std::size_t i = 0; i < 2 * 96; ++i) {
        if (i < 64 || i >= 96) mask[i] = -kInfinity;
        bias[i] = mask[i];
      }
      const auto queries = testing::random_queries(2, 1, 32);
      const auto expected = testing::expected_from(store, 96, queries, 2, 1, bias);
      for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
        const auto bytes = testing::as_type(mask, type);
        AttentionOptions options;
        options.mask = {bytes.data(), type, 96, 0};
        const auto result = testing::attend(store, 96, queries, 2, 1, options);
        EXPECT_LT(testing::relative_error(result.out, expected.out), testing::kTolerance)
            << name << " " << recipe << " " << name_of(type);
        for (std::size_t d = 32; d < 64; ++d) EXPECT_EQ(result.out[d], 0.0F) << name << " " << name_of(type);
        EXPECT_EQ(result.lse[1], -kInfinity);
        // A learned sink of -inf is no sink.
        const float no_sink = -kInfinity;
        options.sinks = &no_sink;
        EXPECT_EQ(testing::attend(store, 96, queries, 2, 1, options).out, result.out);
      }
    }
  }
}

TEST(Faults, D25_D26_D27_EveryTypeWidthSizeAndKernelSet) {
  for (const std::string& name : kernel_names()) {
    const ForcedKernel forced(name);
    for (const int key : {2, 3, 4, 8}) {
      for (const int value : {2, 3, 4, 8}) {
        const std::string recipe = "kivi:window=0,k=" + std::to_string(key) + ",v=" + std::to_string(value);
        for (const int dim : {64, 128, 256}) {
          const std::int64_t rows = (key + value + dim / 64) % 2 == 0 ? 1 : 8;
          EXPECT_LT(o1_error(parse_recipe(recipe), {{1, dim, dim, DType::f16}, 2, 257, rows}), testing::kTolerance)
              << name << " " << recipe << " D=" << dim << " rows " << rows;
        }
      }
    }
    EXPECT_LT(o1_error(parse_recipe("kivi:window=0"), {{1, 576, 512, DType::f16}, 4, 257, 1}), testing::kTolerance);
  }
}

TEST(Faults, D45_MaskOfABatchedGroupedQuery) {
  const CacheShape shape{8, 32, 32, DType::f16};
  const Rows rows = make_rows(shape, 66, 6);
  PageStore store(parse_recipe("kivi:page=32,window=0"), shape, 66);
  testing::write_cells(store, rows, testing::cell_numbers(0, 66));
  ASSERT_EQ(store.seal_ready(), 3);  // the last page has two cells
  const auto queries = testing::random_queries(1, 16, 32);
  std::vector<float> mask = testing::random_floats(16 * 66, 7);
  for (const std::int64_t head_stride : {0, 66}) {
    for (std::size_t i = 0; i < mask.size(); i += 5) mask[i] = -kInfinity;  // left padding and holes
    testing::Bias bias;
    for (std::size_t h = 0; h < 16; ++h) {
      const auto row = mask.begin() + static_cast<std::ptrdiff_t>(h) * head_stride;
      bias.insert(bias.end(), row, row + 66);
    }
    AttentionOptions options;
    options.mask = {mask.data(), DType::f32, 16 * 66, head_stride};
    const auto expected = testing::expected_from(store, 66, queries, 1, 16, bias);
    const auto result = testing::attend(store, 66, queries, 1, 16, options);
    EXPECT_LT(testing::relative_error(result.out, expected.out), testing::kTolerance) << head_stride;
    for (std::size_t i = 0; i < 16; ++i) EXPECT_NEAR(result.lse[i], expected.lse[i], 2e-3);
  }
}

// What is not a number comes out as such; it is never a fluent answer from the other cells.
TEST(Attention, NotFiniteQueriesReachTheirOwnRowsOnly) {
  const Rows rows = make_rows({2, 32, 32, DType::f16}, 200, 8);
  for (const std::string& name : kernel_names()) {
    const ForcedKernel forced(name);
    for (const char* recipe : {"f16", "kivi:page=32,window=40,sink=3", "kitty:page=32,window=0"}) {
      const Cache cache = testing::filled(recipe, rows);
      for (const float bad : {kNan, kInfinity}) {
        auto queries = testing::random_queries(3, 4, 32);
        queries[(1 * 4 + 2) * 32 + 11] = bad;
        for (const int threads : {1, 3}) {
          AttentionOptions options;
          options.threads = threads;
          const auto result = testing::attend(cache, queries, 3, 4, options);
          for (std::size_t i = 0; i < result.out.size(); ++i) {
            ASSERT_EQ(std::isnan(result.out[i]), i / 32 == 6) << name << " " << recipe << " " << i;
          }
          EXPECT_TRUE(std::isnan(result.lse[6]));
        }
      }
    }
  }
}

// Weights of a page far below the maximum are tiny but not zero: scaling them to integers must not overflow.
TEST(Attention, PagesFarBelowTheMaximumAddNothing) {
  for (const std::string& name : kernel_names()) {
    const ForcedKernel forced(name);
    for (const float gap : {60.0F, 75.0F, 80.0F, 85.0F, 90.0F, 95.0F, 101.0F, 500.0F}) {
      Rows rows = make_rows({1, 32, 32, DType::f16}, 256, 9);
      for (std::int64_t t = 0; t < 256; ++t) {
        for (int d = 0; d < 32; ++d) rows.key(t, 0, d) = 0.01F * rows.value(t, 0, d);
        rows.key(t, 0, 0) = t == 5 ? gap : 0.0F;
      }
      const Cache cache = testing::filled("kivi:k=8,v=4,window=0", rows);
      std::vector<float> queries(32, 0.1F);
      queries[0] = 1;
      AttentionOptions options;
      options.scale = 1;
      const auto expected = testing::expected_from(cache.store(), 256, queries, 1, 1, {}, 0, nullptr, 1);
      const auto result = testing::attend(cache, queries, 1, 1, options);
      ASSERT_LT(testing::relative_error(result.out, expected.out), testing::kTolerance) << name << " gap " << gap;
    }
  }
}

}  // namespace
}  // namespace kvant
