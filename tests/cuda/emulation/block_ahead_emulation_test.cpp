// The kernel over block pages of sm_90a on the CPU (block_problem.hpp); its matrix instructions read and write as late
// as they may.
#include "block_problem.hpp"

// The emulation first.
#include "cuda/block_ahead.cuh"

namespace kvant::cuda {
namespace {

template <int KeyDim, int ValueDim, bool Bfloat, bool Turned = false>
void expect_same(const char* recipe, int kv_heads, const Call& call) {
  SCOPED_TRACE(std::string(recipe) + ", " + std::to_string(KeyDim) + "x" + std::to_string(ValueDim));
  using C = BlockAheadConfig<KeyDim, ValueDim, Bfloat, Turned>;
  Problem problem(recipe, {kv_heads, KeyDim, ValueDim, Bfloat ? DType::bf16 : DType::f16}, call);
  problem.run(&block_ahead_kernel<C>, C::threads, C::vectors, C::shared_bytes(problem.format()), C::ranks);
  EXPECT_LE(problem.error(), Bfloat ? (Turned ? 6e-3 : 5e-3) : 1e-3);  // turned keys are rounded once more
}

// Every way to read codes (BlockCodes), outliers, orders of tokens and channels, factors, rotation.
constexpr const char* kRecipes[] = {"kvquant:k=3,v=3,sink=0,window=0",
                                    "kvquant:k=2,v=4,outliers=0.06,voutliers=0.05,sink=0,window=0",
                                    "kvquant:k=4,v=2,sink=0,window=0",
                                    "zipcache:sink=0,window=0",
                                    "zipcache:salient=0.13,high=8,low=4,vhigh=5,vlow=1,sink=0,window=0",
                                    "zipcache:salient=0.9,high=3,low=1,vhigh=4,vlow=3,sink=0,window=0",
                                    "k=waterfill:2.28,high=6,v=kivi:2,sink=0,window=0",
                                    "k=kivi:4,v=kivi:4,sink=0,window=0",
                                    "waterfill:k=3.5,low=1,high=6,v=8,sink=0,window=0",
                                    "kitty:selector=variance,sink=0,window=0"};

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_recipes(int every) {
  int number = 0;
  for (const char* recipe : kRecipes) {
    if (number++ % every == 0) expect_same<KeyDim, ValueDim, Bfloat>(recipe, 1, {2 * kPage, 3, 9});
  }
}

TEST(BlockAheadEmulation, Recipes) {
  expect_recipes<64, 64, false>(1);
  expect_recipes<96, 96, true>(1);
  expect_recipes<128, 128, false>(2);
  expect_recipes<192, 128, true>(3);
}

// Heads share lists of outliers and grids; sinks, an open tail, rows in a window, parts with and without coded stages.
TEST(BlockAheadEmulation, HeadsExactTokensAndParts) {
  for (const char* recipe : {"kvquant:k=3,v=3,sink=5,window=20", "zipcache:sink=40,window=16",
                             "k=zipcache,v=waterfill:3,sink=0,window=30", "kivi:k=8,v=8,sink=127,window=0"}) {
    expect_same<64, 64, false>(recipe, 2, {430, 20, 3, nullptr, 0, 0, 0, 1});
    expect_same<64, 64, false>(recipe, 2, {430, 90, 3, nullptr, 0, 130, 2, 3});
    expect_same<64, 64, true>(recipe, 1, {300, 40, 4, nullptr, 0, 0, 0, 7});
  }
}

// Pages that leave room for one only, and half as many vectors.
TEST(BlockAheadEmulation, LargePages) {
  expect_same<256, 256, false>("kvquant:k=2,v=2,sink=5,window=20", 1, {420, 40, 4});
  expect_same<192, 192, true>("zipcache:sink=5,window=20", 1, {420, 40, 4});
  expect_same<192, 128, false>("kivi:k=5,v=5,sink=0,window=0", 1, {400, 10, 3, nullptr, 0, 0, 0, 2});
}

template <int KeyDim, int ValueDim, bool Bfloat>
void expect_turned(int first_page) {
  for (const char* recipe : {"kvquant:k=3,v=3,sink=0,window=20,rope=before",
                             "k=kvquant:4,v=zipcache,outliers=0.06,sink=0,window=0,rope=before"}) {
    for (const auto& [name, rotation] : rotations(KeyDim)) {
      SCOPED_TRACE(name);
      expect_same<KeyDim, ValueDim, Bfloat, true>(recipe, 1, {2 * kPage + 50, 8, 8, &rotation, first_page});
    }
  }
}

TEST(BlockAheadEmulation, KeysBeforeRope) {
  expect_turned<64, 64, false>(0);
  expect_turned<96, 96, true>(3);
  expect_turned<192, 128, false>(1 << 16);
}

// Blocks that unpack for each other: some with few vectors or none, rows of different windows, pages of one block only,
// parts that begin and end in the middle of pages.
TEST(BlockAheadEmulation, Clusters) {
  for (const char* recipe : {"kvquant:k=3,v=3,sink=5,window=20", "zipcache:sink=0,window=0",
                             "k=waterfill:2.28,high=6,v=kivi:2,sink=0,window=30"}) {
    expect_same<64, 64, false>(recipe, 2, {430, 90, 4});
    expect_same<64, 64, false>(recipe, 1, {700, 140, 4, nullptr, 0, 200, 0, 3});
    expect_same<96, 64, true>(recipe, 1, {200, 130, 2});
    expect_same<64, 64, false>(recipe, 1, {900, 70, 4, nullptr, 0, 0, 0, 5});
  }
  // Three buffers, and three blocks of vectors of a cluster's four.
  expect_same<128, 128, false>("kivi:k=8,v=8,sink=0,window=0", 1, {768, 130, 4});
  for (const auto& [name, rotation] : rotations(96)) {
    SCOPED_TRACE(name);
    expect_same<96, 96, false, true>("kvquant:k=3,v=3,sink=0,window=20,rope=before", 1,
                                     {3 * kPage + 50, 70, 4, &rotation, 3});
  }
}

}  // namespace
}  // namespace kvant::cuda
