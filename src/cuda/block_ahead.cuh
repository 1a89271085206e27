// Attention of many query vectors over block pages on sm_90a: prefill_ahead.cuh's roles, with a warpgroup that unpacks
// block pages.
#pragma once

#include "cuda/block_ahead_turn.cuh"
#include "cuda/prefill_ahead.cuh"

namespace kvant::cuda {

#ifdef KVANT_WGMMA
// What multiply_stages is told of block pages. The format stays where parameters are: registers are dear there.
template <class C>
class BlockPlaces {
 public:
  __device__ explicit BlockPlaces(const BlockFormat& format) : format_(format) {}

  __device__ __forceinline__ int rotation() const { return format_.value.rotation; }
  __device__ __forceinline__ bool is_whole(const VectorBlock& block, int window, const StageRange& stage,
                                           bool coded) const {
    const bool listed = is_listed(coded);
    const int low = listed ? stage.position & -kPage : stage.position;
    return block.sees_all(window, stage, low, low + (listed ? kPage : kStageTokens));
  }
  __device__ __forceinline__ void hide(const DecodeArgs& args, const StageRange& stage, bool coded,
                                       const TileRing<C>& ring, const int (&row_ends)[2],
                                       float (&s)[kStageTiles * 2][4]) const {
    const bool listed = is_listed(coded);
    const int low = listed ? stage.position & -kPage : stage.position;
    const std::uint8_t* tokens = ring.values() + C::value_tile_bytes;
    const auto position = [&](int n, int i) { return low + (listed ? tokens[8 * n + i] : 8 * n + i); };
    hide_positions(args, stage, row_ends, position, s);
  }

 private:
  // A page's tokens may lie in an order of its own, which the tile buffers have lists of.
  __device__ __forceinline__ bool is_listed(bool coded) const { return coded && format_.tokens_offset >= 0; }

