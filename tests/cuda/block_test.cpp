// Block pages: recipes whose sealed pages are the CPU's bytes on the device, against the CPU library on the same pages.
#include "cuda/block.hpp"

#include <algorithm>

#include "cache/page.hpp"
#include "cache/store.hpp"
#include "cuda/attend.hpp"
#include "cuda/block_reader.hpp"
#include "cuda/block_turn.hpp"
#include "cuda/support.hpp"
#include "support/calibration.hpp"

namespace kvant::cuda::test {
namespace {

// Tables, outliers, orders of tokens and channels, factors, rotation and every width, together and beside other
// methods.
constexpr const char* kRecipes[] = {
    "kvquant:k=3,v=3",
    "kvquant:k=2,v=2,sink=0",
    "kvquant:k=4,v=4,outliers=0.06,voutliers=0.05",
    "kvquant:k=3,v=2,outliers=0,voutliers=0",
    "k=kvquant:2,v=kivi:4",
    "k=kivi:3,v=kvquant:4",
    "zipcache",
    "zipcache:salient=0.5,saliency=norm",
    "zipcache:salient=0.13,high=8,low=4,vhigh=5,vlow=1,sink=4",
    "zipcache:salient=0.9,high=3,low=1,vhigh=4,vlow=3",
    "k=zipcache,v=waterfill:3,salient=0.4",
    "k=kivi:2,v=zipcache",
    "waterfill:rotate=0",
    "waterfill:k=3.5,low=1,high=6,v=8",
    "k=waterfill:2.28,high=6,v=kivi:2",
    "k=kivi:4,v=waterfill:2",
    "k=kitty,v=waterfill:2,shared=1",
    "kitty:selector=variance",
    "kivi:k=8,v=8",
    "kivi:k=1,v=5",
    "kivi:k=7,v=6",
    "kvquant:k=3,v=3,rope=before",
    "kvquant:k=2,v=4,outliers=0.06,sink=0,rope=before",
    "k=kvquant:4,v=zipcache,outliers=0,rope=before",
};

// ---- without a GPU

struct HostWiden {
  DType type;
  double operator()(const std::uint8_t* p) const { return base::load_float(p, type, 0); }
};

// Blocks of `block` values by the Hadamard matrix, by definition.
std::vector<double> turned(const std::vector<double>& x, int block) {
  std::vector<double> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t first = i / static_cast<std::size_t>(block) * static_cast<std::size_t>(block);
    for (std::size_t k = 0; k < static_cast<std::size_t>(block); ++k) {
      out[i] += (std::popcount(k & (i - first)) % 2 == 0 ? 1 : -1) * x[first + k];
    }
  }
  return out;
}

// The largest difference of one head's page to what the CPU decodes, over the largest value.
double decoding_error(const Cache& cache, int head) {
  const CacheShape& shape = cache.shape();
  const auto block = cache.store().sealed_block(1);
  BlockFormat format = make_block_format(cache.recipe(), shape);
  const TurnTables tables = make_turn_tables(usual_rotation(shape), shape.key_dim);
  if (format.before_rope != 0)
    format.turns = tables.at(tables.turns.data(), tables.offsets.data(), tables.places.data());
  const PageStore::Impl& store = cache.store().impl();
  const BlockReader<HostWiden> reader(format, reinterpret_cast<const std::uint8_t*>(block.data()), head, {shape.dtype});
  std::vector<float> keys(static_cast<std::size_t>(shape.key_dim * kPage));
  std::vector<float> values(static_cast<std::size_t>(shape.value_dim * kPage));
  const PageLayout& layout = cache.store().layout();
  cache::decode_keys(layout, shape.dtype, block.data(), head, store.turns_of(store.pages[1]), keys.data());
  cache::decode_values(layout, shape.dtype, block.data(), head, values.data());
  double error = 0;
  double largest = 0;
  const auto compare = [&](double got, float want) {
    error = std::max(error, std::fabs(got - want));
    largest = std::max(largest, std::fabs(static_cast<double>(want)));
  };
  for (int place = 0; place < kPage; ++place) {
    for (int i = 0; i < shape.key_dim; ++i) {
      compare(reader.key_at(place, i, kPage + reader.token(place)),
              keys[static_cast<std::size_t>(reader.channel(i) * kPage + reader.token(place))]);
    }
    std::vector<double> row;
    for (int c = 0; c < shape.value_dim; ++c) row.push_back(reader.value(place, c));
    row = turned(row, format.value.rotation);
    const float* want = values.data() + static_cast<std::ptrdiff_t>(reader.token(place)) * shape.value_dim;
    for (int c = 0; c < shape.value_dim; ++c) compare(row[static_cast<std::size_t>(c)], want[c]);
  }
  return error / largest;
}

TEST(BlockPage, HoldsWhatTheCpuDecodes) {
  for (const char* recipe : kRecipes) {
    for (const auto& [key, value] : {std::pair{64, 64}, {96, 128}, {128, 96}, {192, 256}, {256, 192}}) {
      for (const DType type : {DType::f16, DType::bf16}) {
        SCOPED_TRACE(std::string(recipe) + " " + std::to_string(key) + "x" + std::to_string(value));
        const Cache cache = random_cache(recipe, {2, key, value, type}, 500, 5);
        for (int head = 0; head < 2; ++head) EXPECT_LE(decoding_error(cache, head), 2e-6);
      }
    }
  }
}

TEST(BlockPage, IsTheCpusBlock) {
  const CacheShape shape{8, 128, 128, DType::f16};
  for (const char* recipe : {"kvquant:k=3,v=3", "zipcache", "kivi:k=8,v=8"}) {
    EXPECT_TRUE(choose_format(parse_recipe(recipe), shape).block.present()) << recipe;
    EXPECT_EQ(page_bytes(parse_recipe(recipe), shape), make_layout(parse_recipe(recipe), shape).page_bytes) << recipe;
  }
  EXPECT_FALSE(choose_format(parse_recipe("kivi:k=2,v=2"), shape).block.present());
  EXPECT_FALSE(choose_format(parse_recipe("small"), shape).block.present());
}

TEST(BlockPage, RefusesWhatItCannotHold) {
  const CacheShape shape{1, 128, 128, DType::f16};
  const auto refused = [](const char* recipe, const CacheShape& s, const char* word) {
    expect_refused([&] { choose_format(parse_recipe(recipe), s); }, recipe, word);
  };
  refused("kvquant:page=64", shape, "page");
  refused("f16", shape, "f16");
  refused("zipcache", {1, 80, 128, DType::f16}, "80");
  refused("kvquant", {1, 128, 128, DType::f32}, "f32");
}

// ---- on the GPU

// Key dimensions for values of 128 channels: one with kernels of its own for few vectors and for sm_90a, and one that
// only the kernel for any key dimension serves.
constexpr int kOwnDim = 128;
constexpr int kOtherDim = 64;

TEST(GpuBlock, RecipesDecode) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : kRecipes) {
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = {1337, 400};
    expect_blocks(shape);
  }
}

