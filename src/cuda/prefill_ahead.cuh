// Prefill attention on sm_90a: one warpgroup unpacks stages into tiles, ahead of the two that multiply them by the
// block's queries. README.md has the reasons.
#pragma once

#include "cuda/prefill.hpp"
#include "cuda/prefill_ring.cuh"
#include "cuda/prefill_sorted.cuh"
#include "cuda/prefill_stages.cuh"
#include "cuda/prefill_tiles.cuh"
#include "cuda/prefill_wgmma.cuh"

namespace kvant::cuda {

#ifdef KVANT_WGMMA
template <class C>
__device__ __forceinline__ void unpack_stages(const DecodeArgs& args, const StageList& stages, const Share& share,
                                              std::uint8_t* shared) {
  using Tiles = PageTiles<C, WgmmaEngine<C>>;
  constexpr int kBarrier = 1;
  std::uint8_t* boost_ranks = shared + C::rank_offset + C::unpack_thread() / 32 * C::key.dim;
  TileRing<C> ring(shared, C::buffers);
  const int coded_end = min(share.end, stages.coded());
  const CodedPages pages = stages.pages();
  const PageTurns<C> turns;
  const bool two_raw = C::two_raw && C::sorted_keys(args.key_bytes) != 1;
  // A half page's slot turns with the stages, that of a page's sorted keys with the pages.
  const auto raw = [&](int i) { return shared + C::raw_offset + (two_raw ? pages.half(i) : 0) * C::raw_bytes; };
  const auto sorted = [&](int i) {
    return shared + C::shared_bytes + (two_raw ? turns.parity(pages.number(i)) : 0) * args.key_bytes;
  };
  const auto is_own = [&](int i) { return turns.is_own(pages.number(i)); };
  // The own stage after one.
  const auto next = [&](int i) { return i + 1 + pages.half(i) * 2 * (turns.ranks() - 1); };
  int i = share.begin;
  const int first = turns.first(pages, i);
  std::int32_t entry = first < coded_end ? pages.entry(first) : 0;
  const auto fetch = [&](int at) {
    Tiles::fetch(args, raw(at), sorted(at), pages.data(args, entry), pages.half(at),
                 at == first || pages.half(at) == 0);
    ptx::async_commit();
    entry = pages.entry(min(next(at), coded_end - 1));  // long before it is needed
  };
  if (first < coded_end) fetch(first);
#pragma unroll 1
  for (; i < coded_end; ++i, ring.advance()) {
    if (!is_own(i)) {
      ring.wait_empty();
      continue;
    }
    ptx::async_wait<0>();
    ptx::meet<kBarrier, C::unpack_threads>();  // the half page is here, and nobody reads the one before any more
    if (two_raw && next(i) < coded_end) fetch(next(i));
    ring.wait_empty();
    Tiles::unpack(args, raw(i), sorted(i), pages.half(i), ring.keys(), ring.values(), boost_ranks);
    ring.give_full_to_all(args, turns);
    if (!two_raw && next(i) < coded_end) {
      ptx::meet<kBarrier, C::unpack_threads>();
      fetch(next(i));
    }
  }
#pragma unroll 1
  for (; i < share.end; ++i, ring.advance()) {
    ring.wait_empty();
    Tiles::copy_exact(stages.get(i).data, ring.keys(), ring.values());
    ring.give_full();
  }
}

// What multiply_stages is told of coded pages: how their values are rotated, and where their tokens are.
template <class C>
struct PagesInOrder {
  static __device__ constexpr int buffers() { return C::buffers; }
  static __device__ constexpr int rotation() { return C::rotation; }
  // Whether every row of the block sees the whole stage.
  static __device__ __forceinline__ bool is_whole(const VectorBlock& block, int window, const StageRange& stage,
                                                  bool /*coded*/) {
    return block.sees_all(window, stage, stage.position, stage.position + kStageTokens);
  }
  static __device__ __forceinline__ void hide(const DecodeArgs& args, const StageRange& stage, bool /*coded*/,
                                              const TileRing<C>& /*ring*/, const int (&row_ends)[2],
                                              float (&s)[kStageTiles * 2][4]) {
    hide_in_tile<C>(args, stage, row_ends, s);
  }
};

// One warpgroup's row tiles over stages. While a row tile's scores become weights, the outputs of the one before are
// under way, if that is another one; both products were started together, the scores first.
template <class C, class Pages>
class StageMultiplier {
  using Engine = WgmmaEngine<C>;

