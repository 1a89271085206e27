// Prefill attention with mma.sync: flash attention on half-precision tensor cores over tiles that the block dequantizes
// for all of its query vectors. README.md has the reasons; prefill_ahead.cuh is the kernel of sm_90a.
#pragma once

#include <type_traits>

#include "cuda/prefill.hpp"
#include "cuda/prefill_mma.cuh"
#include "cuda/prefill_sorted.cuh"
#include "cuda/prefill_stages.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kvant::cuda {

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    prefill_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ ReferenceArgs layout, int parts) {
  using Engine = std::conditional_t<C::cells, MmaCellEngine<C>, MmaEngine<C>>;
  using Pages = PageTiles<C, Engine>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint8_t* keys = shared + C::keys_offset;
  std::uint8_t* values = shared + C::values_offset;
  std::uint8_t* raw = shared + C::raw_offset;
  std::uint8_t* sorted = shared + C::shared_bytes;

  const VectorBlock block(args, C::vectors, parts);
  const Segment& segment = block.segment;
  const StageList stages(args, layout,
                         {args.key_bytes + C::value.bytes(), C::exact.page_bytes(), C::exact.tile_bytes()}, block);
  const Share share(stages.count(), block.part, parts);

  PrefillState<C> state;
  state.reset();
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) state.last[m][e] = block.row_end(args, vector_of<C>(m, e));
  }
  Engine::load_queries(args, segment, shared);

  // Weights need a positive factor, which the maximum passes through.
  const float scale = args.scale * kLog2e;
  const bool rescale = args.softcap > 0 || !(scale > 0);
  Stage next;
  if (share.begin < share.end) next = stages.get(share.begin);
  const auto fetch = [&](bool first) {
    const int half = next.position / kStageTokens % 2;
    if (next.coded) Pages::fetch(args, raw, sorted, next.data, half, first || half == 0);
    ptx::async_commit();
  };
  fetch(true);
  // Coded stages, then exact ones: two turns of one loop, for in a branch inside of it the transform costs registers
  // that the matrix instructions need.
  int i = share.begin;
#pragma unroll 1
  for (int end = C::rotation > 1 ? min(share.end, stages.coded()) : share.end;; end = share.end) {
    for (; i < end; ++i) {
      const Stage stage = next;
      ptx::async_wait<0>();
      __syncthreads();  // the page is here, and nobody reads the tiles any more
      if (stage.coded) {
        Pages::unpack(args, raw, sorted, stage.position / kStageTokens % 2, keys, values,
                      shared + C::rank_offset + warp * C::key.dim);
      } else {
        Pages::copy_exact(stage.data, keys, values);
      }
      __syncthreads();
      if (i + 1 < share.end) {
        next = stages.get(i + 1);
        fetch(false);
      }

      Scores<C> s;
      Engine::multiply_keys(shared, s);
      if (rescale) scale_scores<C>(args, scale, s);
      const bool whole = block.sees_all(args.window, stage, stage.position, stage.position + kStageTokens);
#pragma unroll
      for (int m = 0; m < C::m_tiles && !whole; ++m) hide_in_tile<C>(args, stage, state.last[m], s[m]);
      soften<C>(state, s, rescale ? 1.0F : scale);
      Engine::multiply_values(shared, s, state);
    }
    if (C::rotation > 1 && share.begin < i && i <= stages.coded()) unrotate<C>(state, C::rotation);
    if (i >= share.end) break;
  }

  float* partial = parts > 1 ? block.partial(args, C::vectors * (C::value.dim + 2)) : nullptr;
  store_vectors<C>(args, segment, state, partial);
}

}  // namespace kvant::cuda
