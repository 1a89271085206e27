// A page of blocks (block_format.hpp) as a kernel for many vectors has it in shared memory: what its tiles are made
// with but not how these lie, which block_tiles.cuh and block_ahead_tiles.cuh know.
#pragma once

#include "cuda/block_codes.cuh"
#include "cuda/prefill_state.cuh"

namespace kvant::cuda {

// low + step of the grid * width for the four bytes of a word, in binary32.
class BlockDequantizer {
 public:
  // grid: {low, width} of the four depth indices, low as place_grid() writes it.
  __device__ __forceinline__ BlockDequantizer(const float2* grid, bool wide)
      : magic_(wide ? ptx::hidden_constant<0x47000000U>() : ptx::hidden_constant<0x43000000U>()),
        selector_(wide ? 0x7404U : 0x7044U),
        turn_(wide ? 0x10U : 0x100U) {
    const auto* pairs = reinterpret_cast<const float4*>(grid);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 pair = pairs[i];
      low_[2 * i] = pair.x;
      width_[2 * i] = pair.y;
      low_[2 * i + 1] = pair.z;
      width_[2 * i + 1] = pair.w;
    }
  }
  // {low, width} with the number that a byte becomes at step 0 taken off.
  __device__ static __forceinline__ float2 place_grid(float low, float width, bool wide) {
    return {fmaf(wide ? -32768.0F : -128.0F, width, low), width};
  }

  __device__ __forceinline__ void expand(std::uint32_t steps, float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = one(steps, i, i);
  }
  // Bytes 0 and 2, or 1 and 3, of both words.
  __device__ __forceinline__ void expand_paired(std::uint32_t first, std::uint32_t second, int odd,
                                                float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = one(i < 2 ? first : second, i % 2 * 2 + odd, i);
  }

 private:
  __device__ __forceinline__ float one(std::uint32_t steps, int byte, int i) const {
    // The byte as the highest bits of the mantissa of 2^7, or (all 8 bits of it) below those of 2^15.
    const std::uint32_t number = __byte_perm(steps, magic_, selector_ + static_cast<unsigned>(byte) * turn_);
    return fmaf(__uint_as_float(number), width_[i], low_[i]);
  }

  std::uint32_t magic_, selector_, turn_;
  float low_[4], width_[4];
};

// A slot of the values' list: value, channel and place in one word.
__device__ __forceinline__ std::uint32_t load_outlier(const BlockOutliers& list, const std::uint8_t* page, int slot) {
  return *reinterpret_cast<const std::uint16_t*>(page + list.value_offset + 2 * slot) |
         static_cast<std::uint32_t>(page[list.row_offset + slot]) << 16 |
         static_cast<std::uint32_t>(page[list.depth_offset + slot]) << 24;
}
template <class Use>
__device__ __forceinline__ void use_outlier(std::uint32_t slot, const Use& use) {
  use(static_cast<std::uint16_t>(slot & 0xFFFFU), static_cast<int>(slot >> 16 & 0xFFU), static_cast<int>(slot >> 24));
}

// The head's part of the values' list in registers: a thread has some of it from prepare() on, for its way from memory
// is long.
template <class C>
class HeldSlots {
 public:
  __device__ explicit HeldSlots(std::uint8_t* /*shared*/) {}

  __device__ void fetch(const BlockFormat& format, const std::uint8_t* page, int head) {
    next_page_ = page;
    next_range_ = block_outlier_range(format, page, head);
  }
  __device__ void prepare(const BlockFormat& format) {
    page_ = next_page_;
    range_ = next_range_;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int slot = range_.begin + C::unpack_thread() + i * C::unpack_threads;
      if (slot < range_.end) held_[i] = load_outlier(format.value.outliers, page_, slot);
    }
  }
  // use(value, channel, place)
  template <class Use>
  __device__ __forceinline__ void for_each(const BlockFormat& format, const Use& use) const {
    const int first = range_.begin + C::unpack_thread();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * C::unpack_threads < range_.end) use_outlier(held_[i], use);
    }
    for (int slot = first + kHeld * C::unpack_threads; slot < range_.end; slot += C::unpack_threads) {
      use_outlier(load_outlier(format.value.outliers, page_, slot), use);
    }
  }

 private:
  static constexpr int kHeld = 2;

  const std::uint8_t* page_ = nullptr;
  const std::uint8_t* next_page_ = nullptr;
  BlockRange range_, next_range_;
  std::uint32_t held_[kHeld] = {};
};

// The page whose halves become tiles. Every thread that unpacks calls everything, in this order: fetch; once the copies
// are here and these threads have met: prepare; meet; for each half what unpacks it, meet, add_outliers. A page may be
// fetched to where another one lies once they have met after that.
//
// Elements: key(tile, place, channel) and value(tile, place, channel) are where an element of a tile of 64 places is.
// Slots: the head's outliers among the values, whose list lies outside of its block (HeldSlots).
template <class C, class Elements, class Slots>
class BlockPage {
 public:
  __device__ BlockPage(const BlockFormat& format, const BlockWork& at, std::uint8_t* shared, int head)
      : f_(format),
        head_(head),
        tokens_(shared + at.tokens),
        planes_(reinterpret_cast<BlockPlane*>(shared + at.planes)),
        grids_(reinterpret_cast<float2*>(shared + at.grids)),
        slots_(shared) {}