 public:
  __device__ __forceinline__ StageMultiplier(const DecodeArgs& args, const VectorBlock& block, const StageList& stages,
                                             const Pages& pages, int group, std::uint8_t* shared)
      : args_(args),
        block_(block),
        stages_(stages),
        pages_(pages),
        scale_(args.scale * kLog2e),
        rescale_(args.softcap > 0 || !(scale_ > 0)),
        ends_(reinterpret_cast<const int*>(shared + C::row_ends_offset)),
        queries_(Engine::describe_queries(shared, group)),
        ring_(shared, pages.buffers()) {}

  // Stages [i, end).
  __device__ __forceinline__ void run(int i, int end, PrefillState<C>& state) {
    if (i >= end) return;
    constexpr int last = C::m_tiles - 1;
    float s[kStageTiles * 2][4];
    uint4 p[kStageTiles];
    TileRing<C> next = ring_;
    next.wait_full();
    Engine::start_scores(queries_, keys(next), 0, s);
    wgmma::wait<0>();
    weigh(next, i, 0, state, s, state.o[last], p);
#pragma unroll 1
    for (; i < end; ++i) {  // of other forms ptxas serializes the products (C7512)
#pragma unroll
      for (int m = 0; m < last; ++m) {
        Engine::start_scores(queries_, keys(ring_), m + 1, s);
        Engine::start_outputs(p, values(), state.o[m]);
        weigh(ring_, i, m + 1, state, s, state.o[m], p);
      }
      if (i + 1 == end) break;
      next.advance();
      next.wait_full();
      Engine::start_scores(queries_, keys(next), 0, s);
      Engine::start_outputs(p, values(), state.o[last]);
      weigh(next, i + 1, 0, state, s, state.o[last], p);
      ring_.give_empty();
      ring_.advance();
    }
    Engine::start_outputs(p, values(), state.o[last]);
    wgmma::wait<0>();
    wgmma::settle(state.o[last]);
    ring_.give_empty();
    ring_.advance();
  }

 private:
  static __device__ __forceinline__ typename Engine::Keys keys(const TileRing<C>& ring) {
    return typename Engine::Keys(ptx::shared_address(ring.keys()));
  }
  __device__ __forceinline__ typename Engine::Values values() const {
    return typename Engine::Values(ptx::shared_address(ring_.values()));
  }

  // Row tile m's scores of stage i, which `ring` is at, to weights. outputs: of the other product that may be under
  // way.
  __device__ __forceinline__ void weigh(const TileRing<C>& ring, int i, int m, PrefillState<C>& state,
                                        float (&s)[kStageTiles * 2][4], float (&outputs)[C::value_tiles * 2][4],
                                        uint4 (&p)[kStageTiles]) const {
    // Outputs of the same row tile must be there before they may be scaled.
    wgmma::wait<C::m_tiles == 1 ? 0 : 1>();
    if constexpr (C::m_tiles == 1) wgmma::settle(outputs);
    wgmma::settle(s);
    if (rescale_) scale_tile<C>(args_, scale_, s);
    const StageRange stage = stages_.range(i);
    const bool coded = i < stages_.coded();
    if (!pages_.is_whole(block_, args_.window, stage, coded)) {
      const int row_ends[2] = {ends_[vector_of<C>(m, 0)], ends_[vector_of<C>(m, 1)]};
      pages_.hide(args_, stage, coded, ring, row_ends, s);
    }
    // Weights need a positive factor, which the maximum passes through.
    soften_tile<C>(state, m, s, rescale_ ? 1.0F : scale_);
    if constexpr (C::m_tiles > 1) {
      wgmma::wait<0>();
      wgmma::settle(outputs);
    }
#pragma unroll
    for (int j = 0; j < kStageTiles; ++j) p[j] = weight_fragment<C>(s, j);
  }

