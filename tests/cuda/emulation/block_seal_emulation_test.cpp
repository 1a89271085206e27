// The kernels that seal block pages, on the CPU (emulation.hpp): the bytes of the CPU library, for every recipe with
// block pages, dimension, type and kind of rows.
#include "emulation.hpp"

// The emulation first.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "base/half.hpp"
#include "cuda/block_seal.cuh"
#include "cuda/block_turn.hpp"
#include "kvant/cache.hpp"
#include "support/calibration.hpp"

namespace kvant::cuda {

constexpr std::size_t kMostShared = 227 * 1024;
alignas(128) std::uint8_t shared[kMostShared];

namespace {

constexpr std::uint8_t kPoison = 0xA5;

constexpr const char* kRecipes[] = {
    "kvquant:k=3,v=3",
    "kvquant:k=2,v=2",
    "kvquant:k=4,v=4,outliers=0.06,voutliers=0.1",
    "kvquant:k=3,v=2,outliers=0,voutliers=0",
    "k=kvquant:2,v=kivi:4",
    "k=kivi:3,v=kvquant:4",
    "k=kvquant:4,v=zipcache",
    "k=zipcache,v=kvquant:3",
    "zipcache",
    "zipcache:salient=0.5,saliency=norm",
    "zipcache:salient=0.13,high=8,low=4,vhigh=5,vlow=1",
    "zipcache:salient=0.9,high=3,low=1,vhigh=4,vlow=3",
    "k=zipcache,v=waterfill:3,salient=0.4",
    "k=zipcache,v=waterfill:5,shared=1",
    "k=kivi:2,v=zipcache",
    "k=waterfill:3,v=zipcache",
    "waterfill:rotate=0",
    "waterfill:k=3.5,low=1,high=6,v=8",
    "waterfill:k=2.4,grid=range,v=7,vgrid=range,shared=1,rotate=0",
    "waterfill:feedback=1",
    "k=waterfill:2.28,high=6,v=kivi:2",
    "k=kivi:4,v=waterfill:2",
    "k=kitty,v=waterfill:2,shared=1",
    "kitty:selector=variance",
    "kitty:selector=range,boost=0.1",
    "kitty:selector=query,boost=0.7",
    "kitty:boost=1,v=5",
    "kivi:k=8,v=8",
    "kivi:k=1,v=5",
    "kivi:k=7,v=6",
    "kivi:k=5,v=1",
};

// What rows are made of.
enum class Rows { normal, coarse, constant, zeros, huge, tiny, outlying };
constexpr Rows kAllRows[] = {Rows::normal, Rows::coarse, Rows::constant, Rows::zeros,
                             Rows::huge,   Rows::tiny,   Rows::outlying};

// huge: the largest magnitude.
std::vector<std::uint16_t> make_rows(std::mt19937& random, DType type, Rows rows, int tokens, int heads, int dim,
                                     float spread, float huge) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> out(static_cast<std::size_t>(tokens * heads * dim));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto channel = static_cast<int>(i % static_cast<std::size_t>(dim));
    float x = normal(random) * (1 + spread * static_cast<float>(channel * 37 % 11));
    if (rows == Rows::coarse) x = 0.25F * static_cast<float>(static_cast<int>(random() % 9) - 4);
    if (rows == Rows::constant) x = channel % 3 == 0 ? x : 0.5F * static_cast<float>(channel % 5);
    if (rows == Rows::zeros) x = random() % 2 == 0 ? 0.0F : -0.0F;
    if (rows == Rows::huge) x = random() % 2 == 0 ? huge : -huge;
    if (rows == Rows::huge && random() % 4 == 0) x *= 0.37F;
    if (rows == Rows::tiny) x *= type == DType::bf16 ? 1e-39F : 1e-7F;
    if (rows == Rows::outlying && random() % 20 == 0) x *= 30;
    base::store_float(out.data(), type, static_cast<std::int64_t>(i), x);
  }
  return out;
}

