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
  problem.run(&block_ahead_kernel<C>, C::threads, C::vectors, C::shared_bytes(problem.format()));
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

// The tiles of both halves of a page, made part by part.
template <class C>
std::vector<std::uint8_t> unpack_in_parts(const Problem& problem, int parts) {
  constexpr int kBarrier = 1;
  std::vector<std::uint8_t> tiles;
  std::memset(shared, kPoison, sizeof shared);
  emulation::launch(C::threads, 1, 1, [&] {
    if (threadIdx.x < static_cast<unsigned>(C::first_unpack_thread)) return;
    const BlockFormat& format = problem.format();
    auto* const runs = reinterpret_cast<float2*>(shared + C::angles_offset);
    std::uint8_t* const keys = shared + C::keys_offset;
    std::uint8_t* const values = keys + C::key_tile_bytes;
    CorePage<C> page(format, C::work(), shared, 0);
    page.fetch(problem.page(0), shared + C::raw_offset);
    ptx::async_wait<0>();
    ptx::meet<kBarrier, C::unpack_threads>();
    page.prepare(shared + C::raw_offset);
    page.fetch_list();
    ptx::async_wait<0>();
    if constexpr (C::turned) place_angles<C>(format.turns, 0, runs);
    for (int half = 0; half < 2; ++half) {
      for (int part = 0; part < parts; ++part) {
        const int begin = kStageTokens / parts * part;
        ptx::meet<kBarrier, C::unpack_threads>();
        page.unpack(half, keys, values, values + C::value_tile_bytes, part, parts);
        ptx::meet<kBarrier, C::unpack_threads>();
        page.add_outliers(keys, values, half * kStageTokens + begin, kStageTokens / parts);
        ptx::meet<kBarrier, C::unpack_threads>();
        if constexpr (C::turned) {
          const std::uint8_t* tokens = page.tokens() == nullptr ? nullptr : page.tokens() + half * kStageTokens;
          const StageAngles angles{format.turns, runs, tokens, half * kStageTokens};
          CoreTurner<C>(angles, format, keys, part, parts).run();
        }
      }
      ptx::meet<kBarrier, C::unpack_threads>();
      if (C::unpack_thread() == 0) tiles.insert(tiles.end(), keys, keys + C::tile_bytes);
      ptx::meet<kBarrier, C::unpack_threads>();
    }
  });
  return tiles;
}

template <class C>
void expect_same_tiles(const char* recipe, const KeyRotation* rotation) {
  SCOPED_TRACE(recipe);
  const Problem problem(recipe, {2, C::key.dim, C::value.dim, C::bfloat ? DType::bf16 : DType::f16},
                        {kPage, 1, 1, rotation});
  const std::vector<std::uint8_t> whole = unpack_in_parts<C>(problem, 1);
  EXPECT_EQ(unpack_in_parts<C>(problem, 2), whole);
  EXPECT_EQ(unpack_in_parts<C>(problem, 4), whole);
}

TEST(BlockAheadEmulation, PartsOfAStage) {
  for (const char* recipe : kRecipes) {
    expect_same_tiles<BlockAheadConfig<128, 128, false>>(recipe, nullptr);
    expect_same_tiles<BlockAheadConfig<64, 96, true>>(recipe, nullptr);
  }
  for (const auto& [name, rotation] : rotations(96)) {
    SCOPED_TRACE(name);
    for (const char* recipe : {"kvquant:k=3,v=3,sink=0,window=0,rope=before",
                               "k=kvquant:4,v=zipcache,outliers=0.06,sink=0,window=0,rope=before"}) {
      expect_same_tiles<BlockAheadConfig<96, 64, false, true>>(recipe, &rotation);
    }
  }
}

}  // namespace
}  // namespace kvant::cuda
