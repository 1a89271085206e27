// Masks, ALiBi, learned sinks, log-sum-exp, empty rows and thread counts, through kvant::attend on a PageStore.
#include <gtest/gtest.h>

#include <cstring>

#include "base/half.hpp"
#include "support/oracle.hpp"

namespace kvant {
namespace {

using testing::Bias;
using testing::random_floats;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A filled store of 2 KV heads, D = 64, and queries of 3 heads each.
struct Scene {
  CacheShape shape{2, 64, 64, DType::f16};
  int group = 3;
  std::int64_t tokens;
  std::int64_t rows;
  PageStore store;
  std::vector<float> queries;
  std::vector<float> out;
  std::vector<float> lse;

  Scene(const char* recipe, std::int64_t n_tokens, std::int64_t n_rows, std::int64_t cells = 0)
      : tokens(n_tokens), rows(n_rows), store(parse_recipe(recipe), shape, cells > 0 ? cells : n_tokens) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(tokens));
    std::iota(all.begin(), all.end(), 0);
    const auto keys = testing::random_keys(tokens, 2, 64, 3);
    const auto values = random_floats(static_cast<std::size_t>(tokens * 128), 4);
    store.write(Side::key, all, dense_view(keys.data(), DType::f32, tokens, 2, 64));
    store.write(Side::value, all, dense_view(values.data(), DType::f32, tokens, 2, 64));
    store.seal_ready();
    queries = random_floats(static_cast<std::size_t>(rows * 6 * 64), 5, 0.5F);
    out.assign(queries.size(), -1.0F);
    lse.assign(static_cast<std::size_t>(rows * 6), -1.0F);
  }

  void attend(const AttentionOptions& options, std::int64_t n_cells = -1) {
    const auto workspace = make_workspace();
    kvant::attend(store, n_cells < 0 ? tokens : n_cells, dense_view(queries.data(), DType::f32, rows, 6, 64),
                  dense_view(out.data(), DType::f32, rows, 6, 64), options, *workspace, lse.data());
  }

  testing::Expected expect(const Bias& bias, const float* sinks = nullptr) const {
    return testing::attend_fp64(shape, group, tokens, rows, testing::read_all(store, Side::key, tokens),
                                testing::read_all(store, Side::value, tokens), queries, 0.125, 0, bias, sinks);
  }
};

void expect_lse(const Scene& scene, const testing::Expected& expected) {
  for (std::size_t i = 0; i < scene.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      EXPECT_EQ(scene.lse[i], -std::numeric_limits<float>::infinity());
    } else {
      EXPECT_NEAR(scene.lse[i], expected.lse[i], 2e-3 * std::max(1.0, std::fabs(expected.lse[i])));
    }
  }
}

// A random additive mask: a third hidden, a third zero, a third biased. Row 1 is hidden altogether.
std::vector<float> random_mask(std::int64_t rows, std::int64_t tokens, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> mask(static_cast<std::size_t>(rows * tokens));
  for (std::size_t i = 0; i < mask.size(); ++i) {
    const auto kind = generator() % 3;
    mask[i] = kind == 0 ? -std::numeric_limits<float>::infinity()
                        : (kind == 1 ? 0.0F : static_cast<float>(generator() % 64) / 16.0F);
    if (static_cast<std::int64_t>(i) / tokens == 1) mask[i] = -std::numeric_limits<float>::infinity();
  }
  return mask;
}

TEST(Mask, AdditiveInBothTypesSharedByHeads) {
  for (const char* recipe : {"f16", "kivi:k=4,v=4,window=0", "kitty:window=0,sink=5", "zipcache:window=0,sink=5"}) {
    for (const DType type : {DType::f32, DType::f16}) {
      Scene scene(recipe, 300, 5);
      const std::vector<float> mask = random_mask(5, 300, 11);
      std::vector<std::byte> stored(mask.size() * size_of(type));
      for (std::size_t i = 0; i < mask.size(); ++i)
        base::store_float(stored.data(), type, static_cast<std::int64_t>(i), mask[i]);
      AttentionOptions options;
      options.mask = {stored.data(), type, 300, 0};
      scene.attend(options);
      Bias bias(static_cast<std::size_t>(5 * 6 * 300));
      for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = mask[i / 1800 * 300 + i % 300];
      const auto expected = scene.expect(bias);
      EXPECT_LT(testing::relative_error(scene.out, expected.out), testing::kTolerance) << recipe;
      expect_lse(scene, expected);
      for (std::size_t i = 6 * 64; i < 12 * 64; ++i) EXPECT_EQ(scene.out[i], 0.0F) << "the hidden row is zeros";
    }
  }
}