// Exact pages of the device, [page][head].
std::vector<std::uint8_t> exact_pages(const CacheShape& shape, int pages, const std::vector<std::uint16_t>& keys,
                                      const std::vector<std::uint16_t>& values) {
  const ExactFormat format{shape.key_dim, shape.value_dim};
  std::vector<std::uint8_t> out(static_cast<std::size_t>(pages * shape.kv_heads * format.page_bytes()));
  for (int token = 0; token < pages * kPage; ++token) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::uint8_t* page = out.data() + (token / kPage * shape.kv_heads + head) * format.page_bytes();
      const auto row = static_cast<std::size_t>(token * shape.kv_heads + head);
      for (int c = 0; c < shape.key_dim; ++c) {
        std::memcpy(page + format.key_at(token % kPage, c),
                    &keys[row * static_cast<std::size_t>(shape.key_dim) + static_cast<std::size_t>(c)], 2);
      }
      for (int c = 0; c < shape.value_dim; ++c) {
        std::memcpy(page + format.value_at(token % kPage, c),
                    &values[row * static_cast<std::size_t>(shape.value_dim) + static_cast<std::size_t>(c)], 2);
      }
    }
  }
  return out;
}

template <bool Bfloat>
void run_kernels(const BlockSealBatch& batch, int pages) {
  const BlockSealGrids grids(batch.args);
  const auto run = [&](const auto& kernel, int y, int z, int shared_bytes) {
    ASSERT_LE(static_cast<std::size_t>(shared_bytes), kMostShared);
    std::memset(shared, kPoison, kMostShared);
    emulation::launch(
        kBlockSealThreads, pages, y, [&] { kernel(batch); }, z);
    EXPECT_TRUE(std::all_of(shared + shared_bytes, shared + kMostShared, [](std::uint8_t x) { return x == kPoison; }));
  };
  run(block_seal_prepare<Bfloat>, grids.prepare_y, 1, kBlockPrepareBytes);
  run(block_seal_encode<Bfloat>, grids.encode_y, 1, grids.encode_bytes);
  run(block_seal_values<Bfloat>, grids.values_y, grids.values_z, grids.values_bytes);
}

std::string where(const BlockFormat& format, std::size_t byte) {
  const int head = static_cast<int>(byte) / format.head_bytes;
  const int at = static_cast<int>(byte) % format.head_bytes;
  return "byte " + std::to_string(byte) + ", head " + std::to_string(head) + " at " + std::to_string(at) +
         " (rest at " + std::to_string(format.rest.plane_offset) + ", values at " +
         std::to_string(format.value.plane_offset) + ")";
}

