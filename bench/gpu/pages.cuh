// Contents of the pages that the benchmark reads.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "cuda/pool.hpp"
#include "cuda/ptx.cuh"
#include "timing.cuh"

namespace kvant::cuda {

static __device__ unsigned mix(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ x >> 16;
}

// Random codes everywhere, then endpoints and channel lists of valid pages.
static __global__ void fill_pages(std::uint8_t* pages, std::size_t words, unsigned seed) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    reinterpret_cast<unsigned*>(pages)[i] = mix(static_cast<unsigned>(i) * 2654435761U + seed);
  }
}
static __global__ void fill_endpoints(std::uint8_t* pages, DeviceFormat f, unsigned seed) {
  std::uint8_t* page = pages + static_cast<std::size_t>(blockIdx.x) * f.head_bytes();
  const int thread = static_cast<int>(threadIdx.x);
  const auto number = [&](int i, float from, float to) {
    const unsigned r = mix(seed + blockIdx.x * 4096U + static_cast<unsigned>(i));
    const float x = from + (to - from) * static_cast<float>(r >> 8) * 0x1p-24F;
    return static_cast<std::uint16_t>(f.bfloat ? ptx::narrow2<true>(x, 0) : ptx::narrow2<false>(x, 0));
  };
  const int shift = static_cast<int>(mix(seed + blockIdx.x) % static_cast<unsigned>(f.key.dim));
  for (int c = thread; c < f.key.dim; c += static_cast<int>(blockDim.x)) {
    // Boosted channels: those that follow `shift`, in a circle.
    const bool boosted = (c + f.key.dim - shift) % f.key.dim < f.boosted;
    auto* ends = reinterpret_cast<std::uint16_t*>(page + key_endpoint_offset(c));
    ends[boosted ? 4 : 0] = number(c, -2, -1);
    ends[boosted ? 0 : 4] = number(c + 512, 1, 2);
  }
  for (int i = thread; i < f.key.high_steps * kStep; i += static_cast<int>(blockDim.x)) {
    const int wrapped =
        max(0, shift + f.boosted - f.key.dim);  // entries at the start of the circle, in ascending order
    const int channel = i < wrapped ? i : shift + i - wrapped;
    page[f.key.index_offset() + i] = static_cast<std::uint8_t>(i < f.boosted ? channel : 0);
  }
  for (int t = thread; t < kPage; t += static_cast<int>(blockDim.x)) {
    auto* ends = reinterpret_cast<std::uint16_t*>(page + f.key.bytes() + value_endpoint_offset(f.value, t));
    ends[0] = number(t + 1024, -2, -1);
    ends[64] = number(t + 2048, 1, 2);
  }
}

// Pages with an order of channels and counts, and blocks, are the CPU's own, a few of them over and over. Channels
// differ as those of models do, by a factor of 2^normal.
constexpr int kSealedKinds = 8;

inline std::vector<std::byte> sealed_images(const PagePool::Impl& pool) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  const CacheShape& shape = pool.shape;
  Recipe recipe = pool.recipe;
  recipe.window = 0;
  recipe.sink = 0;
  const auto channels = static_cast<std::size_t>(shape.kv_heads * shape.key_dim);
  std::vector<float> scale(channels);
  for (float& x : scale) x = std::exp2(normal(random));
  const std::int64_t tokens = std::int64_t{kSealedKinds} * kPage;
  std::vector<float> keys(static_cast<std::size_t>(tokens) * channels);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = normal(random) * scale[i % channels];
  std::vector<float> values(static_cast<std::size_t>(tokens * shape.kv_heads * shape.value_dim));
  for (float& x : values) x = normal(random);
  Cache cache(recipe, shape);
  if (pool.rotation) cache.set_key_rotation(*pool.rotation);
  cache.append(dense_view(keys.data(), DType::f32, tokens, shape.kv_heads, shape.key_dim),
               dense_view(values.data(), DType::f32, tokens, shape.kv_heads, shape.value_dim));
  std::vector<std::byte> images(pool.page_stride() * kSealedKinds);
  const std::size_t head_bytes = pool.format.head_bytes();
  for (int page = 0; page < kSealedKinds; ++page) {
    if (pool.block.present()) {
      const auto block = cache.store().sealed_block(page);
      std::copy(block.begin(), block.end(), images.data() + static_cast<std::size_t>(page) * pool.page_stride());
      continue;
    }
    for (int head = 0; head < shape.kv_heads; ++head) {
      const auto at = static_cast<std::size_t>(page * shape.kv_heads + head) * head_bytes;
      to_device(pool.format, pool.layout, cache.store().sealed_block(page), head,
                std::span(images).subspan(at, head_bytes));
    }
  }
  return images;
}

static __global__ void repeat_pages(uint4* pages, const uint4* kinds, std::size_t per_page) {
  uint4* page = pages + static_cast<std::size_t>(blockIdx.x) * per_page;
  const uint4* from = kinds + blockIdx.x % kSealedKinds * per_page;
  for (std::size_t i = threadIdx.x; i < per_page; i += blockDim.x) page[i] = from[i];
}

inline void fill_pool(const PagePool::Impl& pool, int pages) {
  if (!pool.format.key.sorted() && !pool.block.present()) {
    fill_pages<<<1024, 256>>>(pool.pages.get(), pool.pages.bytes() / 4, 1U);
    fill_endpoints<<<static_cast<unsigned>(pages * pool.shape.kv_heads), 128>>>(pool.pages.get(), pool.format, 5U);
    need(cudaDeviceSynchronize(), "fill");
    return;
  }
  const std::vector<std::byte> images = sealed_images(pool);
  DeviceBuffer<std::byte> kinds(images.size());
  kinds.copy_from(images.data(), images.size());
  repeat_pages<<<static_cast<unsigned>(pages), 256>>>(reinterpret_cast<uint4*>(pool.pages.get()),
                                                      reinterpret_cast<const uint4*>(kinds.get()),
                                                      pool.page_stride() / sizeof(uint4));
  need(cudaDeviceSynchronize(), "fill");
}

}  // namespace kvant::cuda
