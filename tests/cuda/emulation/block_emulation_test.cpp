// The kernels over block pages on the CPU (emulation.hpp) against the CPU library on the same pages: every dimension
// and type, and no byte behind their shared memory is touched.
#include "emulation.hpp"

// The emulation first.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "base/half.hpp"
#include "cuda/block_decode.cuh"
#include "cuda/block_kernel.cuh"
#include "cuda/block_team.cuh"
#include "cuda/block_turn.hpp"
#include "kvant/cache.hpp"
#include "support/rope.hpp"

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
  std::int32_t length = 0, none = 0, first = 0, coded = 0;
  TurnTables turns;
  DecodeArgs args;

  static Recipe sealing(const char* text) {
    Recipe recipe = parse_recipe(text);
    recipe.window = 0;
    recipe.sink = 0;
    return recipe;
  }
  // rotation: of recipes with rope=before. first_page: the sequence begins there, as if a window hid what was before.
  Problem(const char* recipe, const CacheShape& shape, int count, int rows, int group,
          const KeyRotation* rotation = nullptr, int first_page = 0)
      : cache(sealing(recipe), shape),
        format(make_block_format(cache.recipe(), shape)),
        first(first_page),
        coded(first_page + count) {
    std::mt19937 random(3);
    if (rotation != nullptr) {
      cache.set_key_rotation(*rotation);
      turns = make_turn_tables(*rotation, shape.key_dim);
      format.turns = turns.at(turns.turns.data(), turns.offsets.data());
    }
    length = count * kPage;
    std::vector<std::int64_t> positions(static_cast<std::size_t>(length));
    std::iota(positions.begin(), positions.end(), std::int64_t{first} * kPage);
    const auto keys = random_rows(random, shape.dtype, length, shape.kv_heads, shape.key_dim, 0.3F);
    const auto values = random_rows(random, shape.dtype, length, shape.kv_heads, shape.value_dim, 0);
    queries = random_rows(random, shape.dtype, rows, shape.kv_heads * group, shape.key_dim, 0);
    cache.append(dense_view(keys.data(), shape.dtype, length, shape.kv_heads, shape.key_dim),
                 dense_view(values.data(), shape.dtype, length, shape.kv_heads, shape.value_dim), {}, positions);
    length += first * kPage;
    table.resize(static_cast<std::size_t>(first));
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

  template <class Layout>
  void run(void (*kernel)(DecodeArgs, Layout, int, BlockFormat), int threads, int vectors, int shared_bytes,
           int parts = 1) {
    ASSERT_EQ(pages.size(), static_cast<std::size_t>(coded - first) * static_cast<std::size_t>(format.page_bytes));
    ASSERT_LE(static_cast<std::size_t>(shared_bytes), kMostShared);
    std::memset(shared, kPoison, sizeof shared);
    Layout layout{};
    if constexpr (std::is_same_v<Layout, ReferenceArgs>) {
      layout = {&first, &coded, &none};
    } else if (parts % 2 == 0) {
      layout.memory = {&first, &coded, &none};
    } else {
      layout.first_page[0] = first;
      layout.coded_pages[0] = coded;
    }
    const int blocks = (args.rows * args.group + vectors - 1) / vectors;
    const auto items = static_cast<std::size_t>(blocks * args.kv_heads);
    std::vector<std::uint32_t> counters(items);
    std::vector<float> partials(items * static_cast<std::size_t>(parts * vectors * (cache.shape().value_dim + 2)));
    args.counters = counters.data();
    args.partials = partials.data();
    emulation::launch(
        threads, blocks, args.kv_heads, [&] { kernel(args, layout, parts, format); }, parts);
    EXPECT_EQ(counters, std::vector<std::uint32_t>(items));
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
    problem.run(&block_decode_kernel<C>, C::threads, C::vectors, C::shared_bytes(problem.format, C::threads));
    EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
  }
}

