// What a warp of the kernel for few vectors over block pages (block_decode.cuh) has in shared memory.
#pragma once

#include "cuda/block_codes.cuh"
#include "cuda/decode_sorted.cuh"

namespace kvant::cuda {

template <int KeyDim, int ValueDim, bool Bfloat>
struct BlockDecodeConfig {
  static constexpr KeyFormat key{2, KeyDim};  // formats: for their dimensions
  static constexpr ValueFormat value{2, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool sorted = true;  // queries are in shared memory
  static constexpr bool bfloat = Bfloat;
  static constexpr int n_tiles = 1;
  static constexpr int vectors = 4;
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int units_per_page = 1;
  static constexpr int steps = KeyDim / kStep;
  static constexpr int value_tiles = ValueDim / kTile;

  // Shared memory: queries as [channel][vector]; barriers of the copies; a part per warp; when all pages are done,
  // results take the place of the parts. Not that of the barriers: what waits have left in a barrier may still change.
  static constexpr int x_stride = KeyDim / kFour + 4;  // words of a row of bytes; spreads rows over the banks
  static constexpr int s_stride = kPage + 8;           // floats of a row of scores
  static constexpr int barrier_offset = KeyDim * vectors * 4;
  static constexpr int warp_offset = barrier_offset + warps * 16;
  static constexpr int merge_stride = ValueDim + 8;
  static constexpr int merge_offset = warp_offset;
  static constexpr int state_offset = merge_offset + warps * vectors * merge_stride * 4;
  static_assert(merge_offset >= barrier_offset + warps * 16, "results leave the barriers alone");
  static constexpr int merge_end = state_offset + warps * vectors * 8;

  // Inside a warp's part.
  static constexpr int x_offset = vectors * s_stride * 4;  // scores come first
  static constexpr int grid_bytes = kPage * 8;             // of values; takes the place of x
  static constexpr int x_bytes = 2 * vectors * x_stride * 4;
  static constexpr int planes_offset = x_offset + (x_bytes > grid_bytes ? x_bytes : grid_bytes);
  static constexpr int weights_offset = planes_offset + 3 * kBlockPlanes * 16;
  // The head's part of the values' list of outliers, as it lies in the page from the last 16 bytes' boundary on.
  static constexpr int list_slots = 256;
  static constexpr int list_values = weights_offset + kPage / kFour * 8 * 4;
  static constexpr int list_rows = list_values + 2 * list_slots + 32;
  static constexpr int list_depths = list_rows + list_slots + 32;
  static constexpr int raw_offset = list_depths + list_slots + 32;
  static constexpr int extra_stride = ValueDim + 8;  // what outliers add to outputs; takes the place of the raw values

  static constexpr int warp_bytes(int half_bytes) {
    const int extra = vectors * extra_stride * 4;
    return raw_offset + (half_bytes > extra ? half_bytes : extra);
  }
  static constexpr int shared_bytes(int half_bytes) {
    const int all = warp_offset + warps * warp_bytes(half_bytes);
    return all > merge_end ? all : merge_end;
  }
};

// A warp's copies from memory, multiples of 16 bytes: bulk copies of one lane where the GPU has them.
class WarpCopies {
 public:
  __device__ explicit WarpCopies(std::uint8_t* barrier)
      : lane_(static_cast<int>(threadIdx.x) % 32), barrier_(ptx::shared_address(barrier)) {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) {
      ptx::barrier_init(barrier_);
      ptx::barrier_init_fence();
    }
#endif
    __syncwarp();
  }
  // After lanes wrote where copies go next, before a __syncwarp().
  __device__ void settle_writes() const {
#if __CUDA_ARCH__ >= 900
    ptx::proxy_fence();
#endif
  }
  // Of all the bytes that are added until wait().
  __device__ void announce([[maybe_unused]] int bytes) const {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) ptx::barrier_expect(barrier_, static_cast<std::uint32_t>(bytes));
#endif
  }
  __device__ void add(std::uint8_t* to, const std::uint8_t* from, int bytes) const {
    const std::uint32_t address = ptx::shared_address(to);
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0 && bytes > 0) ptx::bulk_copy(address, from, static_cast<std::uint32_t>(bytes), barrier_);
#else
    for (int i = lane_ * 16; i < bytes; i += 512) ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
#endif
  }
  __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier_, parity_);
    parity_ ^= 1U;
