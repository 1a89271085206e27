// A warp's private pipeline: one slot for a unit's keys and one for its values, each refilled as soon as it is
// consumed.
#pragma once

#include "cuda/decode_args.hpp"
#include "cuda/decode_config.cuh"
#include "cuda/ptx.cuh"

namespace kvant::cuda {

// Bytes of a key tile in a slot, and of a whole one in memory.
template <class C>
__device__ __forceinline__ int slot_key_bytes(const DecodeArgs& args) {
  if constexpr (C::sorted) {
    return args.key_bytes;
  } else {
    return C::key_bytes;
  }
}
template <class C>
__device__ __forceinline__ int tile_key_bytes(const DecodeArgs& args) {
  if constexpr (C::sorted) {
    return args.key_bytes;
  } else {
    return C::key.bytes();
  }
}
// A warp's slot: keys, then values.
template <class C>
__device__ __forceinline__ std::uint8_t* slot_of(const DecodeArgs& args, std::uint8_t* shared, int warp) {
  return shared + C::slots_offset + warp * (slot_key_bytes<C>(args) + C::value_bytes);
}

// The segments of a block's group: its one in the kernel parameters, or a run of them in memory.
class SegmentList {
 public:
  __device__ SegmentList(const DecodeArgs& args, const InlinePlan& plan, int group)
      : args_(args), plan_(plan), group_(group) {
    if (args.segments == nullptr) return;
    first_ = plan.first[group];
    count_ = plan.first[group + 1] - first_;
  }
  __device__ int count() const { return count_; }
  __device__ Segment get(int i) const {
    return args_.segments == nullptr ? plan_.segments[group_] : args_.segments[first_ + i];
  }

 private:
  const DecodeArgs& args_;
  const InlinePlan& plan_;
  int group_;
  int first_ = 0;
  int count_ = 1;
};

// Walks the coded units of this warp over all segments of its group, in order.
template <class C>
class UnitCursor {
 public:
  __device__ UnitCursor(const DecodeArgs& args, const SegmentList& segments, int worker, int workers)
      : args_(args), segments_(segments), end_(segments.count()), worker_(worker), workers_(workers) {
    if (segment_ < end_) enter();
    settle();
  }

  __device__ bool done() const { return segment_ >= end_; }
  __device__ int half() const { return C::half ? unit_ % 2 : 0; }
  // The page of the unit. Its table entry was asked for one unit earlier.
  __device__ const std::uint8_t* page() const {
    return args_.pages + static_cast<std::int64_t>(page_) * args_.page_stride +
           static_cast<std::int64_t>(head_) * (tile_key_bytes<C>(args_) + C::value.bytes());
  }
  __device__ void advance() {
    unit_ += workers_;
    settle();
  }

 private:
  __device__ void enter() {
    const Segment s = segments_.get(segment_);
    unit_ = s.begin + worker_;
    limit_ = min(s.end, s.coded_end);
    head_ = s.kv_head;
    row_ = args_.table + static_cast<std::int64_t>(s.sequence) * args_.table_stride;
  }
  __device__ void settle() {
    while (segment_ < end_ && unit_ >= limit_) {
      if (++segment_ < end_) enter();
    }
    if (segment_ < end_) page_ = row_[C::half ? unit_ / 2 : unit_];
  }

  const DecodeArgs& args_;
  const SegmentList& segments_;
  const std::int32_t* row_ = nullptr;
  int segment_ = 0;
  int end_, worker_, workers_;
  int unit_ = 0, limit_ = 0, head_ = 0;
  std::int32_t page_ = 0;
};

#if __CUDA_ARCH__ >= 900
template <class C>
class Pipeline {
 public:
  __device__ Pipeline(const DecodeArgs& args, std::uint8_t* shared, int warp)
      : args_(args),
        slot_(ptx::shared_address(slot_of<C>(args, shared, warp))),
        barrier_(ptx::shared_address(shared + C::barrier_offset + warp * 16)) {
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_init(barrier_);
      ptx::barrier_init(barrier_ + 8);
      ptx::barrier_init_fence();
    }
    __syncwarp();
  }

  // Called by all lanes after the slot's last reader; one lane issues the copies.
  __device__ __forceinline__ void fetch_keys(const UnitCursor<C>& at) {
    __syncwarp();
    if (threadIdx.x % 32 != 0 || at.done()) return;
    const std::uint8_t* page = at.page();
    ptx::barrier_expect(barrier_, slot_key_bytes<C>(args_));
    if constexpr (C::half && !C::sorted) {
      constexpr int head = C::key.codes_offset();
      ptx::bulk_copy(slot_, page, head, barrier_);
      ptx::bulk_copy(slot_ + head, page + head + at.half() * C::key.half_codes_bytes(), C::key.half_codes_bytes(),
                     barrier_);
    } else {
      ptx::bulk_copy(slot_, page, slot_key_bytes<C>(args_), barrier_);
    }
  }
  __device__ __forceinline__ void fetch_values(const UnitCursor<C>& at) {
    __syncwarp();
    if (threadIdx.x % 32 != 0 || at.done()) return;
    ptx::barrier_expect(barrier_ + 8, C::value_bytes);
    ptx::bulk_copy(slot_ + slot_key_bytes<C>(args_),
                   at.page() + tile_key_bytes<C>(args_) + at.half() * C::value.half_bytes(), C::value_bytes,
                   barrier_ + 8);
  }
  __device__ __forceinline__ void wait_keys() { ptx::barrier_wait(barrier_, phase_); }
  __device__ __forceinline__ void wait_values() {
    ptx::barrier_wait(barrier_ + 8, phase_);
    phase_ ^= 1;
  }

 private:
  const DecodeArgs& args_;
  std::uint32_t slot_, barrier_;
  std::uint32_t phase_ = 0;
};
#else
// Before sm_90 every lane copies its share with cp.async; groups complete in order, one is always left pending.
template <class C>
class Pipeline {
 public:
  __device__ Pipeline(const DecodeArgs& args, std::uint8_t* shared, int warp)
      : args_(args), slot_(ptx::shared_address(slot_of<C>(args, shared, warp))) {}

  __device__ void fetch_keys(const UnitCursor<C>& at) {
    __syncwarp();
    if (!at.done()) {
      constexpr bool parts = C::half && !C::sorted;
      const int head = parts ? C::key.codes_offset() : slot_key_bytes<C>(args_);
      copy(slot_, at.page(), head);
      if constexpr (parts) {
        copy(slot_ + head, at.page() + head + at.half() * C::key.half_codes_bytes(), C::key.half_codes_bytes());
      }
    }
    ptx::async_commit();
  }
  __device__ void fetch_values(const UnitCursor<C>& at) {
    __syncwarp();
    if (!at.done()) {
      copy(slot_ + slot_key_bytes<C>(args_), at.page() + tile_key_bytes<C>(args_) + at.half() * C::value.half_bytes(),
           C::value_bytes);
    }
    ptx::async_commit();
  }
  __device__ void wait_keys() { wait(); }
  __device__ void wait_values() { wait(); }

 private:
  __device__ static void copy(std::uint32_t to, const std::uint8_t* from, int bytes) {
    for (int i = static_cast<int>(threadIdx.x) % 32 * 16; i < bytes; i += 512) ptx::async_copy16(to + i, from + i);
  }
  __device__ static void wait() {
    ptx::async_wait<1>();
    __syncwarp();
  }

  const DecodeArgs& args_;
  std::uint32_t slot_;
};
#endif

}  // namespace kvant::cuda
