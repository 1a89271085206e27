// Pages on the device: upload and download, append and seal, sharing; and the same plan run many times.
#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/support.hpp"

namespace kvant::cuda::test {
namespace {

TEST(GpuPages, UploadAndDownloadKeepEveryBit) {
  KVANT_NEEDS_GPU();
  for (const char* recipe : {"kivi:k=2,v=2", "kivi:k=3,v=4", "kitty", "kivi:sink=128", "small", "balanced"}) {
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = {1000, 128, 0, 260};
    const Twins twins(shape);
    for (std::size_t b = 0; b < twins.caches.size(); ++b) expect_same_blocks(twins.sequences[b], twins.caches[b]);
    EXPECT_THROW(twins.sequences[0].download_block(7), Error);
  }
}

// Rows arrive in chunks; what is sealed on the device are the CPU's bytes.
TEST(GpuPages, AppendAndSealWriteTheCpusBytes) {
  KVANT_NEEDS_GPU();
  KVANT_NEEDS_EVERY_SHAPE();
  struct Kind {
    const char* recipe;
    CacheShape shape;
  };
  for (const auto& [recipe, shape] :
       {Kind{"kivi:k=2,v=2", {2, 128, 128, DType::f16}}, Kind{"kivi:k=4,v=4,window=0", {2, 128, 128, DType::bf16}},
        Kind{"kivi:k=3,v=3", {1, 64, 64, DType::f16}}, Kind{"kivi:k=3,v=3", {1, 96, 96, DType::bf16}},
        Kind{"kivi:k=2,v=3,sink=4", {2, 128, 128, DType::f16}}, Kind{"kitty", {2, 128, 128, DType::f16}},
        Kind{"kitty:boost=0.125", {1, 64, 64, DType::bf16}}, Kind{"kitty", {1, 256, 256, DType::f16}},
        Kind{"kivi:k=4,v=2,sink=128,window=16", {2, 128, 128, DType::f16}},
        Kind{"kivi:k=2,v=2", {1, 192, 128, DType::f16}}, Kind{"kivi:k=2,v=2", {1, 96, 96, DType::f16}}}) {
    expect_same_seals(recipe, shape);
  }
}

// One new token at a time on both sides, attention after each: the pages change hands under a running sequence.
TEST(GpuPages, DecodeLoopFollowsTheCpu) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = "kitty:window=16";
  shape.lengths = {250, 139};
  Twins twins(shape, 3, 8);
  std::mt19937 random(4);
  for (int step = 0; step < 30; ++step) {
    append_to_both(twins.batch, twins.caches, random, 1, 0.2F);
    twins.batch.seal_ready(nullptr);
    const Twins::Result cpu = twins.on_cpu();
    EXPECT_LE(relative_error(twins.on_gpu(AttendPath::integer).out, cpu.out), 1e-3) << "step " << step;
  }
  for (std::size_t b = 0; b < 2; ++b) expect_same_blocks(twins.sequences[b], twins.caches[b]);
}

TEST(GpuPages, ForksShareSealedPagesAndDiverge) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = "kivi:k=2,v=2,sink=4";
  shape.lengths = {700};
  Twins twins(shape, 5, 8);
  const int free_before = twins.pool.free_pages();
  const Twins::Result before = twins.on_gpu(AttendPath::integer);
  {
    Sequence fork = twins.sequences[0].fork(nullptr);
    EXPECT_EQ(twins.pool.free_pages(), free_before);
    Sequence* only = &fork;
    twins.batch.bind(std::span(&only, 1), nullptr);
    EXPECT_EQ(twins.on_gpu(AttendPath::integer).out, before.out);
    const std::vector<std::uint16_t> rows(2 * 128 * 40, 0x3C00);
    Guarded device(rows.size() * 2);
    device.write(rows.data());
    twins.batch.append(device.data(), device.data(), 40, nullptr);
    EXPECT_NE(twins.on_gpu(AttendPath::integer).out, before.out);
  }
  twins.bind();
  EXPECT_EQ(twins.on_gpu(AttendPath::integer).out, before.out);
  EXPECT_EQ(twins.pool.free_pages(), free_before);
}

// A sequence dies that held rows of NaN in every free page; who takes those pages must not see them behind its own end.
TEST(GpuPages, WhatAPageHeldBeforeIsGone) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.recipe = "kivi:k=2,v=2,window=16";
  shape.lengths = {256 + 100};
  Twins twins(shape, 5);
  const auto rows_of = [](std::uint16_t bits) { return std::vector<std::uint16_t>(2 * 128 * 128, bits); };
  Guarded device(rows_of(0).size() * 2);
  device.write(rows_of(0x7E00).data());
  {
    Sequence nan(twins.pool);
    Sequence* only = &nan;
    twins.batch.bind(std::span(&only, 1), nullptr);
    while (twins.pool.free_exact_pages() > 0) twins.batch.append(device.data(), device.data(), 128, nullptr);
  }
  twins.bind();
  const std::vector<std::uint16_t> ones = rows_of(0x3C00);
  device.write(ones.data());
  twins.batch.append(device.data(), device.data(), 40, nullptr);
  const auto view = dense_view(ones.data(), DType::f16, 40, 2, 128);
  twins.caches[0].append(view, view);
  const Twins::Result cpu = twins.on_cpu();
  for (const AttendPath path : {AttendPath::integer, AttendPath::reference}) {
    EXPECT_LE(relative_error(twins.on_gpu(path).out, cpu.out), 1e-3);
  }
}