TEST(GpuBlock, RecipesPrefill) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : kRecipes) {
    for (const int key_dim : {kOwnDim, kOtherDim}) {
      Shape shape;
      shape.recipe = recipe;
      shape.cache.key_dim = key_dim;
      shape.rows = 70;
      shape.group = 3;
      shape.lengths = {1100, 300};
      expect_blocks(shape);
    }
  }
}

TEST(GpuBlock, EveryKernelOfTheBuild) {
  KVANT_NEEDS_GPU();
  ASSERT_FALSE(block_kernels().empty());
  for (const BlockKernel& kernel : block_kernels()) {
    if (kernel.before_rope || (kernel.wgmma && !runs_wgmma(kernel.function))) continue;
    bool served = false;
    for (const int key_dim : {64, 96, 128, 192, 256}) {
      if (kernel.key_dim != 0 && key_dim != kernel.key_dim) continue;
      for (const char* recipe : {"kvquant:k=3,v=3", "zipcache", "k=waterfill:2.5,v=kivi:2", "kivi:k=8,v=8"}) {
        Shape shape;
        shape.recipe = recipe;
        shape.cache = {2, key_dim, kernel.value_dim, kernel.bfloat ? DType::bf16 : DType::f16};
        shape.rows = kernel.few ? 2 : kernel.wgmma ? 70 : 30;
        shape.lengths = {900, 130, 257};
        const Twins twins(shape);
        const AttendPlan plan(twins.batch, twins.query_heads(), shape.rows, shape.options);
        ASSERT_TRUE(plan.impl().block) << text_of(shape);
        if (kernel.team == 1 && kernel.few) {  // such short calls are served by teams
          auto& impl = const_cast<AttendPlan::Impl&>(plan.impl());
          impl.split_few({0, 1}, impl.describe_sequences(128, 1));
        }
        const PrefillKernel& chosen = *plan.impl().block;
        EXPECT_EQ(plan.path(), kernel.few ? AttendPath::integer : AttendPath::prefill);
        if (chosen.function != kernel.function) {  // that of sm_90a takes all that it has room for
          EXPECT_FALSE(kernel.few) << text_of(shape);
          EXPECT_NE(chosen.wgmma, kernel.wgmma) << text_of(shape);
          continue;
        }
        served = true;
        expect_blocks(shape);
      }
    }
    EXPECT_TRUE(served) << kernel.key_dim << "x" << kernel.value_dim;
  }
}