// 5 pages: teams with none, one, and several after another.
template <int KeyDim, int ValueDim, bool Bfloat>
void expect_teams() {
  using C = BlockDecodeConfig<KeyDim, ValueDim, Bfloat, 4>;
  for (const char* recipe : kRecipes) {
    for (const auto& [teams, parts] : {std::pair{1, 1}, {2, 1}, {4, 1}, {1, 3}, {2, 2}}) {
      if (teams > C::teams) continue;
      SCOPED_TRACE(std::string(recipe) + ", " + std::to_string(teams) + " teams, " + std::to_string(parts) + " parts");
      Problem problem(recipe, {2, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16}, 5, 2, 3);
      const int threads = teams * C::team_threads;
      if (C::shared_bytes(problem.format, threads) > static_cast<int>(kMostShared)) continue;
      problem.run(&block_team_kernel<C>, threads, C::vectors, C::shared_bytes(problem.format, threads), parts);
      EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
    }
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

TEST(BlockEmulation, Teams) {
  expect_teams<64, 64, false>();
  expect_teams<96, 96, true>();
  expect_teams<128, 128, false>();
  expect_teams<192, 128, false>();
  expect_teams<192, 192, true>();
  expect_teams<256, 256, false>();
}

TEST(BlockEmulation, ManyVectors) {
  expect_many<192, 64, false>();
  expect_many<128, 96, true>();
  expect_many<64, 128, false>();
  expect_many<96, 192, false>();
  expect_many<64, 256, true>();
}

// Keys before RoPE

struct NamedRotation {
  const char* name;
  KeyRotation rotation;
};

// Both kinds, whole and partial, any number of pairs, magnitudes; a fast pair turns by radians.
std::vector<NamedRotation> rotations(int key_dim) {
  const auto make = [](RotaryPairs pairs, int rotated, double magnitude) {
    KeyRotation rotation = make_rotation({pairs, rotated, 500000});
    rotation.magnitude = magnitude;
    return rotation;
  };
  return {{"halves", make(RotaryPairs::halves, key_dim, 1)},
          {"adjacent", make(RotaryPairs::adjacent, key_dim, 1.3)},
          {"40 of halves", make(RotaryPairs::halves, 40, 0.7)},
          {"14 of halves", make(RotaryPairs::halves, 14, 1)},
          {"10 of neighbours", make(RotaryPairs::adjacent, 10, 1)}};
}

constexpr const char* kBeforeRope[] = {"kvquant:k=3,v=3,rope=before", "kvquant:k=2,v=4,outliers=0.06,rope=before",
                                       "k=kvquant:4,v=zipcache,outliers=0,rope=before"};

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_turned(int first_page) {
  using C = BlockConfig<ValueDim, Bfloat, true>;
  int number = 0;
  for (const char* recipe : kBeforeRope) {
    for (const auto& [name, rotation] : rotations(KeyDim)) {
      if (++number % 2 == 0) continue;  // five rotations: recipes take turns
      SCOPED_TRACE(std::string(recipe) + ", " + name);
      Problem problem(recipe, {1, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16}, 2, 8, 8, &rotation, first_page);
      problem.run(&block_kernel<C>, C::threads, C::vectors, BlockShared(problem.format, C::vectors).bytes);
      EXPECT_LE(problem.error(), Bfloat ? 6e-3 : 1e-3);  // keys are rounded once more
    }
  }
}

TEST(BlockEmulation, KeysBeforeRope) {
  expect_turned<192, 64, false>(0);
  expect_turned<128, 96, true>(3);
  expect_turned<64, 128, false>(1);
  expect_turned<96, 192, false>(0);
  expect_turned<256, 256, true>(2);
}

// Where binary32 has no fraction of an angle left: pages from 2^23 and 2^29 tokens on.
TEST(BlockEmulation, KeysBeforeRopeFarOut) {
  expect_turned<64, 64, false>(1 << 16);
  expect_turned<64, 64, false>(1 << 22);
}

}  // namespace
}  // namespace kvant::cuda
