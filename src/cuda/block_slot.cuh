// What a warp of the kernel for few vectors over block pages (block_decode.cuh) has in shared memory.
#pragma once

#include "cuda/block_codes.cuh"
#include "cuda/decode_sorted.cuh"

namespace kvant::cuda {

// Team: warps that share a page. 1: each has its own, and the most warps run. 4: a page is done sooner, for calls with
// few of them; a thread block has as many teams as the launch has threads for. Turned: keys are those before RoPE
// (block_scores_turned.cuh).
template <int KeyDim, int ValueDim, bool Bfloat, int Team = 1, bool Turned = false>
struct BlockDecodeConfig {
  static constexpr KeyFormat key{2, KeyDim};  // formats: for their dimensions
  static constexpr ValueFormat value{2, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool sorted = true;  // queries are in shared memory
  static constexpr bool bfloat = Bfloat;
  static constexpr bool turned = Turned;
  static constexpr int n_tiles = 1;
  static constexpr int vectors = 4;
  static constexpr int team = Team;
  static constexpr int team_threads = Team * 32;
  static constexpr int teams = Team == 1 || ValueDim <= 128 ? 4 : 2;  // of a block, at most
  static constexpr int warps = teams * Team;
  static constexpr int threads = warps * 32;
  static constexpr int units_per_page = 1;
  static constexpr int steps = KeyDim / kStep;
  static constexpr int value_tiles = ValueDim / kTile;

  // Shared memory: queries as [channel][vector], for teams as [vector][channel]; what they are scaled by (teams), a
  // flag; barriers of the copies; a part per team; when all pages are done, results take the place of the parts. Not
  // that of the barriers: what waits have left in a barrier may still change.
  static constexpr int x_stride = KeyDim / kFour + 4;  // words of a row of bytes; spreads rows over the banks
  static constexpr int s_stride = kPage + 8;           // floats of a row of scores
  static constexpr int scale_offset = KeyDim * vectors * 4;
  static constexpr int flag_offset = scale_offset + vectors * 4;
  static constexpr int barrier_offset = scale_offset + 32;
  static constexpr int team_offset = barrier_offset + teams * 16;
  static constexpr int merge_stride = ValueDim + 8;
  static constexpr int merge_offset = team_offset;
  static constexpr int state_offset = merge_offset + warps * vectors * merge_stride * 4;
  static_assert(merge_offset >= barrier_offset + teams * 16, "results leave the barriers alone");
  static constexpr int merge_end = state_offset + warps * vectors * 8;

  // Inside a team's part. Scores come first: of a team in two sets, each of half of the channels. A warp alone reuses
  // memory where a team, which has that of four warps, does without waiting: grids of values in the place of x, what
  // outliers add to outputs in that of the raw values, values in that of keys.
  static constexpr int score_sets = Team == 1 ? 1 : 2;
  static constexpr int score_bytes = vectors * s_stride * 4;
  static constexpr int x_offset = score_sets * score_bytes;
  static constexpr int turned_query_bytes = 32 * 16;  // of 16 pairs of channels
  static constexpr int turned_grid_bytes = 16 * 16;
  static constexpr int x_bytes =  // of one key tile
      Turned ? steps * (turned_query_bytes + turned_grid_bytes) : 2 * vectors * x_stride * 4;
  static constexpr int all_x_bytes = Team == 1 ? x_bytes : 2 * x_bytes;
  static constexpr int grid_bytes = kPage * 8;
  static constexpr int grid_offset = Team == 1 ? x_offset : x_offset + all_x_bytes;
  static constexpr int x_end = Team == 1 ? x_offset + x_bytes : grid_offset;
  static constexpr int planes_offset = x_end > grid_offset + grid_bytes ? x_end : grid_offset + grid_bytes;
  static constexpr int planes_bytes = 3 * kBlockPlanes * 16;  // of one warp
  static constexpr int weights_offset = planes_offset + Team * planes_bytes;
  static constexpr int weights_bytes = Team == 1 ? kPage / kFour * 8 * 4 : 0;
  static constexpr int turns_offset = weights_offset + weights_bytes;
  static constexpr int turns_bytes = Team == 1 ? 0 : 2 * vectors * 8;
  // The head's part of the values' list of outliers, as it lies in the page from the last 16 bytes' boundary on.
  static constexpr int list_slots = 256;
  static constexpr int list_values = turns_offset + turns_bytes;
  static constexpr int list_rows = list_values + 2 * list_slots + 32;
  static constexpr int list_depths = list_rows + list_slots + 32;
  static constexpr int list_end = list_depths + list_slots + 32;
  static constexpr int extra_stride = ValueDim + 8;  // what outliers add to outputs
  static constexpr int extra_bytes = vectors * extra_stride * 4;
  static constexpr int extra_offset = list_end;
  static constexpr int raw_offset = Team == 1 ? list_end : extra_offset + Team * extra_bytes;

  static constexpr int team_bytes(const BlockFormat& format) {
    if (Team > 1) return raw_offset + block_slot_bytes(format);
    const int half_bytes = block_half_bytes(format);
    return raw_offset + (half_bytes > extra_bytes ? half_bytes : extra_bytes);
  }
  static constexpr int shared_bytes(const BlockFormat& format, int block_threads) {
    const int all = team_offset + block_threads / team_threads * team_bytes(format);
    return all > merge_end ? all : merge_end;
  }
};

// A team's copies from memory, multiples of 16 bytes: bulk copies of one lane where the GPU has them. A warp alone has
// one barrier; a team has two, for keys and for values, which are on their way together.
template <int Team>
class BlockCopies {
 public:
  // Teams: before a barrier of the block.
  __device__ explicit BlockCopies(std::uint8_t* barriers)
      : lane_(static_cast<int>(threadIdx.x) % (32 * Team)), barrier_(ptx::shared_address(barriers)) {
#if __CUDA_ARCH__ >= 900
    // A loop, so that warps without lane 0 branch around it: racecheck takes a predicated init for theirs as well.
#pragma unroll 1
    for (unsigned i = 0; lane_ == 0 && i < (Team == 1 ? 1U : 2U); ++i) ptx::barrier_init(barrier_ + 8U * i);
    ptx::barrier_init_fence();
#endif
    if (Team == 1) __syncwarp();
  }
  // After lanes wrote where copies go next, before a __syncwarp().
  __device__ void settle_writes() const {
#if __CUDA_ARCH__ >= 900
    ptx::proxy_fence();
#endif
  }
  // Of all the bytes that are added until close().
  __device__ void announce([[maybe_unused]] int bytes, [[maybe_unused]] int which = 0) const {
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) ptx::barrier_expect(barrier_ + 8U * which, static_cast<std::uint32_t>(bytes));
#endif
  }
  __device__ void add(std::uint8_t* to, const std::uint8_t* from, int bytes, [[maybe_unused]] int which = 0) const {
    const std::uint32_t address = ptx::shared_address(to);
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0 && bytes > 0) {
      ptx::bulk_copy(address, from, static_cast<std::uint32_t>(bytes), barrier_ + 8U * which);
    }
#else
    for (int i = lane_ * 16; i < bytes; i += 512 * Team) {
      ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
    }
#endif
  }
  // Groups of a team's copies complete in order, keys and values in turns: also where there was nothing to copy.
  __device__ void close() const {
#if !(__CUDA_ARCH__ >= 900)
    ptx::async_commit();
#endif
  }
  // Elsewhere than on sm_90 other lanes of the team may still wait.
  __device__ void wait([[maybe_unused]] int which = 0) {
#if __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier_ + 8U * which, parity_ >> which & 1U);
    parity_ ^= 1U << which;
#else
    ptx::async_wait<Team == 1 ? 0 : 1>();
#endif
    __syncwarp();
  }

