// The buffers of tiles on sm_90a: how they go from the warpgroup that unpacks to those that multiply and back, in a
// block or in a cluster of two whose blocks unpack for each other. README.md has the reasons.
#pragma once

#include "cuda/prefill_stages.cuh"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"

namespace kvant::cuda {

#ifdef KVANT_WGMMA
// The blocks of a cluster (C::ranks at most, one or two) unpack pages in turns, each for all of them.
template <class C>
class PageTurns {
 public:
  __device__ PageTurns()
      : rank_(C::ranks == 1 ? 0 : ptx::cluster_rank()), ranks_(C::ranks == 1 ? 1 : ptx::cluster_ranks()) {
    static_assert(C::ranks <= 2);
  }
  __device__ int rank() const { return rank_; }
  __device__ int ranks() const { return ranks_; }
  __device__ bool is_own(int page) const { return (page & (ranks_ - 1)) == rank_; }
  // The first own stage from stage i on.
  __device__ int first(const HalfPages& pages, int i) const {
    return is_own(pages.number(i)) ? i : i + 2 - pages.half(i);
  }
  // The block's own pages are 0 and 1 by turns.
  __device__ int parity(int page) const { return page >> (ranks_ - 1) & 1; }
  // Whether the other block has query vectors. One without, which fills up the last cluster (the first block of it),
  // only unpacks: nobody there waits for tiles, and a copy would come over those it is unpacking.
  __device__ bool other_reads(const DecodeArgs& args) const {
    return rank_ == 0 || static_cast<int>(gridDim.x - blockIdx.x) * C::vectors < args.rows * args.group;
  }

 private:
  int rank_, ranks_;
};

// Takes turns over the tile buffers: which of them is next, and by two barriers each whether it is full and empty. In a
// cluster one block fills the buffer of all, once all are empty.
template <class C>
class TileRing {
 public:
  __device__ TileRing(std::uint8_t* shared, int buffers)
      : tiles_(shared + C::keys_offset),
        barriers_(ptx::shared_address(shared + C::barrier_offset)),
        buffers_(buffers) {}

  // One thread, before anyone uses a ring. readers: warps of the cluster that will read every stage.
  __device__ void init(int readers) const {
    for (int i = 0; i < buffers_; ++i) {
      ptx::barrier_init(barriers_ + 16 * i, C::unpack_warps);
      ptx::barrier_init(barriers_ + 16 * i + 8, readers);
    }
    ptx::barrier_init_fence();
  }

  __device__ std::uint8_t* keys() const { return tiles_ + at_ * C::tile_bytes; }
  __device__ std::uint8_t* values() const { return keys() + C::key_tile_bytes; }
  __device__ __forceinline__ void wait_full() const { ptx::barrier_wait(full(), phase_); }
  // The first round finds every buffer empty: a barrier says so of the phase before its first.
  __device__ __forceinline__ void wait_empty() const { ptx::barrier_wait(full() + 8, phase_ ^ 1U); }
  // This warp is done with its part of the buffer.
  __device__ __forceinline__ void give_full() const {
    ptx::proxy_fence();  // the tensor cores read shared memory past the order of ordinary stores
    give(full());
  }
  // The same, to the whole cluster. Each warp copies its share of the tiles to the other block.
  __device__ __forceinline__ void give_full_to_all(const DecodeArgs& args, const PageTurns<C>& turns) const {
    static_assert(C::tile_bytes % (16 * C::unpack_warps) == 0);
    constexpr std::uint32_t bytes = C::tile_bytes / C::unpack_warps;
    if (turns.ranks() > 1 && turns.other_reads(args)) {
      ptx::proxy_fence();
      ptx::meet<1, C::unpack_threads>();
      const std::uint32_t from = ptx::shared_address(keys()) + C::unpack_thread() / 32 * bytes;
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if (lane < turns.ranks() && lane != turns.rank()) {
        const std::uint32_t barrier = ptx::map_shared(full(), lane);
        ptx::mapped_expect(barrier, bytes);
        ptx::mapped_copy(ptx::map_shared(from, lane), from, bytes, barrier);
      }
    }
    give_full();
  }
  __device__ __forceinline__ void give_empty() const {
    if constexpr (C::ranks == 1) {
      give(full() + 8);
    } else {  // no branch: ptxas would serialize the products (C7512)
      __syncwarp();
      const int lane = static_cast<int>(threadIdx.x) % 32;
      if (lane < ptx::cluster_ranks()) ptx::mapped_arrive(ptx::map_shared(full() + 8, lane));
    }
  }
  __device__ __forceinline__ void advance() {
    at_ = at_ + 1 == buffers_ ? 0 : at_ + 1;
    if (at_ == 0) phase_ ^= 1U;
  }

 private:
  __device__ __forceinline__ std::uint32_t full() const { return barriers_ + 16 * static_cast<std::uint32_t>(at_); }
  static __device__ __forceinline__ void give(std::uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
  }

  std::uint8_t* tiles_;
  std::uint32_t barriers_;
  int buffers_;
  int at_ = 0;
  std::uint32_t phase_ = 0;
};

// All threads of all blocks of a cluster.
__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  ptx::cluster_arrive();
  ptx::cluster_wait();
}
template <class C>
__device__ __forceinline__ bool is_in_cluster() {
  return C::ranks > 1 && ptx::cluster_ranks() > 1;
}
// Until all do, others may write to this block's memory.
template <class C>
__device__ __forceinline__ void leave_cluster() {
  if (is_in_cluster<C>()) meet_cluster();
}
#endif

}  // namespace kvant::cuda
