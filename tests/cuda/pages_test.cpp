// Pages on the device: upload and download, append and seal, sharing; and the same plan run many times.
#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/pool.hpp"
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
  for (const char* recipe : {"kivi:k=2,v=2", "kivi:k=3,v=3", "kivi:k=4,v=4,window=0", "kivi:k=4,v=3,sink=100",
                             "kivi:k=2,v=3,sink=4", "kivi:k=3,v=2", "kivi:k=4,v=2,sink=128,window=16", "kitty",
                             "kitty:boost=0.125", "kitty:v=4,sink=7", "kitty:boost=0.01"}) {
    for (const float spread : {0.0F, 0.3F, 3.0F}) expect_same_seals(recipe, {3, 128, 128, DType::f16}, spread);
  }
}

// Values on a coarse grid lie exactly between codes; channels and tokens without a range have no step; of zeros with
// both signs (0 kinds) an end is the positive one.
TEST(GpuPages, TiesAndConstantRowsAreSealedAlike) {
  KVANT_NEEDS_GPU();
  const CacheShape shape{2, 128, 128, DType::f16};
  for (const char* recipe : {"kivi:k=2,v=2", "kivi:k=3,v=3", "kivi:k=4,v=4", "kitty", "small", "balanced"}) {
    for (const int kinds : {0, 1, 2, 7, 40}) {
      SCOPED_TRACE(std::string(recipe) + " " + std::to_string(kinds));
      const Recipe parsed =
          parse_recipe(std::string(recipe) + (std::strchr(recipe, ':') != nullptr ? ",window=0" : ":window=0"));
      PagePool pool(parsed, shape, 4, 4);
      Batch batch(pool, 1, 512);
      Sequence sequence(pool);
      Sequence* pointer = &sequence;
      batch.bind(std::span(&pointer, 1), nullptr);
      std::mt19937 random(static_cast<unsigned>(kinds));
      std::vector<std::uint16_t> rows(256 * 2 * 128);
      for (std::uint16_t& x : rows) {
        if (kinds == 0) {
          constexpr std::uint16_t kZeros[] = {0x8000, 0, 0x3400, 0x8000};
          x = kZeros[random() % 4];
          continue;
        }
        x = base::float_to_half(static_cast<float>(1 + random() % static_cast<unsigned>(kinds)) * 0.25F);
      }
      Guarded device(rows.size() * 2);
      device.write(rows.data());
      batch.append(device.data(), device.data(), 256, nullptr);
      EXPECT_EQ(batch.seal_ready(nullptr), 2);
      Cache cache(parsed, shape);
      cache.append(dense_view(rows.data(), DType::f16, 256, 2, 128), dense_view(rows.data(), DType::f16, 256, 2, 128));
      expect_same_blocks(sequence, cache);
    }
  }
}

