// Attention of many query rows per sequence on the GPU against the CPU library on the same pages.
#include "cuda/prefill.hpp"

#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/attend.hpp"
#include "cuda/support.hpp"

namespace kvant::cuda::test {
namespace {

// Dequantized keys and values, weights and outputs are rounded to the type: 11 bits, or 8.
double prefill_tolerance(DType type) {
  return type == DType::bf16 ? 5e-3 : 1e-3;
}

void expect_prefill(const Shape& shape) {
  SCOPED_TRACE(text_of(shape));
  const Twins twins(shape);
  const Twins::Result cpu = twins.on_cpu();
  for (const AttendPath path : {AttendPath::reference, AttendPath::prefill}) {
    const Twins::Result gpu = twins.on_gpu(path);
    const char* name = path == AttendPath::prefill ? "prefill" : "reference";
    EXPECT_LE(relative_error(gpu.out, cpu.out), prefill_tolerance(shape.cache.dtype)) << name;
    EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3) << name << ", log-sum-exp";
  }
}

TEST(GpuPrefill, EveryKernelOfTheBuild) {
  KVANT_NEEDS_GPU();
  ASSERT_FALSE(prefill_kernels().empty());
  for (const PrefillKernel& kernel : prefill_kernels()) {
    std::string recipe = "kivi:k=" + std::to_string(kernel.key.bits);
    if (kernel.key.high_steps > 0) recipe = "kitty:sink=4";
    if (kernel.key.sorted()) recipe = "waterfill:k=2.28,high=6,sink=4";
    recipe += ",v=" + std::to_string(kernel.value.bits);
    Shape shape;
    shape.recipe = recipe.c_str();
    shape.cache = {2, kernel.key.dim, kernel.value.dim, kernel.bfloat ? DType::bf16 : DType::f16};
    shape.group = 3;
    shape.rows = 100;  // two blocks of vectors, of a cluster where kernels take one
    shape.lengths = {1100, 300};
    SCOPED_TRACE(text_of(shape) + (kernel.wgmma ? " wgmma" : ""));
    const Twins twins(shape, 21);
    const AttendPlan plan(twins.batch, 6, shape.rows, {});
    const PrefillKernel* chosen = plan.impl().prefill;
    ASSERT_NE(chosen, nullptr);
    if (chosen != &kernel) {
      // Devices with warpgroup instructions run the kernel of the others as well, those cannot run theirs.
      if (kernel.wgmma) continue;
      ASSERT_TRUE(chosen->wgmma);
      auto& impl = const_cast<AttendPlan::Impl&>(plan.impl());
      impl.prefill = &kernel;
      impl.split_prefill();
    }
    const Twins::Result cpu = twins.on_cpu();
    const Twins::Result gpu = twins.on_gpu(plan);
    EXPECT_LE(relative_error(gpu.out, cpu.out), prefill_tolerance(shape.cache.dtype));
    EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3);
  }
}

TEST(GpuPrefill, BoostedChannels) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kitty", "kitty:boost=0.125", "kitty:boost=0.02"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 40;
    shape.lengths = {1337};
    expect_prefill(shape);
  }
}

TEST(GpuPrefill, LengthsAroundPageBoundaries) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"kivi:k=2,v=2,window=0", "kitty:sink=32", "kivi:k=4,v=4,sink=128", "kivi:k=2,v=2,sink=100,window=16", "small",
        "small:window=0,sink=0", "balanced:sink=128", "near-lossless:sink=100,window=16"}) {
    for (const int rows : {9, 130}) {
      Shape shape;
      shape.recipe = recipe;
      shape.rows = rows;
      shape.lengths = {0,   1,   2,   8,   63,  64,  65,  127, 128, 129, 130,
                       131, 191, 192, 193, 255, 256, 257, 383, 384, 385, 513};
      expect_prefill(shape);
    }
  }
}

TEST(GpuPrefill, QueryGroups) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2", "balanced"}) {
    for (const int group : {1, 2, 3, 4, 5, 7, 8, 16}) {
      for (const int rows : {1, 16, 100}) {
        Shape shape;
        shape.recipe = recipe;
        shape.group = group;
        shape.rows = rows;
        shape.lengths = {700, 385};
        expect_prefill(shape);
      }
    }
  }
}

