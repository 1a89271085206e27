// The kernels over block pages on the CPU (emulation.hpp) against the CPU library on the same pages: every dimension
// and type, and no byte behind their shared memory is touched.
#include "emulation.hpp"

// The emulation first.
#include <gtest/gtest.h>

#include <random>

#include "base/half.hpp"
#include "cuda/block_decode.cuh"
#include "cuda/block_kernel.cuh"
#include "kvant/cache.hpp"

namespace kvant::cuda {

constexpr std::size_t kMostShared = 227 * 1024;
alignas(128) std::uint8_t shared[kMostShared];

namespace {

constexpr std::uint8_t kPoison = 0xA5;

std::vector<std::uint16_t> random_rows(std::mt19937& random, DType type, int count, int heads, int dim, float spread) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(count * heads * dim));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    base::store_float(out.data(), type, static_cast<std::int64_t>(i),
                      normal(random) * (1 + spread * static_cast<float>(channel * 37 % 11)));
  }
  return out;
}

struct Problem {
  Cache cache;
  BlockFormat format;
  std::vector<std::uint8_t> pages;
  std::vector<std::int32_t> table;
  std::vector<std::uint16_t> queries, out;
  std::int32_t length = 0, none = 0, count = 0;
  DecodeArgs args;

  static Recipe sealing(const char* text) {
    Recipe recipe = parse_recipe(text);
    recipe.window = 0;
    recipe.sink = 0;
    return recipe;
  }
  Problem(const char* recipe, const CacheShape& shape, int page_count, int rows, int group)
      : cache(sealing(recipe), shape), format(make_block_format(cache.recipe(), shape)), count(page_count) {
    std::mt19937 random(3);
    length = count * kPage;
    const auto keys = random_rows(random, shape.dtype, length, shape.kv_heads, shape.key_dim, 0.3F);
    const auto values = random_rows(random, shape.dtype, length, shape.kv_heads, shape.value_dim, 0);
    queries = random_rows(random, shape.dtype, rows, shape.kv_heads * group, shape.key_dim, 0);
    cache.append(dense_view(keys.data(), shape.dtype, length, shape.kv_heads, shape.key_dim),
                 dense_view(values.data(), shape.dtype, length, shape.kv_heads, shape.value_dim));
    for (int page = 0; page < count; ++page) {
      const auto block = cache.store().sealed_block(page);
      for (const std::byte byte : block) pages.push_back(std::to_integer<std::uint8_t>(byte));
      table.push_back(page);
    }
    out.resize(static_cast<std::size_t>(rows * shape.kv_heads * group * shape.value_dim));
    args.pages = pages.data();
    args.page_stride = format.page_bytes;
    args.table = table.data();
    args.exact_table = &none;
    args.lengths = &length;
    args.q = queries.data();
    args.q_head = shape.key_dim;
    args.q_row = args.q_head * shape.kv_heads * group;
    args.out = out.data();
    args.out_head = shape.value_dim;
    args.out_row = args.out_head * shape.kv_heads * group;
    args.scale = 1 / std::sqrt(static_cast<float>(shape.key_dim));
    args.rows = rows;
    args.group = group;
    args.kv_heads = shape.kv_heads;
  }

  template <class Kernel>
  void run(const Kernel& kernel, int threads, int vectors, int shared_bytes) {
    ASSERT_EQ(pages.size(), static_cast<std::size_t>(count) * static_cast<std::size_t>(format.page_bytes));
    ASSERT_LE(static_cast<std::size_t>(shared_bytes), kMostShared);
    std::memset(shared, kPoison, sizeof shared);
    const ReferenceArgs layout{&none, &count, &none};
    emulation::launch(threads, (args.rows * args.group + vectors - 1) / vectors, args.kv_heads,
                      [&] { kernel(args, layout, 1, format); });
    EXPECT_TRUE(std::all_of(shared + shared_bytes, shared + kMostShared, [](std::uint8_t x) { return x == kPoison; }));
  }

  double error() const {
    const CacheShape& shape = cache.shape();
    const int heads = shape.kv_heads * args.group;
    std::vector<float> want(out.size());
    AttentionOptions options;
    options.threads = 1;
    cache.attend(dense_view(queries.data(), shape.dtype, args.rows, heads, shape.key_dim),
                 dense_view(want.data(), DType::f32, args.rows, heads, shape.value_dim), options, nullptr);
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double got = base::load_float(out.data(), shape.dtype, static_cast<std::int64_t>(i));
      difference += (got - want[i]) * (got - want[i]);
      norm += static_cast<double>(want[i]) * want[i];
    }
    return std::sqrt(difference / norm);
  }
};

constexpr const char* kRecipes[] = {"kvquant:k=3,v=3",
                                    "kvquant:k=2,v=4,outliers=0.06,voutliers=0.05",
                                    "kvquant:k=4,v=2",
                                    "zipcache",
                                    "k=waterfill:2.28,high=6,v=kivi:2",
                                    "waterfill:k=3.5,low=1,high=6,v=8"};

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_few() {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    using C = BlockDecodeConfig<KeyDim, ValueDim, Bfloat>;
    Problem problem(recipe, {2, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16}, 5, 2, 2);
    problem.run(&block_decode_kernel<C>, C::threads, C::vectors, C::shared_bytes(block_half_bytes(problem.format)));
    EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
  }
}

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_many() {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    using C = BlockConfig<ValueDim, Bfloat>;
    Problem problem(recipe, {1, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16}, 2, 3, 9);
    problem.run(&block_kernel<C>, C::threads, C::vectors, BlockShared(problem.format, C::vectors).bytes);
    EXPECT_LE(problem.error(), Bfloat ? 5e-3 : 1e-3);
  }
}

TEST(BlockEmulation, FewVectors) {
  expect_few<64, 64, false>();
  expect_few<96, 96, true>();
  expect_few<128, 128, false>();
  expect_few<192, 128, false>();
  expect_few<192, 192, true>();
  expect_few<256, 256, false>();
}

TEST(BlockEmulation, ManyVectors) {
  expect_many<192, 64, false>();
  expect_many<128, 96, true>();
  expect_many<64, 128, false>();
  expect_many<96, 192, false>();
  expect_many<64, 256, true>();
}

}  // namespace
}  // namespace kvant::cuda