// rotation: of recipes with rope=before, whose sequence begins at page `first`.
void expect_cpu_bytes(const Recipe& recipe, const CacheShape& shape, Rows rows, float spread = 0.3F,
                      const KeyRotation* rotation = nullptr, int first = 0) {
  constexpr int pages = 2;
  std::mt19937 random(static_cast<unsigned>(rows) + 5U);
  Cache cache(recipe, shape);
  if (rotation != nullptr) cache.set_key_rotation(*rotation);
  std::vector<std::int64_t> positions(pages * kPage);
  std::iota(positions.begin(), positions.end(), std::int64_t{first} * kPage);
  const PageLayout& layout = cache.store().layout();
  const float huge = base::largest_stored(shape.dtype);
  // Sums of rotated values must stay within binary32.
  const float huge_value = shape.dtype == DType::bf16 ? huge / static_cast<float>(layout.value.rotation) : huge;
  const auto keys = make_rows(random, shape.dtype, rows, pages * kPage, shape.kv_heads, shape.key_dim, spread, huge);
  const auto values =
      make_rows(random, shape.dtype, rows, pages * kPage, shape.kv_heads, shape.value_dim, 0, huge_value);
  cache.append(dense_view(keys.data(), shape.dtype, pages * kPage, shape.kv_heads, shape.key_dim),
               dense_view(values.data(), shape.dtype, pages * kPage, shape.kv_heads, shape.value_dim), {}, positions);
  const auto exact = exact_pages(shape, pages, keys, values);
  BlockFormat format = make_block_format(recipe, shape);
  TurnTables turns;
  if (rotation != nullptr) {
    turns = make_turn_tables(*rotation, shape.key_dim);
    format.turns = turns.at(turns.turns.data(), turns.offsets.data(), turns.places.data());
  }
  const auto page_bytes = static_cast<std::size_t>(format.page_bytes);
  std::vector<std::uint8_t> sealed(pages * page_bytes, kPoison);
  const std::vector<std::uint16_t> ranges = calibrated_ranges(layout, shape.kv_heads, shape.dtype);
  BlockSealBatch batch;
  batch.args = make_block_seal(recipe, layout, format);
  ASSERT_TRUE(can_seal_blocks(batch.args, 227 << 10));
  batch.args.exact = exact.data();
  batch.args.exact_stride = static_cast<std::int64_t>(exact.size()) / pages;
  batch.args.pages = sealed.data();
  batch.args.page_stride = format.page_bytes;
  batch.args.key_ranges = ranges.empty() ? nullptr : ranges.data();
  std::vector<std::uint32_t> counts(block_list_counts(batch.args), 12345);
  batch.args.list_counts = counts.empty() ? nullptr : counts.data();
  for (int i = 0; i < pages; ++i) batch.jobs[i] = {i, i, i == 0 ? recipe.sink : 0, (first + i) * kPage};
  if (shape.dtype == DType::bf16) {
    run_kernels<true>(batch, pages);
  } else {
    run_kernels<false>(batch, pages);
  }
  for (int i = 0; i < pages; ++i) {
    const auto want = cache.store().sealed_block(i);
    ASSERT_EQ(want.size(), page_bytes);
    const auto* got = reinterpret_cast<const std::byte*>(sealed.data()) + static_cast<std::size_t>(i) * page_bytes;
    const auto different = std::mismatch(want.begin(), want.end(), got).first - want.begin();
    EXPECT_EQ(static_cast<std::size_t>(different), page_bytes)
        << "page " << i << ", " << where(format, static_cast<std::size_t>(different)) << ": "
        << std::to_integer<int>(got[different]) << " for "
        << std::to_integer<int>(want[static_cast<std::size_t>(different)]);
  }
}

Recipe sealing(const char* text, int sink) {
  Recipe recipe = parse_recipe(text);
  recipe.window = 0;
  recipe.sink = sink;
  return recipe;
}

TEST(BlockSealEmulation, EveryKindOfRows) {
  int number = 0;
  for (const char* recipe : kRecipes) {
    for (const Rows rows : kAllRows) {  // an odd number: types take turns
      const DType type = ++number % 2 == 0 ? DType::bf16 : DType::f16;
      SCOPED_TRACE(std::string(recipe) + ", rows " + std::to_string(static_cast<int>(rows)) +
                   (type == DType::bf16 ? ", bf16" : ""));
      expect_cpu_bytes(sealing(recipe, rows == Rows::coarse ? 21 : 4), {2, 64, 64, type}, rows);
    }
  }
}

TEST(BlockSealEmulation, EveryDimension) {
  for (const char* recipe : kRecipes) {
    DType type = DType::f16;
    for (const auto& [key, value] : {std::pair{128, 128}, {64, 96}, {96, 192}, {192, 256}, {256, 64}}) {
      SCOPED_TRACE(std::string(recipe) + " " + std::to_string(key) + "x" + std::to_string(value));
      expect_cpu_bytes(sealing(recipe, 0), {2, key, value, type}, Rows::outlying, type == DType::bf16 ? 0.0F : 3.0F);
      type = type == DType::f16 ? DType::bf16 : DType::f16;
    }
  }
}

// Grids and lists of more values than a warp keeps at hand, with few outliers and many, apart and alike.
TEST(BlockSealEmulation, SharedGridsOfManyHeads) {
  for (const char* recipe : {"kvquant:k=3,v=3", "kvquant:k=2,v=2,voutliers=0.1", "k=zipcache,v=kvquant:4", "zipcache",
                             "k=kivi:1,v=waterfill:2,shared=1"}) {
    for (const Rows rows : kAllRows) {
      SCOPED_TRACE(std::string(recipe) + ", rows " + std::to_string(static_cast<int>(rows)));
      expect_cpu_bytes(sealing(recipe, 4), {11, 64, 64, DType::f16}, rows);
    }
  }
}