TEST(Mask, OfEachHeadItsOwn) {
  for (const char* recipe : {"kivi:k=2,v=2,window=0", "k=zipcache,v=kivi,window=0"}) {
    Scene scene(recipe, 260, 2);
    const std::vector<float> mask = random_mask(12, 260, 12);  // [heads][rows]: strides are free
    AttentionOptions options;
    options.mask = {mask.data(), DType::f32, 260, 2 * 260};
    scene.attend(options);
    Bias bias(static_cast<std::size_t>(2 * 6 * 260));
    for (std::size_t r = 0; r < 2; ++r) {
      for (std::size_t h = 0; h < 6; ++h) {
        for (std::size_t t = 0; t < 260; ++t) bias[(r * 6 + h) * 260 + t] = mask[(h * 2 + r) * 260 + t];
      }
    }
    EXPECT_LT(testing::relative_error(scene.out, scene.expect(bias).out), testing::kTolerance) << recipe;
  }
}

// Slopes of 6 heads: 4 of the powers of 2^-2, then every other of the finer series (Press et al., section 3).
TEST(Mask, AlibiByPositionAndByMask) {
  const double slopes[] = {0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125};
  Bias bias(static_cast<std::size_t>(3 * 6 * 200));
  std::vector<float> distance(static_cast<std::size_t>(3 * 200));
  for (std::size_t r = 0; r < 3; ++r) {
    for (std::size_t t = 0; t < 200; ++t) {
      const double d = static_cast<double>(t) - static_cast<double>(197 + r);
      distance[r * 200 + t] = d > 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(d);
      for (std::size_t h = 0; h < 6; ++h) bias[(r * 6 + h) * 200 + t] = d > 0 ? -kInfinity : slopes[h] * d;
    }
  }
  Scene scene("kivi:k=4,v=4,window=0", 200, 3);
  AttentionOptions options;
  options.max_bias = 8;
  options.first_position = 197;
  scene.attend(options);
  const auto expected = scene.expect(bias);
  EXPECT_LT(testing::relative_error(scene.out, expected.out), testing::kTolerance);
  options.first_position = -1;
  options.mask = {distance.data(), DType::f32, 200, 0};
  scene.attend(options);
  EXPECT_LT(testing::relative_error(scene.out, expected.out), testing::kTolerance);
}

TEST(Mask, LearnedSinksJoinTheDenominatorOnly) {
  Scene scene("kitty:window=0", 200, 2);
  const std::vector<float> sinks = {-3.0F, 0.0F, 5.0F, 40.0F, 1.0F, -90.0F};
  AttentionOptions options;
  options.sinks = sinks.data();
  scene.attend(options);
  const auto expected = scene.expect({}, sinks.data());
  EXPECT_LT(testing::relative_error(scene.out, expected.out), testing::kTolerance);
  expect_lse(scene, expected);
}

TEST(Mask, CellsBeyondTheAskedOnesAndUnwrittenOnesAreHidden) {
  Scene scene("kivi:k=4,v=4,window=0", 200, 1, 500);  // cells 200..499 unwritten
  scene.attend({}, 500);
  EXPECT_LT(testing::relative_error(scene.out, scene.expect({}).out), testing::kTolerance);
  scene.attend({}, 77);
  Bias bias(static_cast<std::size_t>(6 * 200), 0.0);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = i % 200 < 77 ? 0.0 : -kInfinity;
  EXPECT_LT(testing::relative_error(scene.out, scene.expect(bias).out), testing::kTolerance);
  scene.attend({}, 0);
  for (const float value : scene.out) EXPECT_EQ(value, 0.0F);
  for (const float value : scene.lse) EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
}

// The context is long enough that every thread gets pages of its own (D64 of the fault list).
TEST(Faults, D64_ThreadCountsMergeToTheSameResult) {
  for (const char* recipe : {"f16", "kivi:k=2,v=2,window=0"}) {
    Scene scene(recipe, 9000, 1);
    const auto expected = scene.expect({});
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 7, 16, 64}) {
      AttentionOptions options;
      options.threads = threads;
      scene.attend(options);
      EXPECT_LT(testing::relative_error(scene.out, expected.out), testing::kTolerance) << threads;
      expect_lse(scene, expected);
      scene.attend(options);
      if (first.empty()) first = scene.out;
      EXPECT_LT(testing::relative_error(scene.out, {first.begin(), first.end()}), 1e-4) << threads;
    }
  }
}

TEST(Mask, ImpossibleShapesAreNamedAndOutIsUntouched) {
  Scene scene("kivi", 40, 1);
  const auto workspace = make_workspace();
  const auto refuse = [&](std::int64_t cells, int heads, int dim, AttentionOptions options) {
    EXPECT_THROW(kvant::attend(scene.store, cells, dense_view(scene.queries.data(), DType::f32, 1, heads, dim),
                               dense_view(scene.out.data(), DType::f32, 1, heads, 64), options, *workspace),
                 Error);
  };
  refuse(41, 6, 64, {});
  refuse(-1, 6, 64, {});
  refuse(40, 5, 64, {});
  refuse(40, 6, 63, {});
  refuse(40, 0, 64, {});
  AttentionOptions bad;
  bad.softcap = -1;
  refuse(40, 6, 64, bad);
  for (const float value : scene.out) EXPECT_EQ(value, -1.0F);
}

}  // namespace
}  // namespace kvant