 private:
  int lane_;
  [[maybe_unused]] std::uint32_t barrier_;
  [[maybe_unused]] std::uint32_t parity_ = 0;
};

// A team's part: one page's keys and values, and what it makes of them.
template <class C>
class BlockSlot {
 public:
  __device__ BlockSlot(const DecodeArgs& args, const BlockFormat& format, const Segment& segment, std::uint8_t* shared)
      : args_(args),
        f_(format),
        segment_(segment),
        queries_(reinterpret_cast<const float4*>(shared)),
        team_(static_cast<int>(threadIdx.x) / C::team_threads),
        rank_(C::team == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % C::team),
        own_(shared + C::team_offset + team_ * C::team_bytes(format)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        copies_(shared + C::barrier_offset + team_ * 16) {
#pragma unroll
    for (int i = 0; i < kBlockPlanes; ++i) {
      if (lane_ != i) continue;
      planes(0)[i] = f_.key.planes[i];
      planes(1)[i] = f_.rest.planes[i];
      planes(2)[i] = f_.value.planes[i];
    }
    __syncwarp();
  }

  // Keys and values of a page take turns in the one slot of a warp alone: warps that wait cost less than the slots that
  // more warps need. Those of a team's page are on their way together. Null: no page.
  __device__ void fetch_keys(const std::uint8_t* page) {
    if (C::team == 1 && f_.value.outliers.slots > 0) copies_.settle_writes();
    __syncwarp();
    if (page != nullptr) {
      copies_.announce(f_.value.plane_offset);
      copies_.add(raw(), page + head_offset(), f_.value.plane_offset);
      if (f_.value.outliers.slots > 0) next_range_ = block_outlier_range(f_, page, segment_.kv_head);
    }
    copies_.close();
  }
  __device__ void fetch_values(const std::uint8_t* page) {
    constexpr int which = C::team == 1 ? 0 : 1;
    __syncwarp();
    range_ = next_range_;
    if (page != nullptr) {
      const BlockOutliers& list = f_.value.outliers;
      const int own = f_.head_bytes - f_.value.plane_offset;
      const int grid_bytes = f_.value.shared_grid != 0 ? kPage * 4 : 0;
      BlockRange values_part, rows_part, depths_part;
      if (list.slots > 0) {
        values_part = list_part(list.value_offset, 2);
        rows_part = list_part(list.row_offset, 1);
        depths_part = list_part(list.depth_offset, 1);
      }
      copies_.announce(own + grid_bytes + values_part.count() + rows_part.count() + depths_part.count(), which);
      copies_.add(values() + f_.value.plane_offset, page + head_offset() + f_.value.plane_offset, own, which);
      copies_.add(values() + f_.head_bytes, page + f_.value.min_offset, grid_bytes, which);
      copies_.add(own_ + C::list_values, page + values_part.begin, values_part.count(), which);
      copies_.add(own_ + C::list_rows, page + rows_part.begin, rows_part.count(), which);
      copies_.add(own_ + C::list_depths, page + depths_part.begin, depths_part.count(), which);
    }
    copies_.close();
  }
  __device__ void wait_keys() {
    wait(0);
  }
  __device__ void wait_values() {
    wait(C::team == 1 ? 0 : 1);
  }
  // The warps of the team.
  __device__ void meet() const {
    if constexpr (C::team == 1) {
      __syncwarp();
    } else {
      ptx::meet_some(1 + team_, C::team_threads);
    }
  }
  // A page's turn of a team without one: racecheck takes what warps did in shared memory for unordered, whatever they
  // wait for later, once some have met more often than others.
  __device__ void sit_out() const {
    for (int i = 0; i < 3; ++i) meet();
  }

 protected:
  __device__ void wait(int which) {
    copies_.wait(which);
#if !(__CUDA_ARCH__ >= 900)
    if (C::team > 1) meet();
#endif
  }
  __device__ std::uint8_t* raw() const {
    return own_ + C::raw_offset;
  }
  // What offsets of a head's block count from while its values are here.
  __device__ std::uint8_t* values() const {
    return C::team == 1 ? raw() - f_.value.plane_offset : raw();
  }
  // Of a query vector and channel: those of all four vectors.
  __device__ float4 query(int channel) const {
    if constexpr (C::team == 1) return queries_[channel];
    const auto* q = reinterpret_cast<const float*>(queries_) + channel;
    return {q[0], q[C::key.dim], q[2 * C::key.dim], q[3 * C::key.dim]};
  }
  __device__ float* scores(int vector, int set = 0) const {
    return reinterpret_cast<float*>(own_ + set * C::score_bytes) + vector * C::s_stride;
  }
  // Where weights take the place of scores.
  __device__ float* weights_of(int vector) const {
    return scores(vector, C::score_sets - 1);
  }
  // Scores of the page; before them, what outliers add to them, in fixed point.
  __device__ int* fixed_scores(int vector) const {
    return reinterpret_cast<int*>(own_) + vector * C::s_stride;
  }
  // What outliers add to this warp's outputs, in fixed point.
  __device__ int* extra(int vector) const {
    const int at = C::team == 1 ? C::raw_offset : C::extra_offset + rank_ * C::extra_bytes;
    return reinterpret_cast<int*>(own_ + at) + vector * C::extra_stride;
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
    return reinterpret_cast<float2*>(own_ + C::grid_offset);
  }
  // Each warp has its own.
  __device__ BlockPlane* planes(int tile) const {
    return reinterpret_cast<BlockPlane*>(own_ + C::planes_offset + rank_ * C::planes_bytes) + tile * kBlockPlanes;
  }
  // x of a key tile: q * width as bytes, rows 2v and 2v + 1 the high and the low ones of vector v.
  __device__ std::uint32_t* bytes_of(int tile) const {
    return reinterpret_cast<std::uint32_t*>(own_ + C::x_offset + (C::team == 1 ? 0 : tile * C::x_bytes));
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
  int team_;  // number in the block
  int rank_;  // of the warp in its team
  std::uint8_t* own_;
  int lane_;
  Lane owner_;
  BlockCopies<C::team> copies_;
  BlockRange range_, next_range_;  // this head's slots of the values' list: of this page, of that of the next keys
};

}  // namespace kvant::cuda
