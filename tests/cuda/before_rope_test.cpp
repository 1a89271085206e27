// Recipes with rope=before on the GPU: pages hold keys as they were before RoPE, everything else sees them rotated.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>

#include "cuda/attend.hpp"
#include "cuda/block.hpp"
#include "cuda/support.hpp"
#include "support/calibration.hpp"

namespace kvant::cuda::test {
namespace {

constexpr const char* kRecipe = "kvquant:k=3,v=3,rope=before";

KeyRotation make_rotation_of(RotaryPairs pairs, int rotated, double magnitude) {
  KeyRotation rotation = make_rotation({pairs, rotated, 500000});
  rotation.magnitude = magnitude;
  return rotation;
}

// Both kinds, whole and partial, a number of pairs that is no multiple of four, magnitudes.
std::vector<KeyRotation> rotations(int key_dim) {
  return {make_rotation_of(RotaryPairs::halves, key_dim, 1), make_rotation_of(RotaryPairs::adjacent, key_dim, 1.3),
          make_rotation_of(RotaryPairs::halves, 40, 0.7), make_rotation_of(RotaryPairs::halves, 14, 1),
          make_rotation_of(RotaryPairs::adjacent, 10, 1)};
}

TEST(GpuBeforeRope, EveryKernelOfTheBuild) {
  KVANT_NEEDS_GPU();
  for (const BlockKernel& kernel : block_kernels()) {
    if (!kernel.before_rope || (kernel.wgmma && !runs_wgmma(kernel.function))) continue;
    bool served = false;
    for (const int key_dim : {64, 96, 128, 192, 256}) {
      if (kernel.key_dim != 0 && key_dim != kernel.key_dim) continue;
      for (const KeyRotation& rotation : rotations(key_dim)) {
        Shape shape;
        shape.recipe = kRecipe;
        shape.cache = {2, key_dim, kernel.value_dim, kernel.bfloat ? DType::bf16 : DType::f16};
        shape.rotation = rotation;
        shape.rows = kernel.few ? 2 : 30;
        shape.lengths = {900, 130, 257};
        const Twins twins(shape);
        const AttendPlan plan(twins.batch, twins.query_heads(), shape.rows, shape.options);
        ASSERT_TRUE(plan.impl().block) << text_of(shape);
        if (kernel.few) {
          const bool fits = rotation.pairs == RotaryPairs::adjacent || rotation.frequencies.size() % 16 == 0;
          EXPECT_EQ(plan.impl().block->function == kernel.function, fits) << text_of(shape);
          served = true;
          expect_blocks(shape);
          continue;
        }
        if (plan.impl().block->function != kernel.function) {  // that of sm_90a takes all that it has room for
          EXPECT_NE(plan.impl().block->wgmma, kernel.wgmma) << text_of(shape);
          continue;
        }
        served = true;
        expect_blocks(shape);
      }
    }
    EXPECT_EQ(served, kernel.few || kernel.key_dim < 256) << kernel.key_dim << "x" << kernel.value_dim;
  }
}

TEST(GpuBeforeRope, WindowsSinksAndGroups) {
  KVANT_NEEDS_GPU();
  for (const char* options : {",sink=0", ",sink=40", ",sink=128", ",sink=5,window=0"}) {
    for (const auto& [rows, group, window] :
         {std::tuple{1, 1, 0}, {2, 3, 150}, {1, 16, 0}, {3, 8, 100}, {70, 4, 300}, {8, 5, 5000}}) {
      const std::string recipe = std::string(kRecipe) + options;
      Shape shape;
      shape.recipe = recipe.c_str();
      shape.rows = rows;
      shape.group = group;
      shape.options.sliding_window = window;
      shape.lengths = {1000, 129, 0, 64, 255, 256};
      expect_blocks(shape);
    }
  }
}

TEST(GpuBeforeRope, PathsWithoutKernelAreRefused) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = kRecipe;
  shape.rotation = make_rotation_of(RotaryPairs::halves, 14, 1);
  const Twins twins(shape);
  expect_refused([&] { AttendPlan(twins.batch, twins.query_heads(), 1, {}, 128, AttendPath::integer); }, "integer",
                 "kernel");
}

TEST(GpuBeforeRopeSeal, TheCpusBytes) {
  KVANT_NEEDS_GPU();
  for (const auto& [key, value] : {std::pair{64, 96}, {96, 192}, {128, 128}, {192, 256}, {256, 64}}) {
    for (const KeyRotation& rotation : rotations(key)) {
      for (const DType type : {DType::f16, DType::bf16}) {
        for (const char* recipe : {kRecipe, "kvquant:k=4,v=2,outliers=0.06,sink=100,rope=before"}) {
          expect_same_seals(recipe, {2, key, value, type}, 0.3F, rotation);
        }
      }
    }
  }
}

TEST(GpuBeforeRopeSeal, CalibratedRangesAndLevels) {
  KVANT_NEEDS_GPU();
  Shape shape;
  Calibration calibration = testing::make_calibration(shape.cache, 0.02);
  calibration.before_rope = true;
  const testing::CalibrationFile file(calibration, "before-gpu");
  const std::string recipe = "kvquant:k=3,v=3,outliers=0.02,voutliers=0.02,qnorm=1,rope=before" + file.options(2);
  expect_same_seals(recipe.c_str(), shape.cache);
  shape.recipe = recipe.c_str();
  shape.lengths = {1000, 300};
  expect_blocks(shape);
}

// Small enough for compute-sanitizer.
TEST(GpuBeforeRopeSeal, SanitizerSized) {
  KVANT_NEEDS_GPU();
  for (const KeyRotation& rotation : rotations(64)) expect_same_seals(kRecipe, {2, 64, 64, DType::f16}, 0.3F, rotation);
  for (const KeyRotation& rotation : rotations(64)) {
    Shape shape;
    shape.recipe = kRecipe;
    shape.cache = {1, 64, 64, DType::f16};
    shape.rotation = rotation;
    shape.lengths = {300};
    expect_blocks(shape);
  }
}

TEST(GpuBeforeRopeSeal, DecodeLoopFollowsTheCpu) {
  KVANT_NEEDS_GPU();
  decode_beside_the_cpu("kvquant:k=3,v=3,window=16,rope=before");
}

// Forks share pages and go on apart.
TEST(GpuBeforeRope, Forks) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = kRecipe;
  shape.lengths = {700};
  Twins twins(shape, 5, 12);
  const int free_pages = twins.pool.free_pages();
  twins.sequences.push_back(twins.sequences[0].fork(nullptr));
  twins.caches.push_back(twins.caches[0].fork());
  EXPECT_EQ(twins.pool.free_pages(), free_pages);
  twins.queries.insert(twins.queries.end(), twins.queries.begin(), twins.queries.end());
  twins.bind();
  std::mt19937 random(6);
  append_to_both(twins.batch, twins.caches, random, 300, 0.2F);
  EXPECT_EQ(twins.batch.seal_ready(nullptr), 4);
  for (std::size_t b = 0; b < 2; ++b) expect_same_blocks(twins.sequences[b], twins.caches[b]);
  EXPECT_LE(relative_error(twins.on_gpu(AttendPath::automatic).out, twins.on_cpu().out), 1e-3);
}