  // The token in each place; null where they are in order.
  __device__ const std::uint8_t* tokens() const { return f_.tokens_offset < 0 ? nullptr : tokens_; }

  // block: the head's in global memory. raw: where it goes.
  __device__ void fetch(const std::uint8_t* block, std::uint8_t* raw) {
    const std::uint8_t* page = page_of(block);
    copy(raw, block, f_.head_bytes);
    if (f_.value.shared_grid != 0) copy(raw + f_.head_bytes, page + f_.value.min_offset, kPage * 4);
    if (f_.value.outliers.slots > 0) slots_.fetch(f_, page, head_);
  }

  // Before the first page is prepared.
  __device__ bool is_first() const { return raw_ == nullptr; }
  // The page that was fetched last.
  __device__ void prepare(const std::uint8_t* raw) {
    const bool first = is_first();
    raw_ = raw;
    if (f_.value.outliers.slots > 0) slots_.prepare(f_);
    if (f_.tokens_offset >= 0) tokens_[C::unpack_thread()] = raw_[f_.tokens_offset + C::unpack_thread()];
    prepare_tile(f_.key, 0, 0, first);
    if (f_.rest.rows > 0) prepare_tile(f_.rest, 1, kRestGrid, first);
    prepare_tile(f_.value, 2, kValueGrid, first);
  }

  __device__ bool has_outliers() const { return f_.key.outliers.slots > 0 || f_.value.outliers.slots > 0; }
  // Those of the half, which is in the tiles.
  __device__ void add_outliers(std::uint8_t* keys, std::uint8_t* values, int half) {
    const BlockOutliers& list = f_.key.outliers;
    for (int slot = C::unpack_thread(); slot < list.slots; slot += C::unpack_threads) {
      const int channel = block_slot_channel(list, slot);
      const int place = raw_[list.row_offset + slot];
      const std::uint16_t raw = load16(raw_ + list.value_offset + 2 * slot);
      const float x = widen(raw);
      // Slots that a channel does not need hold its maximum.
      const bool below = x < widen(load16(raw_ + f_.key.min_offset + 2 * channel));
      const bool above = x > widen(load16(raw_ + f_.key.max_offset + 2 * channel));
      if ((below | above) & (place / kStageTokens == half)) *elements_.key(keys, place % kStageTokens, channel) = raw;
    }
    if (f_.value.outliers.slots == 0) return;
    slots_.for_each(f_, [&](std::uint16_t x, int channel, int place) {
      if (place / kStageTokens == half) *elements_.value(values, place % kStageTokens, channel) = x;
    });
  }

 protected:
  // The page whose head's block it is.
  __device__ const std::uint8_t* page_of(const std::uint8_t* block) const {
    return block - static_cast<std::int64_t>(head_) * f_.head_bytes;
  }

  static constexpr int kRestGrid = 256;
  static constexpr int kValueGrid = 512;

  static __device__ __forceinline__ std::uint16_t load16(const std::uint8_t* from) {
    return *reinterpret_cast<const std::uint16_t*>(from);
  }
  static __device__ __forceinline__ float widen(std::uint16_t x) { return ptx::widen2<C::bfloat>(x).x; }

  const BlockFormat& f_;
  int head_;
  std::uint8_t* tokens_;
  BlockPlane* planes_;
  float2* grids_;
  const std::uint8_t* raw_ = nullptr;
  Elements elements_{f_};
  Slots slots_;

 private:
  static __device__ void copy(std::uint8_t* to, const std::uint8_t* from, int bytes) {
    const std::uint32_t address = ptx::shared_address(to);
#pragma unroll 1
    for (int i = C::unpack_thread() * 16; i < bytes; i += C::unpack_threads * 16) {
      ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
    }
  }

  // first: of the pages here. Most tiles have the same planes in all of them.
  __device__ __forceinline__ void prepare_tile(const BlockTile& tile, int number, int grid, bool first) {
    const int thread = C::unpack_thread();
    if (tile.counts_offset >= 0) {
      BlockPlane planes[kBlockPlanes];
      block_planes(tile, raw_, planes);
#pragma unroll
      for (int p = 0; p < kBlockPlanes; ++p) {
        if (thread == p) planes_[number * kBlockPlanes + p] = planes[p];
      }
      place_grids(tile, grid, [&](int i) { return 1.0F / static_cast<float>(block_levels(tile, planes, i)); });
      return;
    }
    if (first && thread < kBlockPlanes) planes_[number * kBlockPlanes + thread] = tile.planes[thread];
    place_grids(tile, grid, [&](int i) { return i < tile.rate_change ? tile.rates[0] : tile.rates[1]; });
  }
  // rate(i): 1 / steps of depth index i's grid.
  template <class Rate>
  __device__ __forceinline__ void place_grids(const BlockTile& tile, int grid, const Rate& rate) {
    // What offsets of the grid count from.
    const std::uint8_t* ends = tile.shared_grid != 0 ? raw_ + f_.head_bytes - tile.min_offset : raw_;
#pragma unroll 1
    for (int i = C::unpack_thread(); i < tile.depth; i += C::unpack_threads) {
      const int at = 2 * block_grid_index(f_, tile, raw_, i);
      const float low = widen(load16(ends + tile.min_offset + at));
      const float range = widen(load16(ends + tile.max_offset + at)) - low;
      grids_[grid + i] = BlockDequantizer::place_grid(low, range * rate(i), tile.wide != 0);
    }
  }
};

}  // namespace kvant::cuda
