// Decode attention on the GPU against the CPU library on the same pages.
#include "cuda/attend.hpp"

#include "cuda/support.hpp"

namespace kvant::cuda::test {
namespace {

TEST(GpuAttend, Recipes) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const char* recipe :
       {"kivi:k=2,v=2", "kivi:k=4,v=4", "kivi:k=3,v=3", "kivi:k=4,v=2", "kivi:k=2,v=4", "kivi:k=3,v=2", "kivi:k=2,v=3",
        "kivi:k=4,v=3", "kivi:k=3,v=4", "kitty", "kitty:boost=0.125", "kitty:v=4"}) {
    for (const int dim : {64, 128}) {
      Shape shape;
      shape.recipe = recipe;
      shape.cache = {2, dim, dim, DType::f16};
      shape.lengths = {1337};
      expect_agreement(shape);
    }
  }
}

TEST(GpuAttend, HeadDimensionsAndTypes) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const auto& [key, value] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}}) {
    for (const DType type : {DType::f16, DType::bf16}) {
      for (const char* recipe : {"kivi:k=2,v=2", "kivi:k=3,v=3", "kivi:k=4,v=4"}) {
        Shape shape;
        shape.recipe = recipe;
        shape.cache = {2, key, value, type};
        shape.lengths = {900, 130};
        expect_agreement(shape);
      }
    }
  }
  for (const int dim : {96, 192, 256}) {
    Shape shape;
    shape.recipe = "kitty";
    shape.cache = {1, dim, dim, DType::f16};
    expect_agreement(shape);
  }
}

TEST(GpuAttend, QueryGroupsAndRows) {
  KVANT_NEEDS_GPU();
  for (const int group : {1, 2, 3, 4, 5, 8, 16}) {
    for (const int rows : {1, 2, 5, 8}) {
      Shape shape;
      shape.group = group;
      shape.rows = rows;
      shape.lengths = {700, 385};
      expect_agreement(shape);
    }
  }
}

TEST(GpuAttend, LengthsAroundPageBoundaries) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2,window=0", "kivi:k=2,v=2", "kitty:sink=32", "kivi:k=4,v=4,sink=128",
                             "kivi:k=2,v=2,sink=4,window=16"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 2;
    shape.lengths = {0, 1, 2, 15, 16, 17, 127, 128, 129, 143, 144, 145, 255, 256, 257, 383, 384, 385, 511, 512, 513};
    expect_agreement(shape);
  }
}

TEST(GpuAttend, WindowCapAndSinks) {
  KVANT_NEEDS_GPU();
  for (const int window : {0, 1, 100, 128, 300, 5000}) {
    for (const float cap : {0.0F, 2.0F, 50.0F}) {
      Shape shape;
      shape.rows = 3;
      shape.options.sliding_window = window;
      shape.options.softcap = cap;
      shape.options.scale = 0.3F;
      shape.lengths = {1000, 129};
      expect_agreement(shape);
    }
  }
  Shape shape;
  shape.lengths = {1000, 5, 0};
  Twins twins(shape);
  const std::vector<float> sinks = {0.5F, -1, 3, 100, -50, 0, 1, 2};
  Guarded memory(sinks.size() * 4);
  memory.write(sinks.data());
  twins.shape.options.sinks = static_cast<const float*>(memory.data());
  const Twins::Result cpu = twins.on_cpu(sinks.data());
  for (const AttendPath path : {AttendPath::reference, AttendPath::integer}) {
    const Twins::Result gpu = twins.on_gpu(path);
    EXPECT_LE(relative_error(gpu.out, cpu.out), 1e-3);
  }
}