// Positions where binary32 has no fraction of an angle left. The CPU has the last pages alone, at their positions.
TEST(GpuBeforeRope, FarOut) {
  KVANT_NEEDS_GPU();
  const CacheShape cache_shape{1, 64, 64, DType::f16};
  constexpr int kChunk = 1 << 14;
  constexpr std::int64_t kFar = (std::int64_t{1} << 20) + kChunk;
  Shape shape;
  shape.recipe = "kvquant:k=3,v=3,sink=0,window=16,rope=before";
  const Recipe recipe = parse_recipe(shape.recipe);
  for (const RotaryPairs pairs : {RotaryPairs::halves, RotaryPairs::adjacent}) {
    const KeyRotation rotation = make_rotation_of(pairs, 64, 1);
    PagePool pool(recipe, cache_shape, static_cast<int>(kFar / kPage) + 8, kChunk / kPage + 8);
    Cache cache(recipe, cache_shape);
    turn_alike(pool, std::span(&cache, 1), rotation);
    Sequence sequence(pool);
    Batch batch(pool, 1, kFar + 1024);
    Sequence* const pointer = &sequence;
    batch.bind(std::span(&pointer, 1), nullptr);
    std::mt19937 random(9);
    const auto append = [&](int rows, bool both) {
      const auto keys = random_rows(random, DType::f16, rows, 1, 64, 0.3F);
      const auto values = random_rows(random, DType::f16, rows, 1, 64, 0);
      Guarded device_keys(keys.size() * 2), device_values(values.size() * 2);
      device_keys.write(keys.data());
      device_values.write(values.data());
      for (int i = both ? 1 : static_cast<int>(kFar / kChunk); i > 0; --i) {
        batch.append(device_keys.data(), device_values.data(), rows, nullptr);
        batch.seal_ready(nullptr);
      }
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      if (!both) return;
      std::vector<std::int64_t> positions(static_cast<std::size_t>(rows));
      std::iota(positions.begin(), positions.end(), kFar);
      cache.append(dense_view(keys.data(), DType::f16, rows, 1, 64), dense_view(values.data(), DType::f16, rows, 1, 64),
                   {}, positions);
    };
    append(kChunk, false);
    append(700, true);
    for (std::int64_t page = 0; page < 5; ++page) {
      const auto want = cache.store().sealed_block(page);
      ASSERT_FALSE(want.empty());
      const std::vector<std::byte> got = sequence.download_block(kFar / kPage + page);
      EXPECT_TRUE(std::equal(want.begin(), want.end(), got.begin(), got.end())) << "page " << page;
    }
    AttendOptions options;
    options.sliding_window = 600;
    const auto queries = random_rows(random, DType::f16, 1, 4, 64, 0);
    std::vector<float> want(4 * 64);
    AttentionOptions cpu_options;
    cpu_options.sliding_window = options.sliding_window;
    cache.attend(dense_view(queries.data(), DType::f16, 1, 4, 64), dense_view(want.data(), DType::f32, 1, 4, 64),
                 cpu_options);
    Guarded q(queries.size() * 2), out(want.size() * 2);
    q.write(queries.data());
    for (const AttendPath path : {AttendPath::automatic, AttendPath::reference}) {
      const AttendPlan plan(batch, 4, 1, options, 128, path);
      plan.run(q.data(), out.data(), nullptr, nullptr);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<std::uint8_t> bytes = out.read();
      std::vector<std::uint16_t> raw(want.size());
      std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<std::uint8_t*>(raw.data()));
      EXPECT_LE(relative_error(widen(raw, DType::f16), want), 1e-3) << plan.describe();
    }
  }
}