#else
    ptx::async_commit();
    ptx::async_wait<0>();
#endif
    __syncwarp();
  }

 private:
  int lane_;
  [[maybe_unused]] std::uint32_t barrier_;
  [[maybe_unused]] std::uint32_t parity_ = 0;
};

// A warp's part: one page's keys or values, and what it makes of them.
template <class C>
class BlockSlot {
 public:
  __device__ BlockSlot(const DecodeArgs& args, const BlockFormat& format, const Segment& segment, std::uint8_t* shared)
      : args_(args),
        f_(format),
        segment_(segment),
        queries_(reinterpret_cast<const float4*>(shared)),
        own_(shared + C::warp_offset + threadIdx.x / 32 * C::warp_bytes(block_half_bytes(format))),
        lane_(static_cast<int>(threadIdx.x) % 32),
        copies_(shared + C::barrier_offset + threadIdx.x / 32 * 16) {
#pragma unroll
    for (int i = 0; i < kBlockPlanes; ++i) {
      if (lane_ != i) continue;
      planes(0)[i] = f_.key.planes[i];
      planes(1)[i] = f_.rest.planes[i];
      planes(2)[i] = f_.value.planes[i];
    }
    __syncwarp();
  }

  // Keys and values of a page take turns in one slot: warps that wait cost less than the slots that more warps need.
  __device__ void fetch_keys(const std::uint8_t* page) {
    if (f_.value.outliers.slots > 0) copies_.settle_writes();
    __syncwarp();
    if (page == nullptr) return;
    copies_.announce(f_.value.plane_offset);
    copies_.add(raw(), page + head_offset(), f_.value.plane_offset);
    if (f_.value.outliers.slots > 0) range_ = block_outlier_range(f_, page, segment_.kv_head);
  }
  __device__ void fetch_values(const std::uint8_t* page) {
    __syncwarp();
    const BlockOutliers& list = f_.value.outliers;
    const int own = f_.head_bytes - f_.value.plane_offset;
    const int grid_bytes = f_.value.shared_grid != 0 ? kPage * 4 : 0;
    BlockRange values_part, rows_part, depths_part;
    if (list.slots > 0) {
      values_part = list_part(list.value_offset, 2);
      rows_part = list_part(list.row_offset, 1);
      depths_part = list_part(list.depth_offset, 1);
    }
    copies_.announce(own + grid_bytes + values_part.count() + rows_part.count() + depths_part.count());
    copies_.add(raw(), page + head_offset() + f_.value.plane_offset, own);
    copies_.add(values() + f_.head_bytes, page + f_.value.min_offset, grid_bytes);
    copies_.add(own_ + C::list_values, page + values_part.begin, values_part.count());
    copies_.add(own_ + C::list_rows, page + rows_part.begin, rows_part.count());
    copies_.add(own_ + C::list_depths, page + depths_part.begin, depths_part.count());
  }
  __device__ void wait() {
    copies_.wait();
  }