TEST(GpuPages, SealsOfOtherShapesAreTheCpusBytes) {
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

TEST(GpuPages, DecodeLoopFollowsTheCpu) {
  KVANT_NEEDS_GPU();
  decode_beside_the_cpu("kitty:window=16");
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
  device.write(rows_of(0x3C00).data());
  {
    Sequence nan(twins.pool);
    Sequence* only = &nan;
    twins.batch.bind(std::span(&only, 1), nullptr);
    while (twins.pool.free_exact_pages() > 0) twins.batch.append(device.data(), device.data(), 128, nullptr);
    PagePool::Impl& pool = *twins.pool.impl();  // which stores no NaN that it is given
    for (const std::int32_t page : nan.impl().tail) cudaMemset(pool.exact_page(page), 0x7E, pool.exact_stride());
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

// What two sequences of 400 rows become, sealed and attended to.
struct Served {
  std::int64_t invalid;
  std::vector<std::byte> pages[2];   // the first of each
  std::vector<std::uint8_t> out[2];  // a row each, a chunk each
};

Served serve(const char* recipe, const CacheShape& shape, std::span<const std::uint16_t> keys,
             std::span<const std::uint16_t> values, std::span<const std::uint16_t> queries) {
  PagePool pool(parse_recipe(recipe), shape, 8, 10);
  if (pool.needs_rotation()) pool.set_key_rotation(usual_rotation(shape));
  Sequence sequences[] = {Sequence(pool), Sequence(pool)};
  Sequence* pointers[] = {&sequences[0], &sequences[1]};
  Batch batch(pool, 2, 512);
  batch.bind(pointers, nullptr);
  Guarded device_keys(keys.size_bytes());
  Guarded device_values(values.size_bytes());
  Guarded q(queries.size_bytes());
  device_keys.write(keys.data());
  device_values.write(values.data());
  q.write(queries.data());
  batch.append(device_keys.data(), device_values.data(), 400, nullptr);
  EXPECT_GT(batch.seal_ready(nullptr), 0);
  Served served;
  for (const int rows : {1, 20}) {
    Guarded out(static_cast<std::size_t>(2 * rows * 8 * shape.value_dim) * 2);
    AttendPlan(batch, 8, rows, {}).run(q.data(), out.data(), nullptr, nullptr);
    served.out[rows == 1 ? 0 : 1] = out.read();
  }
  served.invalid = pool.invalid_values(nullptr);
  for (int i = 0; i < 2; ++i) served.pages[i] = sequences[i].download_block(0);
  return served;
}

// The device cannot refuse rows. It counts what the CPU would refuse and stores zeros: a page with a NaN in it once led
// kernels out of the pool's memory.
TEST(GpuPages, InvalidValuesAreCountedAndZerosStandInTheirPlace) {
  KVANT_NEEDS_GPU();
  std::vector<CacheShape> shapes{{2, 128, 128, DType::f16}};
  if (KVANT_CUDA_FULL) shapes.push_back({2, 128, 128, DType::bf16});
  for (const CacheShape& shape : shapes) {
    std::mt19937 random(9);
    std::vector<std::uint16_t> keys = random_rows(random, shape.dtype, 800, 2, 128, 0.3F);
    std::vector<std::uint16_t> values = random_rows(random, shape.dtype, 800, 2, 128, 0.0F);
    const auto queries = random_rows(random, shape.dtype, 2 * 20, 8, 128, 0.0F);
    std::vector<std::uint16_t> zeroed_keys = keys, zeroed_values = values;
    const std::uint16_t infinity = shape.dtype == DType::f16 ? 0x7C00 : 0x7F80;
    const auto spoil = [](std::vector<std::uint16_t>& rows, std::vector<std::uint16_t>& zeroed, int row, int channel,
                          int count, unsigned bits) {
      const auto at = (400 + row) * 256 + channel;  // of the second sequence
      std::fill_n(rows.begin() + at, count, static_cast<std::uint16_t>(bits));
      std::fill_n(zeroed.begin() + at, count, std::uint16_t{0});
    };
    spoil(keys, zeroed_keys, 5, 3, 1, infinity);
    spoil(keys, zeroed_keys, 130, 200, 1, infinity | 0x8001U);  // a NaN
    spoil(keys, zeroed_keys, 20, 0, 256, 0x7FFF);
    spoil(values, zeroed_values, 7, 0, 1, infinity | 0x8000U);
    spoil(values, zeroed_values, 399, 255, 1, shape.dtype == DType::f16 ? 0xFFFF : 0xFF00);  // a number, but too large
    spoil(values, zeroed_values, 200, 0, 256, infinity);
    for (const char* recipe :
         {"kivi:k=2,v=2", "kivi:k=4,v=3,sink=10", "kitty", "small", "balanced", "kvquant:k=3,v=3,sink=4",
          "kvquant:k=2,v=2,outliers=0.05,voutliers=0.05", "kvquant:k=3,v=3,rope=before", "zipcache", "kivi:k=8,v=8",
          "kitty:selector=variance", "waterfill:rotate=0", "k=zipcache,v=kvquant:3", "k=zipcache,v=waterfill:3"}) {
      SCOPED_TRACE(std::string(recipe) + (shape.dtype == DType::f16 ? "" : " bf16"));
      const Served zeroed = serve(recipe, shape, zeroed_keys, zeroed_values, queries);
      const Served bad = serve(recipe, shape, keys, values, queries);
      EXPECT_EQ(zeroed.invalid, 0);
      EXPECT_EQ(bad.invalid, 4 + 2 * 256);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(bad.pages[i], zeroed.pages[i]) << "sequence " << i;
        EXPECT_EQ(bad.out[i], zeroed.out[i]) << "call " << i;
      }
    }
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

// A cache may be given positions; sequences on the GPU have their sinks at the start.
TEST(Upload, RefusesSinksElsewhere) {
  const CacheShape shape{2, 128, 128, DType::f16};
  const Recipe recipe = parse_recipe("kivi:k=2,v=2,sink=4,window=0");
  std::mt19937 random(1);
  const auto rows = random_rows(random, shape.dtype, 384, shape.kv_heads, 128, 0.0F);
  const ConstView view = dense_view(rows.data(), shape.dtype, 384, shape.kv_heads, 128);
  for (const std::int64_t first : {0, 1, 128, 384}) {  // token of position 0; 384: none
    std::vector<std::int64_t> positions(384);
    for (std::int64_t i = 0; i < 384; ++i) positions[static_cast<std::size_t>(i)] = (i - first + 1000) % 1000;
    Cache cache(recipe, shape);
    cache.append(view, view, {}, positions);
    const auto check = [&] { check_sinks(cache.store().impl(), recipe.sink); };
    if (first == 0 || first == 384) {
      EXPECT_NO_THROW(check()) << first;
    } else {
      expect_refused(check, "sinks elsewhere", "positions");
    }
  }
}

// Takes every number but a few whose pages lie around 2^31 and 2^32 bytes from the pool's start, and the last ones.
void leave_far_pages(Numbers& numbers, std::size_t stride, int count) {
  for (int i = 0; i < count; ++i) numbers.take();
  for (const std::size_t border : {std::size_t{1} << 31, std::size_t{1} << 32}) {
    const auto at = static_cast<std::int32_t>(border / stride);
    for (std::int32_t i = at - 1; i <= at + 1; ++i) numbers.drop(i);
  }
  for (std::int32_t i = count - 6; i < count; ++i) numbers.drop(i);
}

TEST(GpuPages, OffsetsBeyondFourGigabytes) {
  KVANT_NEEDS_GPU();
  if (device_info().memory_bytes < (std::size_t{24} << 30)) GTEST_SKIP() << "needs 24 GiB of device memory";
  for (const char* recipe : {"kivi:k=2,v=2,window=16", "small:window=16"}) {
    SCOPED_TRACE(recipe);
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = {900, 333};
    const std::size_t stride = page_bytes(parse_recipe(recipe), shape.cache);
    const int pages = static_cast<int>((std::size_t{9} << 29) / stride);  // 4.5 GiB
    const int exact_pages = 5 << 13;                                      // 5 GiB
    PagePool pool(parse_recipe(recipe), shape.cache, pages, exact_pages);
    PagePool::Impl& impl = *pool.impl();
    ASSERT_GT(impl.exact.bytes(), std::size_t{1} << 32);
    leave_far_pages(impl.page_numbers, impl.page_stride(), pages);
    leave_far_pages(impl.exact_numbers, impl.exact_stride(), exact_pages);
    Twins twins(shape, 3, pool);
    std::mt19937 random(4);
    append_to_both(twins.batch, twins.caches, random, 130, 0.2F);
    EXPECT_GT(twins.batch.seal_ready(nullptr), 0);
    for (std::size_t b = 0; b < 2; ++b) {
      expect_same_blocks(twins.sequences[b], twins.caches[b]);
      for (const std::int32_t page : twins.sequences[b].impl().pages) {
        EXPECT_GE(static_cast<std::size_t>(page + 2) * impl.page_stride(), std::size_t{1} << 31);
      }
    }
    const Twins::Result cpu = twins.on_cpu();
    for (const AttendPath path : {AttendPath::integer, AttendPath::reference, AttendPath::prefill}) {
      if (path == AttendPath::prefill && impl.format.rotation > 1) continue;
      EXPECT_LE(relative_error(twins.on_gpu(path).out, cpu.out), 1e-3);
    }
  }
}

// Replays of a graph equal the first one bit by bit, and two streams do not disturb each other.
TEST(GpuReplay, ThousandReplaysAndTwoStreams) {
  KVANT_NEEDS_GPU();
  struct Kind {
    const char* recipe;
    std::vector<std::int64_t> lengths;
  };
  for (const auto& [recipe, lengths] :
       {Kind{"kivi:k=2,v=2", {2000}}, Kind{"kivi:k=2,v=2", {20000}}, Kind{"kitty", {9000, 300, 4000, 0, 70}},
        Kind{"small", std::vector<std::int64_t>(40, 900)}}) {
    SCOPED_TRACE(recipe);
    Shape shape;
    shape.recipe = recipe;
    shape.lengths = lengths;
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
      options.overlap = options.pages_settled = i == 1;
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
    std::mt19937 random(6);
    std::vector<std::uint8_t> first[2];
    for (int replay = 0; replay < 1000; ++replay) {
      const unsigned order = random() % 2;
      for (unsigned i = 0; i < 2; ++i) {
        const Side& side = sides[i ^ order];
        ASSERT_EQ(cudaGraphLaunch(side.graph, side.stream), cudaSuccess);
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (int i = 0; i < 2; ++i) {
        const std::vector<std::uint8_t> bytes = outs[i]->read();
        if (replay == 0) {
          std::vector<std::uint16_t> raw(bytes.size() / 2);
          std::memcpy(raw.data(), bytes.data(), bytes.size());
          EXPECT_LE(relative_error(widen(raw, DType::f16), cpu.out), 1e-3);
          first[i] = bytes;
        }
        ASSERT_EQ(bytes, first[i]) << "replay " << replay;
        outs[i]->poison();
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    for (const Side& side : sides) {
      cudaGraphExecDestroy(side.graph);
      cudaStreamDestroy(side.stream);
    }
  }
}

}  // namespace
}  // namespace kvant::cuda::test