// From no sinks to one coded token.
TEST(BlockSealEmulation, EveryNumberOfSinks) {
  for (const char* recipe : kRecipes) {
    for (const int sink : {0, 1, 63, 97, 126, 127}) {
      SCOPED_TRACE(std::string(recipe) + ", sink " + std::to_string(sink));
      expect_cpu_bytes(sealing(recipe, sink), {1, 64, 64, DType::f16}, Rows::normal);
    }
  }
}

// Ranges of key channels from a file: more or fewer values lie beyond them than there are slots.
TEST(BlockSealEmulation, CalibratedRangesAndLevels) {
  for (const DType type : {DType::f16, DType::bf16}) {
    const CacheShape shape{2, 64, 64, type};
    const testing::CalibrationFile file(testing::make_calibration(shape, 0.02));
    for (const char* bits : {"k=3,v=3", "k=2,v=4,qnorm=1,vqnorm=1"}) {
      const std::string text = "kvquant:" + std::string(bits) + ",outliers=0.02,voutliers=0.02" + file.options(2);
      for (const Rows rows : kAllRows) {
        for (const float spread : {0.0F, 3.0F}) {
          SCOPED_TRACE(text + ", rows " + std::to_string(static_cast<int>(rows)));
          expect_cpu_bytes(sealing(text.c_str(), 1), shape, rows, spread);
        }
      }
    }
  }
}

// Keys before RoPE: the CPU's bits of every angle, and so its bytes. Sinks are rows of small positions only.
TEST(BlockSealEmulation, KeysBeforeRope) {
  const auto make = [](RotaryPairs pairs, int rotated, double magnitude) {
    KeyRotation rotation = make_rotation({pairs, rotated, 500000});
    rotation.magnitude = magnitude;
    return rotation;
  };
  const std::pair<KeyRotation, int> cases[] = {{make(RotaryPairs::halves, 64, 1), 0},
                                               {make(RotaryPairs::adjacent, 64, 1.3), 7},
                                               {make(RotaryPairs::halves, 14, 0.7), 1 << 14},
                                               {make(RotaryPairs::adjacent, 10, 1), 1 << 22}};
  int number = 0;
  for (const char* recipe : {"kvquant:k=3,v=3,rope=before", "kvquant:k=2,v=2,outliers=0.06,rope=before",
                             "k=kvquant:4,v=zipcache,outliers=0,rope=before"}) {
    for (const auto& [rotation, first] : cases) {
      for (const Rows rows : kAllRows) {
        const DType type = ++number % 2 == 0 ? DType::bf16 : DType::f16;  // seven kinds of rows: types take turns
        SCOPED_TRACE(std::string(recipe) + ", page " + std::to_string(first) + ", rows " +
                     std::to_string(static_cast<int>(rows)));
        expect_cpu_bytes(sealing(recipe, first == 0 ? 5 : 0), {2, 64, 64, type}, rows, 0.3F, &rotation, first);
      }
    }
  }
}

TEST(BlockSealEmulation, CalibratedKeysBeforeRope) {
  const KeyRotation rotation = make_rotation({RotaryPairs::halves, 64});
  for (const DType type : {DType::f16, DType::bf16}) {
    const CacheShape shape{2, 64, 64, type};
    Calibration calibration = testing::make_calibration(shape, 0.02);
    calibration.before_rope = true;
    const testing::CalibrationFile file(calibration, "before");
    const std::string text = "kvquant:k=3,v=3,outliers=0.02,voutliers=0.02,qnorm=1,rope=before" + file.options(2);
    for (const Rows rows : kAllRows) expect_cpu_bytes(sealing(text.c_str(), 1), shape, rows, 0.3F, &rotation);
  }
}

}  // namespace
}  // namespace kvant::cuda
