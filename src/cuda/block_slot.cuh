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

  // Shared memory: queries as [channel][vector]; a part per warp; when all pages are done, results take its place.
  static constexpr int x_stride = KeyDim / kFour + 4;  // words of a row of bytes; spreads rows over the banks
  static constexpr int s_stride = kPage + 8;           // floats of a row of scores
  static constexpr int warp_offset = KeyDim * vectors * 4;
  static constexpr int merge_stride = ValueDim + 8;
  static constexpr int merge_offset = warp_offset;
  static constexpr int state_offset = merge_offset + warps * vectors * merge_stride * 4;
  static constexpr int merge_end = state_offset + warps * vectors * 8;

  // Inside a warp's part.
  static constexpr int x_offset = vectors * s_stride * 4;  // scores come first
  static constexpr int grid_bytes = kPage * 8;             // of values; takes the place of x
  static constexpr int x_bytes = 2 * vectors * x_stride * 4;
  static constexpr int planes_offset = x_offset + (x_bytes > grid_bytes ? x_bytes : grid_bytes);
  static constexpr int sums_offset = planes_offset + 3 * kBlockPlanes * 16;
  static constexpr int sums_stride = ValueDim + 8;
  static constexpr int weights_offset = sums_offset + vectors * sums_stride * 4;
  static constexpr int list_slots = 256;  // of outliers; takes the place of the weights
  static constexpr int extra_stride = (ValueDim > kPage ? ValueDim : kPage) + 8;
  static constexpr int extra_offset = weights_offset + list_slots * 4;
  static constexpr int raw_offset = extra_offset + vectors * extra_stride * 4;
  static constexpr int fixed_bytes = raw_offset;

  static constexpr int warp_bytes(int page_bytes) { return fixed_bytes + page_bytes; }
  static constexpr int shared_bytes(int page_bytes) {
    const int all = warp_offset + warps * warp_bytes(page_bytes);
    return all > merge_end ? all : merge_end;
  }
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
        lane_(static_cast<int>(threadIdx.x) % 32) {
    for (int i = lane_; i < C::vectors * C::sums_stride; i += 32) sums(0)[i] = 0;
    for (int i = lane_; i < C::vectors * C::extra_stride; i += 32) extra(0)[i] = 0;
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
    __syncwarp();
    if (page == nullptr) return;
    copy(raw(), page + head_offset(), f_.value.plane_offset);
    if (f_.value.outliers.slots > 0) range_ = block_outlier_range(f_, page, segment_.kv_head);
    ptx::async_commit();
  }
  __device__ void fetch_values(const std::uint8_t* page) {
    __syncwarp();
    copy(raw(), page + head_offset() + f_.value.plane_offset, f_.head_bytes - f_.value.plane_offset);
    if (f_.value.shared_grid != 0) copy(values() + f_.head_bytes, page + f_.value.min_offset, kPage * 4);
    ptx::async_commit();
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
  // Outputs so far, relative to the running maximum of the vector. Not in registers: then a loop over channels is one.
  __device__ float* sums(int vector) const {
    return reinterpret_cast<float*>(own_ + C::sums_offset) + vector * C::sums_stride;
  }
  __device__ std::uint32_t* list() const {
    return reinterpret_cast<std::uint32_t*>(own_ + C::weights_offset);
  }
  // What outliers add, in fixed point: shared memory adds integers at once, floats only by trial. Zeros between uses.
  __device__ int* extra(int vector) const {
    return reinterpret_cast<int*>(own_ + C::extra_offset) + vector * C::extra_stride;
  }
  static __device__ __forceinline__ float warp_max(float x) {
    return ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(x)))));
  }
  // Fixed-point units per 1, so that `count` numbers up to `largest` cannot overflow.
  static __device__ __forceinline__ float units(int count, float largest) {
    return fminf(1073741824.0F / (static_cast<float>(count) * largest), 1e30F);
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
  __device__ void copy(std::uint8_t* to, const std::uint8_t* from, int bytes) const {
    const std::uint32_t address = ptx::shared_address(to);
    for (int i = lane_ * 16; i < bytes; i += 512) ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
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
  BlockRange range_;  // this head's slots of the values' list
};

}  // namespace kvant::cuda
