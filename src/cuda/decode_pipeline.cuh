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
// Where in shared memory a warp's slots for keys and values are, and the tiles in them.
template <class C>
class Slots {
 public:
  __device__ Slots(const DecodeArgs& args, std::uint8_t* shared, int warp) : shared_(shared) {
    const int key_bytes = C::sorted ? shifted_bytes(args.key_bytes) : 0;
    keys_ = key_tile_ = C::slots_offset + warp * (key_bytes + C::fixed_slot_bytes);
    values_ = value_tile_ = keys_ + key_bytes + C::fixed_slot_bytes - C::value_slot_bytes;
  }
  // For a tile that comes from there.
  __device__ __forceinline__ void place_keys(const std::uint8_t* from) { key_tile_ = keys_ + shift(from); }
  __device__ __forceinline__ void place_values(const std::uint8_t* from) { value_tile_ = values_ + shift(from); }
  __device__ __forceinline__ std::uint8_t* keys() const { return shared_ + key_tile_; }
  __device__ __forceinline__ std::uint8_t* values() const { return shared_ + value_tile_; }

 private:
  __device__ static __forceinline__ int shift(const std::uint8_t* from) {
    return C::shifted ? static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % kLine) : 0;
  }

  std::uint8_t* shared_;
  int keys_, values_;
  int key_tile_, value_tile_;
};

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
  // The tiles of the unit: the keys' of the whole page, the values' of the unit alone. The page's table entry was asked
  // for one unit earlier.
  __device__ const std::uint8_t* keys() const {
    return args_.pages + static_cast<std::int64_t>(page_) * args_.page_stride +
           static_cast<std::int64_t>(head_) * (tile_key_bytes<C>(args_) + C::value.bytes());
  }
  __device__ const std::uint8_t* values() const {
    return keys() + tile_key_bytes<C>(args_) + half() * C::value.half_bytes();
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
      : args_(args), slots_(args, shared, warp), barrier_(ptx::shared_address(shared + C::barrier_offset + warp * 16)) {
    if (threadIdx.x % 32 == 0) {
      ptx::barrier_init(barrier_);
      ptx::barrier_init(barrier_ + 8);
      ptx::barrier_init_fence();
    }
    __syncwarp();
  }
  __device__ __forceinline__ const std::uint8_t* keys() const { return slots_.keys(); }
  __device__ __forceinline__ const std::uint8_t* values() const { return slots_.values(); }

  // Called by all lanes after the slot's last reader; one lane issues the copies.
  __device__ __forceinline__ void fetch_keys(const UnitCursor<C>& at) {
    __syncwarp();
    if (at.done()) return;
    const std::uint8_t* from = at.keys();
    slots_.place_keys(from);
    if (threadIdx.x % 32 != 0) return;
    const std::uint32_t to = ptx::shared_address(slots_.keys());
    ptx::barrier_expect(barrier_, slot_key_bytes<C>(args_));
    if constexpr (C::half && !C::sorted) {
      constexpr int head = C::key.codes_offset();
      ptx::bulk_copy(to, from, head, barrier_);
      ptx::bulk_copy(to + head, from + head + at.half() * C::key.half_codes_bytes(), C::key.half_codes_bytes(),
                     barrier_);
    } else {
      ptx::bulk_copy(to, from, slot_key_bytes<C>(args_), barrier_);
    }
  }
  __device__ __forceinline__ void fetch_values(const UnitCursor<C>& at) {
    __syncwarp();
    if (at.done()) return;
    const std::uint8_t* from = at.values();
    slots_.place_values(from);
    if (threadIdx.x % 32 != 0) return;
    ptx::barrier_expect(barrier_ + 8, C::value_bytes);
    ptx::bulk_copy(ptx::shared_address(slots_.values()), from, C::value_bytes, barrier_ + 8);
  }
  __device__ __forceinline__ void wait_keys() { ptx::barrier_wait(barrier_, phase_); }
  __device__ __forceinline__ void wait_values() {
    ptx::barrier_wait(barrier_ + 8, phase_);
    phase_ ^= 1;
  }

 private:
  const DecodeArgs& args_;
  Slots<C> slots_;
  std::uint32_t barrier_;
  std::uint32_t phase_ = 0;
};
#else
// Before sm_90 every lane copies its share with cp.async; groups complete in order, one is always left pending.
template <class C>
class Pipeline {
 public:
  __device__ Pipeline(const DecodeArgs& args, std::uint8_t* shared, int warp)
      : args_(args), slots_(args, shared, warp) {}
  __device__ const std::uint8_t* keys() const { return slots_.keys(); }
  __device__ const std::uint8_t* values() const { return slots_.values(); }

  __device__ void fetch_keys(const UnitCursor<C>& at) {
    __syncwarp();
    if (!at.done()) {
      constexpr bool parts = C::half && !C::sorted;
      const int head = parts ? C::key.codes_offset() : slot_key_bytes<C>(args_);
      const std::uint8_t* from = at.keys();
      slots_.place_keys(from);
      const std::uint32_t to = ptx::shared_address(slots_.keys());
      copy(to, from, head);
      if constexpr (parts) {
        copy(to + head, from + head + at.half() * C::key.half_codes_bytes(), C::key.half_codes_bytes());
      }
    }
    ptx::async_commit();
  }
  __device__ void fetch_values(const UnitCursor<C>& at) {
    __syncwarp();
    if (!at.done()) {
      slots_.place_values(at.values());
      copy(ptx::shared_address(slots_.values()), at.values(), C::value_bytes);
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
  Slots<C> slots_;
};
#endif

}  // namespace kvant::cuda