  const BlockFormat& format_;
};

template <class C>
__device__ __forceinline__ void unpack_block_stages(const DecodeArgs& args, const BlockFormat& format,
                                                    const StageList& stages, const Share& share, int kv_head,
                                                    std::uint8_t* shared) {
  constexpr int kBarrier = 1;
  constexpr int kPart = 0;
  constexpr int kParts = 1;
  CorePage<C> page(format, C::work(), shared, kv_head);
  TileRing<C> ring(shared);
  const int coded_end = min(share.end, stages.coded());
  const CodedPages pages = stages.pages();
  const bool two_raw = C::raw_slots(format) == 2;
  [[maybe_unused]] auto* const runs = reinterpret_cast<float2*>(shared + C::angles_offset);
  const auto raw = [&](int i) {
    return shared + C::raw_offset + (two_raw ? pages.number(i) % 2 : 0) * block_slot_bytes(format);
  };
  // The entry of the page table that the next page needs comes with the page before it.
  auto* const entries = reinterpret_cast<std::int32_t*>(shared + C::entries_offset);
  const auto next_page = [&](int i) { return i + 2 - pages.half(i); };
  const auto fetch = [&](int at, std::int32_t entry) {
    page.fetch(pages.data(args, entry), raw(at));
    const int next = next_page(at);
    if (next < coded_end && C::unpack_thread() == 0) {
      ptx::async_copy4(ptx::shared_address(entries + pages.number(next) % 2), pages.entry_at(next));
    }
  };
  int i = share.begin;
  if (i < coded_end) fetch(i, pages.entry(i));
#pragma unroll 1
  for (; i < coded_end; ++i, ring.advance()) {
    const int half = pages.half(i);
    const bool fresh = i == share.begin || half == 0;
    const int next = next_page(i);
    const bool ahead = fresh && two_raw && next < coded_end;
    if (fresh) {
      ptx::async_commit();
      ptx::async_wait<0>();
      ptx::meet<kBarrier, C::unpack_threads>();  // the page is here, and nobody reads the one before any more
      page.prepare(raw(i));
      if (i == share.begin || !two_raw) page.fetch_list();
      if (ahead) fetch(next, entries[pages.number(next) % 2]);
      if constexpr (C::turned) place_angles<C>(format.turns, pages.number(i) * kPage, runs);
      ptx::meet<kBarrier, C::unpack_threads>();
    }
    ring.wait_empty();
    page.unpack(half, ring.keys(), ring.values(), ring.values() + C::value_tile_bytes, kPart, kParts);
    if (page.has_outliers()) {
      if (fresh) {  // this page's list, where it was not there before, and what fetch_list() needs of the next one
        ptx::async_commit();
        ptx::async_wait<0>();
      }
      ptx::meet<kBarrier, C::unpack_threads>();
      page.add_outliers(ring.keys(), ring.values(), half * kStageTokens + kStageTokens / kParts * kPart,
                        kStageTokens / kParts);
      if (ahead) page.fetch_list();
    }
    if constexpr (C::turned) {
      ptx::meet<kBarrier, C::unpack_threads>();
      const std::uint8_t* tokens = page.tokens() == nullptr ? nullptr : page.tokens() + half * kStageTokens;
      const StageAngles angles{format.turns, runs, tokens, half * kStageTokens};
      CoreTurner<C>(angles, format, ring.keys(), kPart, kParts).run();
    }
    ring.give_full();
    if (!two_raw && half == 1 && i + 1 < coded_end) {
      ptx::meet<kBarrier, C::unpack_threads>();
      fetch(i + 1, entries[pages.number(i + 1) % 2]);
    }
  }
#pragma unroll 1
  for (; i < share.end; ++i, ring.advance()) {
    ring.wait_empty();
    PageTiles<C, WgmmaEngine<C>>::copy_exact(stages.get(i).data, ring.keys(), ring.values());
    ring.give_full();
  }
}
#endif

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    block_ahead_kernel([[maybe_unused]] const __grid_constant__ DecodeArgs args,
                       [[maybe_unused]] const __grid_constant__ ReferenceArgs layout, [[maybe_unused]] int parts,
                       [[maybe_unused]] const __grid_constant__ BlockFormat format) {
#ifdef KVANT_WGMMA
  extern __shared__ __align__(128) std::uint8_t shared[];
  const VectorBlock block(args, C::vectors, parts);
  const StageList stages(args, layout,
                         {format.head_bytes, C::exact.page_bytes(), C::exact.tile_bytes(), format.tokens_offset >= 0},
                         block);
  const Share share(stages.count(), block.part, parts);
  // Warpgroups without a vector have nothing to do.
  constexpr int group_vectors = C::m_tiles * 64;
  const int vectors = min(C::vectors, args.rows * args.group - block.segment.vector0);
  const int groups = (vectors + group_vectors - 1) / group_vectors;
  WgmmaEngine<C>::load_queries(args, block.segment, shared);
  auto* ends = reinterpret_cast<int*>(shared + C::row_ends_offset);
  if (threadIdx.x < C::vectors) ends[threadIdx.x] = block.row_end(args, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 0) TileRing<C>(shared).init(groups * 4);
  ptx::proxy_fence();
  __syncthreads();

  const int group = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) / 128, 0);  // known to be the same in a warp
  if (group == C::warps / 4) {
    ptx::lower_registers<C::unpack_registers>();
    unpack_block_stages<C>(args, format, stages, share, block.segment.kv_head, shared);
    return;
  }
  ptx::raise_registers<C::multiply_registers>();
  if (group >= groups) return;
  PrefillState<C> state;
  state.reset();
  multiply_stages<C>(args, block, stages, share, BlockPlaces<C>(format), group, shared, state);
  float* partial = parts > 1 ? block.partial(args, C::vectors * (C::value.dim + 2)) : nullptr;
  store_vectors<C>(args, block.segment, state, partial);
#else
  __trap();
#endif
}

}  // namespace kvant::cuda