TEST(GpuPrefill, WindowCapScaleAndSinks) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2,sink=40", "small:sink=40"}) {
    for (const int window : {0, 1, 100, 128, 300, 5000}) {
      for (const float cap : {0.0F, 2.0F, 50.0F}) {
        Shape shape;
        shape.recipe = recipe;
        shape.rows = 150;
        shape.options.sliding_window = window;
        shape.options.softcap = cap;
        shape.options.scale = window == 100 ? -0.3F : 0.3F;
        shape.lengths = {1000, 129};
        expect_prefill(shape);
      }
    }
  }
  for (const char* recipe : {"kivi:k=2,v=2", "small"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 20;
    shape.lengths = {1000, 5, 0};
    expect_learned_sinks(shape, AttendPath::prefill);
  }
}

// One part and many, more parts than a short sequence has stages.
TEST(GpuPrefill, Parts) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2", "small"}) {
    Shape many;
    many.recipe = recipe;
    many.rows = 16;
    many.lengths = {9000, 30, 0, 700};
    const Twins few(many);
    EXPECT_GT(AttendPlan(few.batch, few.query_heads(), many.rows, {}).impl().prefill_split.parts, 1);
    expect_prefill(many);
    Shape one = many;
    one.lengths.assign(200, 300);
    const Twins full(one);
    EXPECT_EQ(AttendPlan(full.batch, full.query_heads(), one.rows, {}).impl().prefill_split.parts, 1);
    expect_prefill(one);
  }
}

// A prompt in chunks, each attended to as soon as it is appended, then pages change hands.
TEST(GpuPrefill, ChunksFollowTheCpu) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kitty:window=16,sink=8", "balanced:window=16,sink=8"}) {
    SCOPED_TRACE(recipe);
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 150;
    shape.lengths = {0, 90};
    Twins twins(shape, 3, 24);
    std::mt19937 random(4);
    for (int chunk = 0; chunk < 5; ++chunk) {
      append_to_both(twins.batch, twins.caches, random, 150, 0.2F);
      twins.batch.seal_ready(nullptr);
      const Twins::Result cpu = twins.on_cpu();
      const Twins::Result gpu = twins.on_gpu(AttendPath::automatic);
      EXPECT_LE(relative_error(gpu.out, cpu.out), 1e-3) << "chunk " << chunk;
      EXPECT_LE(relative_error(gpu.lse, cpu.lse), 1e-3) << "chunk " << chunk;
    }
  }
}

// Append and attention in one graph: replays see the sequences grow.
void expect_graph_follows(const char* recipe) {
  SCOPED_TRACE(recipe);
  Shape shape;
  shape.recipe = recipe;
  shape.rows = 16;
  shape.lengths = {1040, 17};
  Twins twins(shape, 5, 4);
  std::mt19937 random(6);
  const auto rows = random_rows(random, DType::f16, 32, 2, 128, 0.1F);
  Guarded device_rows(rows.size() * 2);
  device_rows.write(rows.data());
  Guarded q(twins.queries.size() * 2);
  q.write(twins.queries.data());
  Guarded out(twins.queries.size() * 2);
  twins.batch.reserve(80, nullptr);
  const AttendPlan plan(twins.batch, twins.query_heads(), shape.rows, {});
  ASSERT_EQ(plan.path(), AttendPath::prefill);

  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  twins.batch.append(device_rows.data(), device_rows.data(), 16, stream);
  plan.run(q.data(), out.data(), nullptr, stream);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 4; ++replay) {
    if (replay > 0) twins.batch.count_appended(16);  // the capture itself counted once
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    for (std::size_t b = 0; b < 2; ++b) {
      const ConstView added = dense_view(rows.data() + b * 16 * 256, DType::f16, 16, 2, 128);
      twins.caches[b].append(added, added);
    }
    const std::vector<std::uint8_t> bytes = out.read();
    std::vector<std::uint16_t> raw(bytes.size() / 2);
    std::memcpy(raw.data(), bytes.data(), bytes.size());
    EXPECT_LE(relative_error(widen(raw, DType::f16), twins.on_cpu().out), 1e-3) << "replay " << replay;
    out.poison();
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(GpuPrefill, GraphFollowsGrowth) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2", "small"}) expect_graph_follows(recipe);
}

