// waterfill on the GPU: widths per key channel and page, rotated values, against the CPU library on the same pages.
#include "cuda/attend.hpp"
#include "cuda/support.hpp"

namespace kvant::cuda::test {
namespace {

TEST(GpuWaterfill, PresetsTypesAndDimensions) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const char* preset : {"small", "balanced", "near-lossless"}) {
    for (const auto& [key, value] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}}) {
      for (const DType type : {DType::f16, DType::bf16}) {
        Shape shape;
        shape.recipe = preset;
        shape.cache = {2, key, value, type};
        shape.lengths = {900, 130, 257};
        shape.spread = 0.6F;
        expect_agreement(shape);
      }
    }
  }
}

// Every width alone and all together; odd sums; a plane that ends inside a step, more steps than one.
TEST(GpuWaterfill, WidthsAndBudgets) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"waterfill:k=1,low=1,high=1,v=2", "waterfill:k=2,low=2,high=2,v=2", "waterfill:k=3,low=3,high=3,v=3",
        "waterfill:k=4,low=4,high=4,v=4", "waterfill:k=5,low=5,high=5,v=2", "waterfill:k=6,low=6,high=6,v=4",
        "waterfill:k=3.5,low=1,high=6,v=2", "waterfill:k=2.28,low=1,high=6,v=3,shared=1", "waterfill:grid=range",
        "waterfill:k=1.4,low=1,high=4,v=2", "waterfill:k=5.5,low=4,high=6,v=4"}) {
    for (const float spread : {0.0F, 0.3F, 1.5F}) {
      Shape shape;
      shape.recipe = recipe;
      shape.lengths = {700, 300};
      shape.spread = spread;
      expect_agreement(shape);
    }
  }
}

TEST(GpuWaterfill, LengthsAroundPageBoundaries) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"small", "small:window=0,sink=0", "balanced:sink=128", "near-lossless:window=16"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 2;
    shape.lengths = {0, 1, 2, 15, 16, 17, 127, 128, 129, 143, 144, 145, 255, 256, 257, 383, 384, 385, 511, 512, 513};
    expect_agreement(shape);
  }
}

TEST(GpuWaterfill, GroupsRowsWindowsAndSplits) {
  KVANT_NEEDS_GPU();
  for (const int group : {1, 3, 4, 8, 16}) {
    Shape shape;
    shape.recipe = "small";
    shape.group = group;
    shape.rows = group == 4 ? 5 : 1;
    shape.lengths = {700, 385};
    shape.options.sliding_window = group == 3 ? 300 : 0;
    shape.options.softcap = group == 1 ? 20.0F : 0.0F;
    expect_agreement(shape);
  }
  for (const auto& [sequences, length] : {std::pair{1, 300}, {1, 4000}, {1, 20000}, {20, 1500}, {25, 700}, {70, 700}}) {
    for (const int group : {4, 8}) {
      Shape shape;
      shape.recipe = "small";
      shape.group = group;
      shape.lengths.assign(static_cast<std::size_t>(sequences), length);
      expect_agreement(shape);
    }
  }
  Shape ragged;
  ragged.recipe = "balanced";
  ragged.lengths = {5000, 3, 0, 129, 20000, 777, 1, 4096};
  expect_agreement(ragged);
}

TEST(GpuWaterfill, AppendAndSealWriteTheCpusBytes) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"small", "balanced", "near-lossless:sink=32,window=0", "waterfill:grid=range,vgrid=range",
                             "waterfill:k=2.28,high=6,v=3,shared=1,sink=0", "waterfill:k=1,high=1,v=4"}) {
    for (const float spread : {0.0F, 0.3F, 3.0F}) expect_same_seals(recipe, {3, 128, 128, DType::f16}, spread);
  }
}

TEST(GpuWaterfill, SealsOfOtherShapesAreTheCpusBytes) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const char* recipe : {"small", "balanced", "near-lossless"}) {
    for (const auto& [key, value] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}}) {
      for (const DType type : {DType::f16, DType::bf16}) expect_same_seals(recipe, {2, key, value, type});
    }
  }
}

// Nothing to tell channels apart by: widths go to the first ones, grids have no step.
TEST(GpuWaterfill, ConstantRowsAreSealedAlike) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{2, 128, 128, DType::f16};
  const Recipe recipe = parse_recipe("small:window=0");
  PagePool pool(recipe, shape, 4, 4);
  Batch batch(pool, 1, 512);
  Sequence sequence(pool);
  Sequence* pointer = &sequence;
  batch.bind(std::span(&pointer, 1), nullptr);
  const std::vector<std::uint16_t> rows(256 * 2 * 128, 0x3C00);
  Guarded device(rows.size() * 2);
  device.write(rows.data());
  batch.append(device.data(), device.data(), 256, nullptr);
  EXPECT_EQ(batch.seal_ready(nullptr), 2);
  Cache cache(recipe, shape);
  cache.append(dense_view(rows.data(), DType::f16, 256, 2, 128), dense_view(rows.data(), DType::f16, 256, 2, 128));
  expect_same_blocks(sequence, cache);
}

// Four tokens of all heads under a shared grid must fit a block's shared memory.
TEST(GpuWaterfill, SharedGridsOfVeryManyHeadsAreRefused) {
  KVANT_NEEDS_GPU();
  expect_append_refused("balanced", {128, 128, 128, DType::f16}, "128 KV heads");
}

// Parts of the recipe beside other methods' have no tuned format: their pages are CPU blocks.
TEST(GpuWaterfill, PartsOfTheRecipe) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"waterfill:rotate=0", "k=waterfill:2.5,v=kivi:2", "k=kivi:4,v=waterfill:2", "k=kitty,v=waterfill:2,shared=1"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = {700, 129};
    const Twins twins(shape);
    const AttendPlan plan(twins.batch, twins.query_heads(), 1, {});
    EXPECT_EQ(plan.path(), AttendPath::integer) << recipe;
    EXPECT_LE(relative_error(twins.on_gpu(plan).out, twins.on_cpu().out), 1e-3) << recipe;
  }
}

}  // namespace
}  // namespace kvant::cuda::test