TEST(GpuBlock, LengthsAroundPageBoundaries) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kvquant:k=3,v=3,window=0", "kvquant:k=2,v=2,sink=128", "zipcache:sink=32",
                             "zipcache:window=0", "kivi:k=8,v=8,sink=4,window=16"}) {
    for (const auto& [rows, key_dim] : {std::pair{1, kOwnDim}, {3, kOwnDim}, {130, kOwnDim}, {130, kOtherDim}}) {
      Shape shape;
      shape.recipe = recipe;
      shape.cache.key_dim = key_dim;
      shape.rows = rows;
      shape.lengths = {0,   1,   2,   15,  16,  17,  63,  64,  65,  127, 128,
                       129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 513};
      expect_blocks(shape);
    }
  }
}

TEST(GpuBlock, QueryGroupsAndRows) {
  KVANT_NEEDS_GPU();
  for (const int group : {1, 3, 4, 5, 8, 16}) {
    for (const int rows : {1, 4, 8, 50}) {
      Shape shape;
      shape.recipe = group % 2 == 0 ? "zipcache" : "kvquant:k=3,v=3";
      shape.group = group;
      shape.rows = rows;
      shape.lengths = {700, 385};
      expect_blocks(shape);
    }
  }
}

TEST(GpuBlock, WindowCapScaleAndSinks) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kvquant:k=2,v=2,sink=40", "zipcache:sink=4"}) {
    for (const int window : {0, 1, 100, 128, 300, 5000}) {
      for (const float cap : {0.0F, 2.0F, 50.0F}) {
        Shape shape;
        shape.recipe = recipe;
        shape.rows = window == 300 ? 60 : 3;
        shape.options.sliding_window = window;
        shape.options.softcap = cap;
        shape.options.scale = window == 100 ? -0.3F : 0.3F;
        shape.lengths = {1000, 129};
        expect_blocks(shape);
      }
    }
  }
  for (const int rows : {1, 20}) {
    Shape shape;
    shape.recipe = "kvquant:k=3,v=3";
    shape.rows = rows;
    shape.lengths = {1000, 5, 0};
    expect_learned_sinks(shape, AttendPath::automatic);
  }
}

// Both kernels take any number of vectors that their paths allow when they are asked for.
TEST(GpuBlock, PathsThatAreAskedFor) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = "kvquant:k=3,v=3";
  shape.lengths = {700, 385};
  for (const int rows : {1, 8}) {
    shape.rows = rows;
    shape.group = rows == 8 ? 16 : 4;
    const Twins twins(shape);
    const Twins::Result cpu = twins.on_cpu();
    for (const AttendPath path : {AttendPath::integer, AttendPath::prefill}) {
      const AttendPlan plan(twins.batch, twins.query_heads(), rows, {}, 128, path);
      EXPECT_EQ(plan.path(), path);
      EXPECT_LE(relative_error(twins.on_gpu(plan).out, cpu.out), 1e-3);
    }
  }
  const Twins twins(shape);
  EXPECT_THROW(AttendPlan(twins.batch, twins.query_heads(), 9, {}, 128, AttendPath::integer), Error);
}