  const DecodeArgs& args_;
  const VectorBlock& block_;
  const StageList& stages_;
  const Pages& pages_;
  float scale_;
  bool rescale_;
  const int* ends_;
  typename Engine::Queries queries_;
  TileRing<C> ring_;
};

template <class C, class Pages>
__device__ __forceinline__ void multiply_stages(const DecodeArgs& args, const VectorBlock& block,
                                                const StageList& stages, const Share& share, const Pages& pages,
                                                int group, std::uint8_t* shared, PrefillState<C>& state) {
  StageMultiplier<C, Pages> multiplier(args, block, stages, pages, group, shared);
  int turned = share.begin;  // stages before it need their outputs turned back
  if (pages.rotation() > 1) {
    turned = max(share.begin, min(share.end, stages.coded()));
    multiplier.run(share.begin, turned, state);
    if (share.begin < turned) unrotate<C>(state, pages.rotation());
  }
  multiplier.run(turned, share.end, state);
}

// The block's vectors, and what stages its cluster sees.
template <class C>
__device__ __forceinline__ VectorBlock place_block(const DecodeArgs& args, int parts) {
  VectorBlock block(args, C::vectors, parts);
  if (is_in_cluster<C>()) block.cover_cluster(args, C::vectors, ptx::cluster_rank(), ptx::cluster_ranks());
  return block;
}
// What a block does before its warpgroups part. Returns this one's number, the last of which unpacks, or -1 where there
// are no vectors for it.
template <class C>
__device__ __forceinline__ int choose_role(const DecodeArgs& args, const VectorBlock& block, int buffers,
                                           std::uint8_t* shared) {
  constexpr int group_vectors = C::m_tiles * 64;
  // Of the block that begins `ahead` blocks of vectors after this one, if it has any.
  const auto groups_of = [&](int ahead) {
    const int first = block.segment.vector0 + ahead * C::vectors;
    return (max(0, min(C::vectors, args.rows * args.group - first)) + group_vectors - 1) / group_vectors;
  };
  const int groups = groups_of(0);
  int readers = groups * 4;
  if (is_in_cluster<C>()) readers += groups_of(ptx::cluster_rank() == 0 ? -1 : 1) * 4;
  WgmmaEngine<C>::load_queries(args, block.segment, shared);
  // Few stages need to know where rows end: registers are dearer.
  auto* ends = reinterpret_cast<int*>(shared + C::row_ends_offset);
  if (threadIdx.x < C::vectors) ends[threadIdx.x] = block.row_end(args, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 0) TileRing<C>(shared, buffers).init(readers);
  ptx::proxy_fence();
  if (is_in_cluster<C>()) {
    meet_cluster();
  } else {
    __syncthreads();
  }
  const int group = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128, 0);  // known to be the same in a warp
  return group < groups || group == C::warps / 4 ? group : -1;
}

// All that a warpgroup does that multiplies.
template <class C, class Pages>
__device__ __forceinline__ void attend_group(const DecodeArgs& args, const VectorBlock& block, const StageList& stages,
                                             const Share& share, const Pages& pages, int group, std::uint8_t* shared) {
  ptx::raise_registers<C::multiply_registers>();
  if (group < 0) return;
  PrefillState<C> state;
  state.reset();
  multiply_stages<C>(args, block, stages, share, pages, group, shared, state);
  float* partial = block.parts > 1 ? block.partial(args, C::vectors * (C::value.dim + 2)) : nullptr;
  store_vectors<C>(args, block.segment, state, partial);
}
#endif

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    prefill_ahead_kernel([[maybe_unused]] const __grid_constant__ DecodeArgs args,
                         [[maybe_unused]] const __grid_constant__ ReferenceArgs layout, [[maybe_unused]] int parts) {
#ifdef KVANT_WGMMA
  std::uint8_t* const shared = ptx::dynamic_shared();
  const VectorBlock block = place_block<C>(args, parts);
  const StageList stages(args, layout,
                         {args.key_bytes + C::value.bytes(), C::exact.page_bytes(), C::exact.tile_bytes()}, block);
  const Share share(stages.count(), block.part, parts);
  const int group = choose_role<C>(args, block, C::buffers, shared);
  if (group == C::warps / 4) {
    ptx::lower_registers<C::unpack_registers>();
    unpack_stages<C>(args, stages, share, shared);
  } else {
    attend_group<C>(args, block, stages, share, PagesInOrder<C>(), group, shared);
  }
  leave_cluster<C>();
#else
  __trap();
#endif
}

}  // namespace kvant::cuda
