// Sealing block pages, the CPU's bytes: three kernels after one another, for every recipe and shape.
#pragma once

#include "cuda/block_seal_keys.cuh"
#include "cuda/block_seal_values.cuh"

namespace kvant::cuda {

// The order of a page's tokens by the norms of their keys: the salient ones first, each class ascending. Tokens that
// are left out come last. `scores`: of each token.
template <bool Bfloat>
__device__ void order_tokens(const BlockSealPage& page, int head, double* scores, std::uint8_t* salient) {
  const int token = static_cast<int>(threadIdx.x);
  const ExactFormat format = page.exact_format();
  if (token < kPage) {  // the sum of squares, channel after channel; products of halves are exact
    double sum = 0;
    const std::uint8_t* from = page.exact(head) + format.key_at(token, 0);
#pragma unroll 2
    for (int tile = 0; tile < format.key_dim / kTile; ++tile, from += kQuadBytes) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 both = ptx::widen2<Bfloat>(*reinterpret_cast<const std::uint32_t*>(from + i % 4 * 16 + i / 4 * 8));
        sum = __dadd_rn(sum, __dmul_rn(both.x, both.x));
        sum = __dadd_rn(sum, __dmul_rn(both.y, both.y));
      }
    }
    scores[token] = sum;
  }
  __syncthreads();
  const int skip = page.job.skip;
  if (token < kPage) {
    int rank = 0;
    for (int other = 0; other < kPage; ++other) {
      const bool left_out = token < skip;
      const bool other_left_out = other < skip;
      const bool higher = !left_out && scores[other] > scores[token];
      const bool equal = left_out || scores[other] == scores[token];
      const bool before = left_out != other_left_out ? left_out : higher || (equal && other < token);
      rank += before ? 1 : 0;
    }
    salient[token] = rank < page.args.salient ? 1 : 0;
  }
  __syncthreads();
  if (token >= kPage) return;
  int place = salient[token] != 0 ? 0 : page.args.salient;
  for (int other = 0; other < token; ++other) place += salient[other] == salient[token] ? 1 : 0;
  page.block(head)[page.args.format.tokens_offset + place] = static_cast<std::uint8_t>(token);
}

// The root of each value channel's largest magnitude; a warp has 16 channels.
template <bool Bfloat>
__device__ void store_factors(const BlockSealPage& page, int head) {
  const BlockTile& tile = page.args.format.value;
  const ExactFormat format = page.exact_format();
  auto* factors = reinterpret_cast<std::uint16_t*>(page.block(head) + tile.factor_offset);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int skip = page.job.skip;
  for (int first = static_cast<int>(threadIdx.x) / 32; first < tile.rows / kTile; first += kBlockSealWarps) {
    const auto* data =
        reinterpret_cast<const uint4*>(page.exact(head) + format.key_bytes() + first * kQuadBytes) + lane;
    float largest[2] = {0, 0};  // of channels g and g + 8
#pragma unroll 4
    for (int tokens = 0; tokens < kPage / kTile; ++tokens) {
      const uint4 words = data[tokens * (format.tile_bytes() / 16)];
      const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int token = tokens * kTile + 2 * (lane % 4) + 8 * (r >> 1);
        const float2 both = ptx::widen2<Bfloat>(all[r]);
        if (token >= skip) largest[r & 1] = fmaxf(largest[r & 1], fabsf(both.x));
        if (token + 1 >= skip) largest[r & 1] = fmaxf(largest[r & 1], fabsf(both.y));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float root = __fsqrt_rn(ptx::xor_max<2>(ptx::xor_max<1>(largest[k])));
      if (lane % 4 == k) {
        factors[first * kTile + g + 8 * k] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(root, 0));
      }
    }
  }
}

// First: zeros everywhere, since what a page leaves unused is part of its bytes; orders of tokens and factors.
// Grid: pages, KV heads.
template <bool Bfloat>
__global__ void __launch_bounds__(kBlockSealThreads) block_seal_prepare(const __grid_constant__ BlockSealBatch batch) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const BlockSealPage page{batch.args, batch.jobs[blockIdx.x], static_cast<int>(blockIdx.x)};
  const BlockFormat& format = batch.args.format;
  const int head = static_cast<int>(blockIdx.y);
  const auto clear = [](std::uint8_t* from, int bytes) {
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += kBlockSealThreads) {
      reinterpret_cast<uint4*>(from)[i] = uint4{0, 0, 0, 0};
    }
  };
  clear(page.block(head), format.head_bytes);
  if (head == 0) clear(page.block(format.kv_heads), format.page_bytes - format.kv_heads * format.head_bytes);
  std::uint32_t* counts = page.list_counts(head);
  if (counts != nullptr && threadIdx.x < kPage / kBlockSealPlaces) counts[threadIdx.x] = 0;
  __syncthreads();
  auto* scores = reinterpret_cast<double*>(shared);
  if (batch.args.salient > 0) order_tokens<Bfloat>(page, head, scores, shared + kPage * sizeof(double));
  if (format.value.factor_offset >= 0) store_factors<Bfloat>(page, head);
}
constexpr int kBlockPrepareBytes = kPage * (sizeof(double) + 1);

// Then: keys, and grids of values. Grid: pages; key tiles of each head, then the parts of each grid of values.
template <bool Bfloat>
__global__ void __launch_bounds__(kBlockSealThreads) block_seal_encode(const __grid_constant__ BlockSealBatch batch) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const BlockSealPage page{batch.args, batch.jobs[blockIdx.x], static_cast<int>(blockIdx.x)};
  const BlockFormat& format = batch.args.format;
  const int tiles = format.rest.rows > 0 ? 2 : 1;
  const int number = static_cast<int>(blockIdx.y);
  if (number < format.kv_heads * tiles) {
    BlockKeySeal<Bfloat>(page, number / tiles, number % tiles != 0, shared).run();
    return;
  }
  const int parts = kPage / batch.args.grid_tokens;
  const int part = number - format.kv_heads * tiles;
  BlockGridSeal<Bfloat>(page, part / parts, part % parts, shared).run();
}

// Last: codes of values. Grid: pages, KV heads, shares of the steps.
template <bool Bfloat>
__global__ void __launch_bounds__(kBlockSealThreads) block_seal_values(const __grid_constant__ BlockSealBatch batch) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const BlockSealPage page{batch.args, batch.jobs[blockIdx.x], static_cast<int>(blockIdx.x)};
  BlockValueSeal<Bfloat>(page, static_cast<int>(blockIdx.y), shared)
      .run(static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z));
}

}  // namespace kvant::cuda