 protected:
  __device__ std::uint8_t* raw() const {
    return own_ + C::raw_offset;
  }
  // What offsets of a head's block count from while its values are here.
  __device__ std::uint8_t* values() const {
    return raw() - f_.value.plane_offset;
  }
  __device__ float* scores(int vector) const {
    return reinterpret_cast<float*>(own_) + vector * C::s_stride;
  }
  // Scores of the page; before them, what outliers add to them, in fixed point.
  __device__ int* fixed_scores(int vector) const {
    return reinterpret_cast<int*>(own_) + vector * C::s_stride;
  }
  // What outliers add to outputs, in fixed point.
  __device__ int* extra(int vector) const {
    return reinterpret_cast<int*>(own_ + C::raw_offset) + vector * C::extra_stride;
  }
  // x >= 0.
  static __device__ __forceinline__ float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFU, __float_as_uint(x)));
  }
  // The largest magnitude of `bytes` (a multiple of 16) of elements of the cache's type: as bits without their signs,
  // which order as the magnitudes do.
  __device__ __forceinline__ float largest_magnitude(const std::uint8_t* from, int bytes) const {
    std::uint32_t most = 0;
    for (int i = 16 * lane_; i < bytes; i += 512) {
      const auto x = *reinterpret_cast<const uint4*>(from + i);
      most = __vmaxu2(__vmaxu2(most, x.x & 0x7FFF7FFFU), x.y & 0x7FFF7FFFU);
      most = __vmaxu2(__vmaxu2(most, x.z & 0x7FFF7FFFU), x.w & 0x7FFF7FFFU);
    }
    return ptx::widen2<C::bfloat>(__reduce_max_sync(0xFFFFFFFFU, max(most & 0xFFFFU, most >> 16))).x;
  }
  // x * y in fixed point, for |x * y| up to kFixedRange: shared memory adds integers at once, floats only by trial. Of
  // 256 such numbers the sum is one as well.
  static constexpr float kFixedRange = 4e6F;
  static __device__ __forceinline__ int fixed_product(float x, float y) {
    return __float_as_int(fmaf(x, y, kKeyMagic)) - __float_as_int(kKeyMagic);
  }
  __device__ void clear(int* from, int count) const {
    for (int i = 4 * lane_; i < count; i += 128) *reinterpret_cast<int4*>(from + i) = {0, 0, 0, 0};
  }
  __device__ float2* grid() const {
    return reinterpret_cast<float2*>(own_ + C::x_offset);
  }
  __device__ BlockPlane* planes(int tile) const {
    return reinterpret_cast<BlockPlane*>(own_ + C::planes_offset) + tile * kBlockPlanes;
  }
  __device__ std::int64_t head_offset() const {
    return static_cast<std::int64_t>(segment_.kv_head) * f_.head_bytes;
  }
  static __device__ __forceinline__ float widen(const std::uint8_t* from) {
    return ptx::widen2<C::bfloat>(*reinterpret_cast<const std::uint16_t*>(from)).x;
  }
  // Where in the page this head's first list_slots slots of a list of `bytes` each are, in whole 16 bytes.
  __device__ BlockRange list_part(int offset, int bytes) const {
    const int end = offset + bytes * min(range_.end, range_.begin + C::list_slots);
    return {(offset + bytes * range_.begin) & ~15, (end + 15) & ~15};
  }
  // Slot 0 of such a copy.
  __device__ const std::uint8_t* list(int copied, int offset, int bytes) const {
    return own_ + copied + ((offset + bytes * range_.begin) & 15);
  }

  // The planes of this page, where pages have their own.
  __device__ void place_planes(const BlockTile& tile, int number) {
    if (tile.counts_offset < 0) return;  // only keys' differ
    BlockPlane p[kBlockPlanes];
    block_planes(tile, raw(), p);
#pragma unroll
    for (int i = 0; i < kBlockPlanes; ++i) {
      if (lane_ == i) planes(number)[i] = p[i];
    }
    __syncwarp();
  }
  // 1 / steps of the grid as codes are read.
  __device__ __forceinline__ float rate(const BlockTile& tile, int number, int i) const {
    if (tile.levels > 0) return tile.rate;
    if (tile.codes == BlockCodes::layered) return i < tile.lift_from ? 1.0F / 15 : 1.0F / 12;
    int levels = 0;
#pragma unroll 1
    for (int p = 0; p < kBlockPlanes; ++p) {
      const BlockPlane plane = planes(number)[p];
      levels += plane.covers(i) ? plane.largest() : 0;
    }
    return ptx::reciprocal(static_cast<float>(levels << block_lift(tile, i)));
  }

  const DecodeArgs& args_;
  const BlockFormat& f_;
  const Segment& segment_;
  const float4* queries_;
  std::uint8_t* own_;
  int lane_;
  Lane owner_;
  WarpCopies copies_;
  BlockRange range_;  // this head's slots of the values' list
};

}  // namespace kvant::cuda