// Every width alone and all together, odd sums, grids that heads share or not.
TEST(GpuPrefill, WaterfillWidthsAndBudgets) {
  KVANT_NEEDS_GPU();
  for (const char* recipe :
       {"small", "balanced", "near-lossless", "waterfill:k=1,low=1,high=1,v=2", "waterfill:k=2,low=2,high=2,v=2",
        "waterfill:k=3,low=3,high=3,v=3", "waterfill:k=4,low=4,high=4,v=4", "waterfill:k=5,low=5,high=5,v=2",
        "waterfill:k=6,low=6,high=6,v=4", "waterfill:k=3.5,low=1,high=6,v=2",
        "waterfill:k=2.28,low=1,high=6,v=3,shared=1", "waterfill:grid=range", "waterfill:k=1.4,low=1,high=4,v=2",
        "waterfill:k=5.5,low=4,high=6,v=4"}) {
    for (const float spread : {0.0F, 0.3F, 1.0F}) {
      Shape shape;
      shape.recipe = recipe;
      shape.rows = 37;
      shape.lengths = {700, 300};
      shape.spread = spread;
      shape.options.scale = 0.05F;  // channels of unequal size: scores as spread as those of equal ones
      expect_prefill(shape);
    }
  }
}

TEST(GpuPrefill, WaterfillPresetsTypesAndDimensions) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  for (const char* preset : {"small", "balanced", "near-lossless"}) {
    for (const auto& [key, value] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 128}}) {
      for (const DType type : {DType::f16, DType::bf16}) {
        Shape shape;
        shape.recipe = preset;
        shape.cache = {2, key, value, type};
        shape.rows = 9;
        shape.lengths = {900, 130, 257};
        expect_prefill(shape);
      }
    }
  }
}

// Kernels take key tiles of any size: a plan must not spoil one that was made before.
TEST(GpuPrefill, PlansOfTwoBudgetsAtOnce) {
  KVANT_NEEDS_GPU();
  for (const int rows : {1, 9}) {
    Shape wide;
    wide.recipe = "waterfill:k=6,low=6,high=6,v=2";
    wide.rows = rows;
    Shape narrow = wide;
    narrow.recipe = "waterfill:k=1,low=1,high=1,v=2";
    const Twins first(wide);
    const Twins second(narrow);
    const AttendPlan first_plan(first.batch, first.query_heads(), rows, {});
    const AttendPlan second_plan(second.batch, second.query_heads(), rows, {});
    EXPECT_LE(relative_error(first.on_gpu(first_plan).out, first.on_cpu().out), 1e-3) << rows;
    EXPECT_LE(relative_error(second.on_gpu(second_plan).out, second.on_cpu().out), 1e-3) << rows;
  }
}

TEST(GpuPrefill, SanitizerSized) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2,sink=5,window=40", "kitty:sink=0", "small:sink=5,window=40",
                             "waterfill:k=3.5,low=1,high=6,v=4,sink=0"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.rows = 70;
    shape.lengths = {700, 90};
    shape.options.sliding_window = 500;
    expect_prefill(shape);
  }
}

// Kernels of kivi must not take pages of the same widths whose values are rotated.
TEST(PrefillKernels, NoneForRotatedValues) {
  const DeviceFormat format = make_device_format(parse_recipe("k=kivi:2,v=waterfill:2"), {2, 128, 128, DType::f16});
  ASSERT_GT(format.rotation, 1);
  ASSERT_EQ(format.key.bits, 2);
  EXPECT_EQ(find_prefill_kernel(format), nullptr);
}

TEST(PrefillParts, FillTheDeviceAndNoMore) {
  EXPECT_EQ(choose_parts(528, 512, 264), 1);
  EXPECT_EQ(choose_parts(264, 512, 264), 1);
  EXPECT_GT(choose_parts(300, 512, 264), 1);  // the second round would be nearly empty
  EXPECT_EQ(choose_parts(128, 512, 264), 2);
  EXPECT_GE(choose_parts(8, 512, 264), 16);
  EXPECT_EQ(choose_parts(8, 1, 264), 1);
  EXPECT_EQ(choose_parts(0, 0, 264), 1);
}

}  // namespace
}  // namespace kvant::cuda::test