// One part and many, more parts than a short sequence has stages; the same bits every time.
// Two blocks of vectors and three, for which there are four.
TEST(GpuBlock, BlocksOfAClusterUnpackForEachOther) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"kvquant:k=3,v=3", "zipcache:sink=4", "kivi:k=8,v=8", "kvquant:k=2,v=2,outliers=0.06,rope=before"}) {
    for (const int rows : {65, 160}) {
      for (const int window : {0, 300}) {
        Shape shape;
        shape.recipe = recipe;
        shape.rows = rows;
        shape.options.sliding_window = window;
        shape.lengths = {1500, 200, 4 * kPage};
        expect_blocks(shape);
        const Twins twins(shape);
        const AttendPlan plan(twins.batch, twins.query_heads(), shape.rows, shape.options);
        const PrefillSplit& split = plan.impl().prefill_split;
        EXPECT_EQ(split.ranks, plan.impl().block->ranks);
        EXPECT_EQ(split.vector_blocks % split.ranks, 0);
        EXPECT_EQ(plan.describe().find("clusters of 2") != std::string::npos, split.ranks == 2);
      }
    }
  }
}

TEST(GpuBlock, Parts) {
  KVANT_NEEDS_GPU();
  for (const auto& [sequences, length] : {std::pair{1, 300}, {1, 20000}, {300, 200}}) {
    for (const char* recipe : {"kvquant:k=3,v=3", "zipcache"}) {
      Shape shape;
      shape.recipe = recipe;
      shape.lengths.assign(static_cast<std::size_t>(sequences), length);
      expect_blocks(shape);
    }
  }
  Shape ragged;
  ragged.recipe = "kvquant:k=2,v=2";
  ragged.lengths = {5000, 3, 0, 129, 20000, 777, 1, 4096};
  expect_blocks(ragged);
  const Twins twins(ragged);
  const Twins::Result first = twins.on_gpu(AttendPath::automatic);
  EXPECT_EQ(twins.on_gpu(AttendPath::automatic).out, first.out);
}

// Rows that arrive in chunks: what is sealed on the device are the CPU's bytes.
TEST(GpuBlockSeal, AppendAndSealWriteTheCpusBytes) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : kRecipes) {
    for (const float spread : {0.0F, 3.0F}) expect_same_seals(recipe, {3, 128, 128, DType::f16}, spread);
  }
  for (const char* recipe :
       {"kvquant:sink=128,window=16", "zipcache:sink=127,window=0", "kivi:k=8,v=8,sink=100", "waterfill:feedback=1",
        "k=waterfill:3,v=zipcache", "k=kvquant:4,v=zipcache", "k=zipcache,v=waterfill:5,shared=1"}) {
    expect_same_seals(recipe, {2, 128, 128, DType::f16});
  }
}

TEST(GpuBlockSeal, EveryDimensionAndType) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : kRecipes) {
    for (const auto& [key, value] : {std::pair{64, 96}, {96, 192}, {128, 128}, {192, 256}, {256, 64}}) {
      for (const DType type : {DType::f16, DType::bf16}) expect_same_seals(recipe, {2, key, value, type});
    }
  }
}

// Small enough for compute-sanitizer: every part of the kernels once.
TEST(GpuBlockSeal, SanitizerSized) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"kvquant:k=3,v=3,outliers=0.05,voutliers=0.05", "zipcache:sink=4", "kitty:selector=variance",
        "k=waterfill:2.5,v=waterfill:5,shared=1", "k=kivi:1,v=waterfill:3"}) {
    expect_same_seals(recipe, {2, 64, 64, DType::bf16});
  }
}

// A pool's lists and grids are those of all heads, also of many.
TEST(GpuBlockSeal, ManyHeads) {
  KVANT_NEEDS_GPU();
  expect_same_seals("kvquant:k=3,v=3", {40, 64, 64, DType::f16});
  expect_same_seals("zipcache", {64, 64, 128, DType::f16});
  expect_same_seals("k=kivi:8,v=waterfill:3,shared=1", {100, 64, 128, DType::f16});
}