// Every split the planner knows, and far more parts than pages.
TEST(GpuAttend, Splits) {
  KVANT_NEEDS_GPU();
  for (const auto& [sequences, length] :
       {std::pair{1, 300}, {1, 4000}, {1, 20000}, {20, 1500}, {25, 1500}, {70, 700}, {40, 130}}) {
    Shape shape;
    shape.lengths.assign(static_cast<std::size_t>(sequences), length);
    expect_agreement(shape);
  }
  for (const std::int64_t length : {3000, 20000}) {  // two blocks of vectors, in clusters
    Shape shape;
    shape.group = 8;
    shape.lengths = {length};
    expect_agreement(shape);
  }
  // Runs of warps that hold several short sequences, one, or a part of one.
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{5000, 3, 0, 129, 20000, 777, 1, 4096}, std::vector<std::int64_t>(200, 260),
        std::vector<std::int64_t>{90000, 500, 500, 500, 20, 0, 0, 1, 40000, 3000}}) {
    for (const char* recipe : {"kivi:k=2,v=2", "kitty:sink=32", "small"}) {
      Shape ragged;
      ragged.recipe = recipe;
      ragged.lengths = lengths;
      expect_agreement(ragged);
    }
  }
}

// A cluster of 8 with half pages and with whole ones, blocks whose parts meet in memory, clusters of 2: as few tokens
// as they take, so that compute-sanitizer's tools end.
TEST(GpuAttend, SanitizerSized) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2", "kitty:sink=8", "small"}) {
    for (const auto& [sequences, length] : {std::pair{1, 700}, {1, 4700}, {1, 17000}, {25, 300}}) {
      Shape shape;
      shape.recipe = recipe;
      shape.lengths.assign(static_cast<std::size_t>(sequences), length);
      expect_agreement(shape);
    }
  }
}

TEST(GpuAttend, SplitsOfShapesWithoutKernelsForClusters) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const int group : {4, 8}) {
    for (const std::int64_t length : {3000, 20000}) {
      Shape shape;
      shape.group = group;
      shape.lengths = {length};
      shape.cache = {1, 256, 256, DType::f16};
      expect_agreement(shape);
    }
  }
}

TEST(GpuAttend, NothingToSee) {
  KVANT_NEEDS_GPU();
  for (const int sequences : {1, 9, 100}) {
    Shape shape;
    shape.lengths.assign(static_cast<std::size_t>(sequences), 0);
    expect_agreement(shape);
  }
  Shape shape;
  shape.lengths = {};
  Twins none(shape);
  const AttendPlan plan(none.batch, none.query_heads(), 1, {});
  plan.run(nullptr, nullptr, nullptr, nullptr);
  EXPECT_EQ(none.batch.seal_ready(nullptr), 0);
}

std::string recipe_of(const DecodeVariant& v) {
  if (v.key_bits == 0) {
    return (v.value_bits == 2 ? "waterfill:k=2.5,v=" : "waterfill:k=3,v=") + std::to_string(v.value_bits);
  }
  if (v.high_steps > 0) return "kitty:v=" + std::to_string(v.value_bits);
  return "kivi:k=" + std::to_string(v.key_bits) + ",v=" + std::to_string(v.value_bits);
}

// A batch for which the planner takes exactly this kernel: each one of the build runs, none is left to luck.
TEST(GpuAttend, EveryKernelOfTheBuild) {
  KVANT_NEEDS_GPU();
  if (device_info().major < 9) GTEST_SKIP() << "clusters need compute capability 9.0";
  int kernels = 0;
  for (const DecodeKernel& kernel : decode_kernels()) {
    const DecodeVariant& v = kernel.variant;
    const std::string recipe = recipe_of(v);
    Shape shape;
    shape.recipe = recipe.c_str();
    shape.cache = {1, v.key_dim, v.value_dim, v.bfloat ? DType::bf16 : DType::f16};
    shape.group = v.n_tiles > 1 ? 7 : 3;
    if (v.half) {
      shape.lengths = {2500};
    } else if (v.cluster) {
      shape.lengths = {5000};
    } else {
      shape.lengths = {130, 1400, 700};
    }
    SCOPED_TRACE(text_of(shape));
    const Twins twins(shape, 17);
    const AttendPlan plan(twins.batch, twins.query_heads(), 1, {});
    ASSERT_EQ(plan.path(), AttendPath::integer);
    EXPECT_EQ(plan.impl().kernel, &kernel) << plan.describe();
    EXPECT_LE(relative_error(twins.on_gpu(plan).out, twins.on_cpu().out), tolerance(shape.cache.dtype));
    ++kernels;
  }
  EXPECT_GT(kernels, 0);
}

}  // namespace
}  // namespace kvant::cuda::test