TEST(GpuPages, RefusalsChangeNothing) {
  KVANT_NEEDS_GPU();
  Shape shape;
  shape.lengths = {300};
  Twins twins(shape);
  const AttendPlan plan(twins.batch, 8, 1, {});
  EXPECT_THROW(AttendPlan(twins.batch, 7, 1, {}), Error);
  EXPECT_THROW(AttendPlan(twins.batch, 34, 1, {}), Error);
  EXPECT_THROW(AttendPlan(twins.batch, 8, 9, {}, 128, AttendPath::integer), Error);
  EXPECT_THROW(AttendPlan(twins.batch, 8, 65536, {}), Error);
  EXPECT_THROW(AttendPlan(twins.batch, 8, 0, {}), Error);
  EXPECT_THROW(twins.batch.reserve(1 << 21, nullptr), Error);
  EXPECT_THROW(twins.batch.reserve(1 << 19, nullptr), Error);  // the pool has no such number of pages
  EXPECT_THROW(PagePool(parse_recipe("kivi"), shape.cache, -1, 0), Error);
  const Cache other(parse_recipe("kivi:k=4,v=4"), shape.cache);
  EXPECT_THROW(Sequence::upload(twins.pool, other), Error);
  EXPECT_LE(relative_error(twins.on_gpu(plan).out, twins.on_cpu().out), 1e-3);
  twins.bind();
  EXPECT_THROW(twins.on_gpu(plan), Error);  // bound anew since
}

// Replays of a graph keep giving the right result, and two streams do not disturb each other. Warps sum up in the order
// in which they finish, so the last bits may differ between replays.
TEST(GpuReplay, ThousandReplaysAndTwoStreams) {
  KVANT_NEEDS_GPU();
  struct Kind {
    int sequences;
    std::int64_t length;
  };
  for (const auto& [count, length] : {Kind{1, 2000}, Kind{1, 20000}, Kind{40, 900}}) {
    SCOPED_TRACE(count);
    Shape shape;
    shape.lengths.assign(static_cast<std::size_t>(count), length);
    const Twins twins(shape, 8);
    const Twins::Result cpu = twins.on_cpu();
    struct Side {
      cudaStream_t stream = nullptr;
      cudaGraphExec_t graph = nullptr;
    };
    Side sides[2];
    std::vector<AttendPlan> plans;
    for (int i = 0; i < 2; ++i) {
      AttendOptions options;
      options.overlap = i == 1;
      plans.emplace_back(twins.batch, 8, 1, options);
    }
    Guarded q(twins.queries.size() * 2);
    q.write(twins.queries.data());
    Guarded out0(twins.queries.size() * 2);
    Guarded out1(twins.queries.size() * 2);
    Guarded* outs[2] = {&out0, &out1};
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(cudaStreamCreateWithFlags(&sides[i].stream, cudaStreamNonBlocking), cudaSuccess);
      ASSERT_EQ(cudaStreamBeginCapture(sides[i].stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      for (int k = 0; k < 3; ++k)
        plans[static_cast<std::size_t>(i)].run(q.data(), outs[i]->data(), nullptr, sides[i].stream);
      cudaGraph_t graph = nullptr;
      ASSERT_EQ(cudaStreamEndCapture(sides[i].stream, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&sides[i].graph, graph, 0), cudaSuccess);
      cudaGraphDestroy(graph);
    }
    for (int replay = 0; replay < 1000; ++replay) {
      for (const Side& side : sides) ASSERT_EQ(cudaGraphLaunch(side.graph, side.stream), cudaSuccess);
      if (replay % 100 != 99) continue;
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (Guarded* out : outs) {
        const std::vector<std::uint8_t> bytes = out->read();
        std::vector<std::uint16_t> raw(bytes.size() / 2);
        std::memcpy(raw.data(), bytes.data(), bytes.size());
        EXPECT_LE(relative_error(widen(raw, DType::f16), cpu.out), 1e-3) << "replay " << replay;
        out->poison();
      }
    }
    for (const Side& side : sides) {
      cudaGraphExecDestroy(side.graph);
      cudaStreamDestroy(side.stream);
    }
  }
}

}  // namespace
}  // namespace kvant::cuda::test
