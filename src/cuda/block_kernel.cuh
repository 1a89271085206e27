// Attention of many query vectors over block pages: flash attention on half-precision tensor cores over tiles that a
// block of threads dequantizes for all of its vectors. Any key dimension.
#pragma once

#include "cuda/block_turn.cuh"

namespace kvant::cuda {

// Queries as A fragments of m16n8k16, in units as keys have them; vectors that are not there become zeros.
template <class C>
__device__ void load_block_queries(const DecodeArgs& args, const Segment& segment, int key_tiles,
                                   std::uint8_t* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < C::vectors / 16 * key_tiles; unit += C::warps) {
    uint2 x[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint16_t* row = query_row(args, segment, unit / key_tiles * 16 + lane / 4 + 8 * e);
      x[e] = {0, 0};
      if (row != nullptr) x[e] = *reinterpret_cast<const uint2*>(row + unit % key_tiles * 16 + 4 * (lane % 4));
    }
    *reinterpret_cast<uint4*>(shared + unit * kQuadBytes + lane * 16) = {x[0].x, x[1].x, x[0].y, x[1].y};
  }
}

// Four unquantized 16-token tiles, straight from global memory, where they are A fragments of m16n8k16.
template <class C>
__device__ void copy_block_exact(const std::uint8_t* tiles, const ExactFormat& exact, std::uint8_t* keys,
                                 std::uint8_t* values) {
  const int key_tiles = exact.key_dim / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < kStageTiles * key_tiles; unit += C::warps) {
    // Channel 4t + 2i is element (4t + 2i) % 8 of its row's half (4t) / 8: lane 4g + 2 (t % 2) + i of that matrix.
    const std::uint8_t* first = tiles + unit / key_tiles * exact.tile_bytes() + unit % key_tiles * kQuadBytes +
                                ((lane & ~3) + lane % 2 * 2) * 16 + lane % 4 / 2 * 8;
    const uint2 a = *reinterpret_cast<const uint2*>(first);
    const uint2 b = *reinterpret_cast<const uint2*>(first + 16);
    *reinterpret_cast<uint4*>(keys + unit * kQuadBytes + lane * 16) = {a.x, a.y, b.x, b.y};
  }
  for (int unit = static_cast<int>(threadIdx.x) / 32; unit < kStageTiles * C::value_tiles; unit += C::warps) {
    const std::uint8_t* from =
        tiles + unit / C::value_tiles * exact.tile_bytes() + exact.key_bytes() + unit % C::value_tiles * kQuadBytes;
    *reinterpret_cast<uint4*>(values + unit * kQuadBytes + lane * 16) =
        *reinterpret_cast<const uint4*>(from + lane * 16);
  }
}

// Hides tokens from rows that must not see them. tokens: those in the places of a page's half; null: in order.
template <class C>
__device__ __forceinline__ void hide_places(const DecodeArgs& args, const Stage& stage, const std::uint8_t* tokens,
                                            const PrefillState<C>& state, Scores<C>& s) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = 8 * n + 2 * t + i;
      const int at = tokens == nullptr ? stage.position + place : (stage.position & -kPage) + tokens[place];
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int last = min(state.last[m][e], stage.end);
          const int first = max(stage.first, args.window > 0 ? state.last[m][e] - args.window : 0);
          if (at < first || at >= last) s[m][n][2 * e + i] = kMinusInfinity;
        }
      }
    }
  }
}

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    block_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ ReferenceArgs layout, int parts,
                 const __grid_constant__ BlockFormat format) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const BlockShared at(format, C::vectors);
  const int key_tiles = format.key.depth / 16;
  const ExactFormat exact{format.key.depth, C::value.dim};
  const int warp = static_cast<int>(threadIdx.x) / 32;

  const VectorBlock block(args, C::vectors, parts);
  const Segment& segment = block.segment;
  const StageList stages(args, layout,
                         {format.head_bytes, exact.page_bytes(), exact.tile_bytes(), format.tokens_offset >= 0}, block);
  const Share share(stages.count(), block.part, parts);

  PrefillState<C> state;
  state.reset();
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) state.last[m][e] = block.row_end(args, vector_of<C>(m, e));
  }
  load_block_queries<C>(args, segment, key_tiles, shared);
  const std::uint8_t* queries = shared + warp * C::m_tiles * key_tiles * kQuadBytes;

  // Weights need a positive factor, which the maximum passes through.
  const float scale = args.scale * kLog2e;
  const bool rescale = args.softcap > 0 || !(scale > 0);
  UnitPage<C> page(format, at, shared, segment.kv_head);
  const std::uint8_t* fetched = nullptr;
  bool rotated = false;  // outputs so far
  Stage next;
  if (share.begin < share.end) next = stages.get(share.begin);
  const auto fetch = [&] {
    if (next.coded && next.data != fetched) page.fetch(next.data, shared + at.raw);
    ptx::async_commit();
  };
  fetch();
  for (int i = share.begin; i < share.end; ++i) {
    const Stage stage = next;
    const int half = stage.position / kStageTokens % 2;
    ptx::async_wait<0>();
    __syncthreads();  // the page is here, and nobody reads the tiles any more
    if (stage.coded) {
      if (stage.data != fetched) {
        fetched = stage.data;
        page.prepare(shared + at.raw);
        if constexpr (C::turned) {
          place_angles<C>(format.turns, stage.position & -kPage, reinterpret_cast<float2*>(shared + at.angles));
        }
        __syncthreads();
      }
      page.unpack(half, shared + at.keys, shared + at.values);
      if (page.has_outliers()) {
        __syncthreads();
        page.add_outliers(shared + at.keys, shared + at.values, half);
      }
      if constexpr (C::turned) {
        __syncthreads();
        const std::uint8_t* tokens = page.tokens() == nullptr ? nullptr : page.tokens() + half * kStageTokens;
        const StageAngles angles{format.turns, reinterpret_cast<const float2*>(shared + at.angles), tokens,
                                 half * kStageTokens};
        KeyTurner<C>(angles, format, shared + at.keys).run();
      }
      rotated = format.value.rotation > 1;
    } else {
      if (rotated) unrotate<C>(state, format.value.rotation);
      rotated = false;
      copy_block_exact<C>(stage.data, exact, shared + at.keys, shared + at.values);
    }
    __syncthreads();
    if (i + 1 < share.end) {
      next = stages.get(i + 1);
      fetch();
    }

    Scores<C> s;
    multiply_key_tiles<C>(queries, key_tiles, UnitTiles{shared + at.keys, key_tiles}, s);
    if (rescale) scale_scores<C>(args, scale, s);
    const std::uint8_t* tokens =
        stage.coded && page.tokens() != nullptr ? page.tokens() + half * kStageTokens : nullptr;
    const int low = tokens != nullptr ? stage.position & -kPage : stage.position;
    const int high = low + (tokens != nullptr ? kPage : kStageTokens);
    if (!block.sees_all(args.window, stage, low, high)) hide_places<C>(args, stage, tokens, state, s);
    soften<C>(state, s, rescale ? 1.0F : scale);
    multiply_value_tiles<C>(UnitTiles{shared + at.values, C::value_tiles}, s, state);
  }
  if (rotated) unrotate<C>(state, format.value.rotation);

  float* partial = parts > 1 ? block.partial(args, C::vectors * (C::value.dim + 2)) : nullptr;
  store_vectors<C>(args, segment, state, partial);
}

}  // namespace kvant::cuda