TEST(GpuBlockSeal, CalibratedRangesAndLevels) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{2, 128, 128, DType::f16};
  const testing::CalibrationFile file(testing::make_calibration(shape, 0.02));
  for (const char* bits : {"k=3,v=3", "k=2,v=4,qnorm=1,vqnorm=1"}) {
    const std::string recipe = "kvquant:" + std::string(bits) + ",outliers=0.02,voutliers=0.02" + file.options(2);
    for (const float spread : {0.0F, 3.0F}) expect_same_seals(recipe.c_str(), shape, spread);
  }
}

TEST(GpuBlockSeal, DecodeLoopFollowsTheCpu) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kvquant:k=3,v=3,window=16", "zipcache:window=16,sink=4"}) {
    decode_beside_the_cpu(recipe, recipe[0] == 'z' ? 1 : 0);
  }
}

// More than a launch holds, into pages of a pool that other contents filled before.
TEST(GpuBlockSeal, ManyPagesAtOnce) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{1, 64, 64, DType::f16};
  const Recipe recipe = parse_recipe("kvquant:k=2,v=2");
  PagePool pool(recipe, shape, 300, 300);
  Batch batch(pool, 1, 300 * kPage);
  std::mt19937 random(8);
  for (int round = 0; round < 2; ++round) {
    Sequence sequence(pool);
    Sequence* pointer = &sequence;
    batch.bind(std::span(&pointer, 1), nullptr);
    std::vector<Cache> caches(1, Cache(recipe, shape));
    append_to_both(batch, caches, random, 299 * kPage, 0.3F);
    EXPECT_EQ(batch.seal_ready(nullptr), 298);
    expect_same_blocks(sequence, caches[0]);
  }
}

// One token of all heads under a shared grid must fit a block's shared memory.
TEST(GpuBlockSeal, SharedGridsOfVeryManyHeadsAreRefused) {
  KVANT_NEEDS_GPU();
  expect_append_refused("kvquant", {1024, 64, 64, DType::f16}, "1024 KV heads");
}

// Outliers are added as integers, so that nothing depends on an order: the same bits every time, on a full GPU too.
TEST(GpuBlock, FiveHundredCallsAreEqual) {
  KVANT_NEEDS_GPU();
  // The second: one result of it once lay on a barrier (README.md), seen with several of these under memcheck at once.
  for (const char* recipe : {"kvquant:k=3,v=3", "kvquant:k=4,v=4,outliers=0.06,voutliers=0.05",
                             "kvquant:k=3,v=2,outliers=0,voutliers=0", "zipcache"}) {
    for (const int rows : {1, 20}) {
      Shape shape;
      shape.recipe = recipe;
      shape.rows = rows;
      shape.cache.kv_heads = 8;
      shape.lengths.assign(16, 2500);
      const Twins twins(shape);
      const AttendPlan plan(twins.batch, twins.query_heads(), rows, shape.options);
      const Twins::Result first = twins.on_gpu(plan);
      EXPECT_LE(relative_error(first.out, twins.on_cpu().out), 1e-3) << text_of(shape);
      for (int i = 0; i < 500; ++i) ASSERT_EQ(twins.on_gpu(plan).out, first.out) << text_of(shape) << ", call " << i;
    }
  }
}

// Small enough for compute-sanitizer: every part of the kernels for many vectors once, more blocks than one.
TEST(GpuBlock, SanitizerSized) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kvquant:k=3,v=3,outliers=0.05,voutliers=0.05", "zipcache:sink=4", "kivi:k=8,v=8,sink=100",
                             "waterfill:rotate=0", "k=kivi:4,v=waterfill:2"}) {
    for (const int key_dim : {kOwnDim, kOtherDim}) {
      Shape shape;
      shape.recipe = recipe;
      shape.cache.kv_heads = 1;
      shape.cache.key_dim = key_dim;
      shape.rows = 70;
      shape.options.sliding_window = 300;
      shape.lengths = {500, 130};
      expect_blocks(shape);
    }
  }
}

TEST(GpuBlock, UploadAndDownloadKeepEveryBit) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : kRecipes) {
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = {1000, 128, 0, 260};
    const Twins twins(shape);
    for (std::size_t b = 0; b < twins.caches.size(); ++b) expect_same_blocks(twins.sequences[b], twins.caches[b]);
    EXPECT_THROW(twins.sequences[0].download_block(7), Error);
  }
}

}  // namespace
}  // namespace kvant::cuda::test
