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

  __device__ __forceinline__ int buffers() const { return C::buffers(format_); }
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

// The warpgroup that unpacks: a page's bytes, its entry in the page table and the list of its outliers are on their way
// while the page before it becomes tiles, where there is room for two. Blocks of a cluster unpack pages in turns, each
// for all of them.
template <class C>
class BlockUnpacker {
 public:
  __device__ BlockUnpacker(const DecodeArgs& args, const BlockFormat& format, const StageList& stages,
                           const Share& share, int kv_head, std::uint8_t* shared)
      : args_(args),
        format_(format),
        stages_(stages),
        share_(share),
        shared_(shared),
        page_(format, C::work(), shared, kv_head),
        ring_(shared, C::buffers(format)),
        halves_(stages.pages()),
        coded_end_(min(share.end, stages.coded())),
        two_raw_(C::raw_slots(format) == 2) {
    if (C::unpack_thread() == 0) {
      ptx::barrier_init(page_barrier());
      ptx::barrier_init_fence();
    }
    meet();
  }

  __device__ __forceinline__ void run() {
    int i = share_.begin;
    const int first = turns().first(halves_, i);
    if (first < coded_end_) fetch(first, stages_.pages().entry(first));
#pragma unroll 1
    for (; i < coded_end_; ++i, ring_.advance()) {
      const bool own = is_own(i);
      const bool fresh = own && (halves_.half(i) == 0 || page_.is_first());
      if (fresh) begin_page(i);
      ring_.wait_empty();
      if (!own) continue;
      page_.unpack(halves_.half(i), ring_.keys(), ring_.values(), ring_.values() + C::value_tile_bytes);
      if (page_.has_outliers()) add_outliers(i, fresh);
      if constexpr (C::turned) turn_keys(halves_.half(i));
      ring_.give_full_to_all(args_, turns());
      if (!two_raw_ && halves_.half(i) == 1 && has_next(i)) {
        meet();
        fetch_next(i);
      }
    }
#pragma unroll 1
    for (; i < share_.end; ++i, ring_.advance()) {
      ring_.wait_empty();
      PageTiles<C, WgmmaEngine<C>>::copy_exact(stages_.get(i).data, ring_.keys(), ring_.values());
      ring_.give_full();
    }
  }

 private:
  static __device__ __forceinline__ void meet() {
    ptx::meet<1, C::unpack_threads>();
  }
  static __device__ __forceinline__ void wait_for_copies() {
    ptx::async_commit();
    ptx::async_wait<0>();
  }

  // Made where it is needed, as most of what follows: the compiler would spill what it keeps.
  static __device__ __forceinline__ PageTurns<C> turns() {
    return PageTurns<C>();
  }
  __device__ __forceinline__ bool is_own(int i) const {
    return turns().is_own(halves_.number(i));
  }
  // The first stage of this block's page after that of stage i.
  __device__ __forceinline__ int next_page(int i) const {
    return i + 2 * turns().ranks() - halves_.half(i);
  }
  __device__ __forceinline__ bool has_next(int i) const {
    return next_page(i) < coded_end_;
  }
  // Of two pages by turns.
  __device__ __forceinline__ int turn_of(int i) const {
    return turns().parity(halves_.number(i));
  }
  __device__ __forceinline__ std::int32_t* entry_of(int i) const {
    return reinterpret_cast<std::int32_t*>(shared_ + C::entries_offset) + turn_of(i);
  }
  __device__ __forceinline__ std::uint8_t* raw_of(int i) const {
    return shared_ + C::raw_offset(format_) + (two_raw_ ? turn_of(i) : 0) * block_slot_bytes(format_);
  }
  __device__ __forceinline__ float2* runs() const {
    return reinterpret_cast<float2*>(shared_ + C::angles_offset);
  }

  __device__ __forceinline__ std::uint32_t page_barrier() const {
    return ptx::shared_address(shared_ + C::page_barrier_offset);
  }

  // The page of stage i, and the entry of the page table that the page after it needs.
  __device__ __forceinline__ void fetch(int i, std::int32_t entry) {
    const CodedPages pages = stages_.pages();
    page_.fetch(pages.data(args_, entry), raw_of(i), page_barrier());
    if (has_next(i) && C::unpack_thread() == 0) {
      ptx::async_copy4(ptx::shared_address(entry_of(next_page(i))), pages.entry_at(next_page(i)));
    }
  }
  __device__ __forceinline__ void fetch_next(int i) {
    fetch(next_page(i), *entry_of(next_page(i)));
  }

  __device__ __forceinline__ void begin_page(int i) {
    wait_for_copies();
    ptx::barrier_wait(page_barrier(), parity_);
    parity_ ^= 1U;
    meet();  // the page is here, and nobody reads the one before any more
    const bool first = page_.is_first();
    page_.prepare(raw_of(i));
    if (first || !two_raw_) page_.fetch_list();
    if (two_raw_ && has_next(i)) fetch_next(i);
    if constexpr (C::turned) place_angles<C>(format_.turns, halves_.number(i) * kPage, runs());
    meet();
  }

  // fresh: this is the page's first stage here. Its list may have to come yet, and so may what fetch_list() needs of
  // the next one.
  __device__ __forceinline__ void add_outliers(int i, bool fresh) {
    if (fresh) wait_for_copies();
    meet();
    page_.add_outliers(ring_.keys(), ring_.values(), halves_.half(i));
    if (fresh && two_raw_ && has_next(i)) page_.fetch_list();
  }

  __device__ __forceinline__ void turn_keys(int half) {
    meet();
    const std::uint8_t* tokens = page_.tokens() == nullptr ? nullptr : page_.tokens() + half * kStageTokens;
    const StageAngles angles{format_.turns, runs(), tokens, half * kStageTokens};
    CoreTurner<C>(angles, format_, ring_.keys()).run();
  }

  const DecodeArgs& args_;
  const BlockFormat& format_;
  const StageList& stages_;
  const Share& share_;
  std::uint8_t* shared_;
  CorePage<C> page_;
  TileRing<C> ring_;
  HalfPages halves_;
  int coded_end_;
  bool two_raw_;
  std::uint32_t parity_ = 0;  // of the next page's copies
};
#endif

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks)
    block_ahead_kernel([[maybe_unused]] const __grid_constant__ DecodeArgs args,
                       [[maybe_unused]] const __grid_constant__ ReferenceArgs layout, [[maybe_unused]] int parts,
                       [[maybe_unused]] const __grid_constant__ BlockFormat format) {
#ifdef KVANT_WGMMA
  std::uint8_t* const shared = ptx::dynamic_shared();
  const VectorBlock block = place_block<C>(args, parts);
  const StageList stages(args, layout,
                         {format.head_bytes, C::exact.page_bytes(), C::exact.tile_bytes(), format.tokens_offset >= 0},
                         block);
  const Share share(stages.count(), block.part, parts);
  const int group = choose_role<C>(args, block, C::buffers(format), shared);
  if (group == C::warps / 4) {
    ptx::lower_registers<C::unpack_registers>();
    BlockUnpacker<C>(args, format, stages, share, block.segment.kv_head, shared).run();
  } else {
    attend_group<C>(args, block, stages, share, BlockPlaces<C>(format), group, shared);
  }
  leave_cluster<C>();
#else
  __trap();
#endif
}

}  // namespace kvant::cuda
