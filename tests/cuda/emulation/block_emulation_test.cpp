// The kernels over block pages that run on every architecture, on the CPU (block_problem.hpp): every dimension and
// type.
#include "block_problem.hpp"

// The emulation first.
#include "cuda/block_decode.cuh"
#include "cuda/block_kernel.cuh"
#include "cuda/block_team.cuh"

namespace kvant::cuda {
namespace {

// Pages only.
std::string sealed(const char* recipe) {
  return std::string(recipe) + (std::strchr(recipe, '=') == nullptr ? ":" : ",") + "sink=0,window=0";
}

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
    Problem problem(sealed(recipe).c_str(), {2, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16},
                    {5 * kPage, 2, 2});
    problem.run(&block_decode_kernel<C>, C::threads, C::vectors, C::shared_bytes(problem.format(), C::threads));
    EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
  }
}

// 5 pages: teams with none, one, and several after another. Recipes take turns.
template <int KeyDim, int ValueDim, bool Bfloat>
void expect_teams() {
  using C = BlockDecodeConfig<KeyDim, ValueDim, Bfloat, 4>;
  int number = KeyDim / 64;
  for (const char* recipe : kRecipes) {
    for (const auto& [teams, parts] : {std::pair{1, 1}, {2, 1}, {4, 1}, {1, 3}, {2, 2}}) {
      if (teams > C::teams || ++number % 2 == 0) continue;
      SCOPED_TRACE(std::string(recipe) + ", " + std::to_string(teams) + " teams, " + std::to_string(parts) + " parts");
      Problem problem(sealed(recipe).c_str(), {2, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16},
                      {5 * kPage, 2, 3});
      const int threads = teams * C::team_threads;
      if (C::shared_bytes(problem.format(), threads) > static_cast<int>(kMostShared)) continue;
      problem.run_teams(&block_team_kernel<C>, threads, C::vectors, C::shared_bytes(problem.format(), threads), parts);
      EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
    }
  }
}

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_many() {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    using C = BlockConfig<ValueDim, Bfloat>;
    Problem problem(sealed(recipe).c_str(), {1, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16},
                    {2 * kPage, 3, 9});
    problem.run(&block_kernel<C>, C::threads, C::vectors, BlockShared(problem.format(), C::vectors).bytes);
    EXPECT_LE(problem.error(), Bfloat ? 5e-3 : 1e-3);
  }
}

// Every pair of dimensions that kernels for few vectors have.
template <class Expect>
void over_few_shapes(const Expect& expect) {
  expect.template operator()<64, 64, false>();
  expect.template operator()<96, 96, true>();
  expect.template operator()<128, 128, false>();
  expect.template operator()<192, 128, false>();
  expect.template operator()<192, 192, true>();
  expect.template operator()<256, 256, false>();
}

TEST(BlockEmulation, FewVectors) {
  over_few_shapes([]<int KeyDim, int ValueDim, bool Bfloat>() { expect_few<KeyDim, ValueDim, Bfloat>(); });
}

TEST(BlockEmulation, Teams) {
  over_few_shapes([]<int KeyDim, int ValueDim, bool Bfloat>() { expect_teams<KeyDim, ValueDim, Bfloat>(); });
}

TEST(BlockEmulation, ManyVectors) {
  expect_many<192, 64, false>();
  expect_many<128, 96, true>();
  expect_many<64, 128, false>();
  expect_many<96, 192, false>();
  expect_many<64, 256, true>();
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
      Problem problem(sealed(recipe).c_str(), {1, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16},
                      {2 * kPage, 8, 8, &rotation, first_page});
      problem.run(&block_kernel<C>, C::threads, C::vectors, BlockShared(problem.format(), C::vectors).bytes);
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

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_few_turned(int first_page, int rows, int group) {
  using C = BlockDecodeConfig<KeyDim, ValueDim, Bfloat, 1, true>;
  for (const char* recipe : {"kvquant:k=3,v=3,rope=before", "kvquant:k=2,v=4,outliers=0.06,rope=before",
                             "k=kvquant:4,v=kivi:2,outliers=0,rope=before"}) {
    for (const auto& [name, rotation] : few_rotations(KeyDim)) {
      SCOPED_TRACE(std::string(recipe) + ", " + name);
      Problem problem(sealed(recipe).c_str(), {2, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16},
                      {5 * kPage, rows, group, &rotation, first_page});
      ASSERT_NE(problem.format().turns.places, nullptr);
      problem.run(&block_decode_kernel<C>, C::threads, C::vectors, C::shared_bytes(problem.format(), C::threads));
      EXPECT_LE(problem.error(), Bfloat ? 3e-3 : 1e-3);
    }
  }
}

TEST(BlockEmulation, FewVectorsOverKeysBeforeRope) {
  over_few_shapes(
      []<int KeyDim, int ValueDim, bool Bfloat>() { expect_few_turned<KeyDim, ValueDim, Bfloat>(KeyDim % 5, 2, 2); });
  expect_few_turned<64, 64, false>(1 << 22, 1, 3);
}

// Where binary32 has no fraction of an angle left: pages from 2^23 and 2^29 tokens on.
TEST(BlockEmulation, KeysBeforeRopeFarOut) {
  expect_turned<64, 64, false>(1 << 16);
  expect_turned<64, 64, false>(1 << 22);
}

}  // namespace
}  // namespace kvant::cuda