TEST(GpuBeforeRope, UploadsThatDoNotFitAreRefused) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{1, 64, 64, DType::f16};
  const Recipe recipe = parse_recipe(kRecipe);
  const auto filled = [&](const KeyRotation& rotation, std::int64_t first) {
    Cache cache(recipe, shape);
    cache.set_key_rotation(rotation);
    std::mt19937 random(1);
    const auto rows = random_rows(random, DType::f16, 300, 1, 64, 0);
    std::vector<std::int64_t> positions(300);
    std::iota(positions.begin(), positions.end(), first);
    const ConstView view = dense_view(rows.data(), DType::f16, 300, 1, 64);
    cache.append(view, view, {}, positions);
    return cache;
  };
  const KeyRotation usual = usual_rotation(shape);
  PagePool pool(recipe, shape, 8, 8);
  EXPECT_TRUE(pool.needs_rotation());
  EXPECT_FALSE(PagePool(parse_recipe("kvquant"), shape, 1, 1).needs_rotation());
  const auto refused = [&](const Cache& cache, const char* word) {
    expect_refused([&] { Sequence::upload(pool, cache); }, word, word);
    EXPECT_EQ(pool.free_pages(), 8);
    EXPECT_EQ(pool.free_exact_pages(), 8);
  };
  refused(filled(usual, 0), "set_key_rotation");
  EXPECT_EQ(Sequence::upload(pool, Cache(recipe, shape)).length(), 0);
  expect_refused(
      [&] {
        pool.set_key_rotation(make_rotation({RotaryPairs::halves, 66}));
      },
      "too many pairs", "33 pairs");
  refused(filled(usual, 0), "set_key_rotation");
  pool.set_key_rotation(make_rotation({RotaryPairs::adjacent, 64}));
  refused(filled(usual, 0), "rotation");
  pool.set_key_rotation(usual);  // nothing is stored yet
  refused(filled(usual, 1), "token 0 of the cache has position 1");
  Sequence sequence = Sequence::upload(pool, filled(usual, 0));
  pool.set_key_rotation(usual);
  expect_refused([&] { pool.set_key_rotation(make_rotation({RotaryPairs::adjacent, 64})); }, "in use", "rotation");
  EXPECT_EQ(sequence.length(), 300);
}

TEST(GpuBeforeRope, AppendNeedsTheRotation) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{1, 64, 64, DType::f16};
  PagePool pool(parse_recipe(kRecipe), shape, 2, 2);
  Sequence sequence(pool);
  Batch batch(pool, 1, 256);
  Sequence* const pointer = &sequence;
  batch.bind(std::span(&pointer, 1), nullptr);
  Guarded row(64 * 2);
  expect_refused([&] { batch.append(row.data(), row.data(), 1, nullptr); }, "append", "set_key_rotation");
  EXPECT_EQ(sequence.length(), 0);
  EXPECT_EQ(pool.free_exact_pages(), 2);
}

}  // namespace
}  // namespace kvant::cuda::test
