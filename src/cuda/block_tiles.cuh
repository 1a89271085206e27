// From block pages (block_format.hpp) to tiles of 64 places in shared memory, in half precision: any planes, tables of
// levels, orders of channels and tokens, outliers, factors.
//
// Tiles lie in the units of MmaEngine (prefill_mma.cuh). A warp makes four row tiles by two units at a time
// (block_codes.cuh).
#pragma once

#include "cuda/block_codes.cuh"
#include "cuda/prefill_state.cuh"

namespace kvant::cuda {

// ValueDim is compiled in because outputs live in registers, and whether keys are turned (block_turn.cuh) because that
// branch, never taken, cost other recipes 2 %; everything else about pages comes with the launch.
template <int ValueDim, bool Bfloat, bool Turned = false>
struct BlockConfig {
  static constexpr ValueFormat value{2, ValueDim};  // for its dimension
  static constexpr bool bfloat = Bfloat;
  static constexpr bool turned = Turned;
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int m_tiles = ValueDim <= 128 ? 2 : 1;
  static constexpr int vectors = warps * m_tiles * 16;
  static constexpr int blocks = 2;  // of a multiprocessor
  static constexpr int value_tiles = ValueDim / 16;
  static_assert(threads == kPage);
};

// low + step of the grid * width for the four bytes of a word, in binary32.
class BlockDequantizer {
 public:
  // grid: {low, width} of the four depth indices, low as place_grid() writes it.
  __device__ __forceinline__ BlockDequantizer(const float2* grid, bool wide)
      : magic_(wide ? 0x47000000U : 0x43000000U), selector_(wide ? 0x7404U : 0x7044U), turn_(wide ? 0x10U : 0x100U) {
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
    for (int i = 0; i < 4; ++i) {
      // The byte as the highest bits of the mantissa of 2^7, or (all 8 bits of it) below those of 2^15.
      const std::uint32_t number = __byte_perm(steps, magic_, selector_ + static_cast<unsigned>(i) * turn_);
      x[i] = fmaf(__uint_as_float(number), width_[i], low_[i]);
    }
  }

 private:
  std::uint32_t magic_, selector_, turn_;
  float low_[4], width_[4];
};

// Bytes from the start of a unit of 16 rows by 16 depth indices to one element.
__device__ __forceinline__ int unit_at(int row, int depth) {
  return (row % 8 * 4 + depth % 8 / 2) * 16 + depth / 8 * 8 + row / 8 * 4 + depth % 2 * 2;
}
// The same for keys, whose four channels 4t to 4t + 3 lane 4g + t has.
__device__ __forceinline__ int key_unit_at(int row, int channel) {
  return (row % 8 * 4 + channel / 4) * 16 + channel % 4 / 2 * 8 + row / 8 * 4 + channel % 2 * 2;
}

// The page whose halves are unpacked. Every thread of the block calls everything, in this order: fetch; once the copies
// are here and the block has met: prepare; meet; for each half: unpack; meet; add_outliers. The next page may be
// fetched once the block has met after that.
template <class C>
class BlockPage {
 public:
  __device__ BlockPage(const BlockFormat& format, const BlockShared& at, std::uint8_t* shared, int head)
      : f_(format),
        head_(head),
        keys_(shared + at.keys),
        values_(shared + at.values),
        raw_(shared + at.raw),
        tokens_(shared + at.tokens),
        planes_(reinterpret_cast<BlockPlane*>(shared + at.planes)),
        grids_(reinterpret_cast<float2*>(shared + at.grids)) {}

  // The token in each place; null where they are in order.
  __device__ const std::uint8_t* tokens() const { return f_.tokens_offset < 0 ? nullptr : tokens_; }

  // block: the head's in global memory.
  __device__ void fetch(const std::uint8_t* block) {
    page_ = block - static_cast<std::int64_t>(head_) * f_.head_bytes;
    copy(raw_, block, f_.head_bytes);
    if (f_.value.shared_grid != 0) copy(raw_ + f_.head_bytes, page_ + f_.value.min_offset, kPage * 4);
    if (f_.value.outliers.slots > 0) range_ = block_outlier_range(f_, page_, head_);
  }

  __device__ void prepare() {
    const int thread = static_cast<int>(threadIdx.x);
    if (f_.value.outliers.slots > 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int slot = range_.begin + thread + i * C::threads;
        if (slot < range_.end) held_[i] = load_slot(slot);
      }
    }
    if (f_.tokens_offset >= 0) tokens_[thread] = raw_[f_.tokens_offset + thread];
    prepare_tile(f_.key, 0, 0);
    if (f_.rest.rows > 0) prepare_tile(f_.rest, 1, kRestGrid);
    prepare_tile(f_.value, 2, kValueGrid);
  }

  __device__ void unpack(int half) {
    unpack_keys(f_.key, 0, 0, half);
    if (f_.rest.rows > 0) unpack_keys(f_.rest, 1, kRestGrid, half);
    unpack_values(half);
  }

  __device__ bool has_outliers() const {
    return f_.key.outliers.slots > 0 || f_.value.outliers.slots > 0;
  }
  __device__ void add_outliers(int half) {
    const BlockOutliers& list = f_.key.outliers;
    for (int slot = static_cast<int>(threadIdx.x); slot < list.slots; slot += C::threads) {
      const int channel = slot / list.per_vector;
      const int token = raw_[list.row_offset + slot];
      const std::uint16_t raw = load16(raw_ + list.value_offset + 2 * slot);
      const float x = widen(raw);
      // Slots that a channel does not need hold its maximum.
      const bool used = x < widen(load16(raw_ + f_.key.min_offset + 2 * channel)) ||
                        x > widen(load16(raw_ + f_.key.max_offset + 2 * channel));
      if (used && token / kStageTokens == half) store_key(token % kStageTokens, channel, raw);
    }
    if (f_.value.outliers.slots == 0) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (range_.begin + static_cast<int>(threadIdx.x) + i * C::threads < range_.end) store_slot(held_[i], half);
    }
    for (int slot = range_.begin + static_cast<int>(threadIdx.x) + kHeld * C::threads; slot < range_.end;
         slot += C::threads) {
      store_slot(load_slot(slot), half);
    }
  }

 private:
  static constexpr int kRestGrid = 256;
  static constexpr int kValueGrid = 512;
  static constexpr int kHeld = 2;  // slots that a thread keeps from prepare() on: their way from memory is long

  static __device__ void copy(std::uint8_t* to, const std::uint8_t* from, int bytes) {
    const std::uint32_t address = ptx::shared_address(to);
    for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += C::threads * 16) {
      ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
    }
  }
  static __device__ __forceinline__ std::uint16_t load16(const std::uint8_t* from) {
    return *reinterpret_cast<const std::uint16_t*>(from);
  }
  static __device__ __forceinline__ float widen(std::uint16_t x) {
    return ptx::widen2<C::bfloat>(x).x;
  }

  __device__ void prepare_tile(const BlockTile& tile, int number, int grid) {
    BlockPlane planes[kBlockPlanes];
    block_planes(tile, raw_, planes);
#pragma unroll
    for (int p = 0; p < kBlockPlanes; ++p) {
      if (static_cast<int>(threadIdx.x) == p) planes_[number * kBlockPlanes + p] = planes[p];
    }
    // What offsets of the grid count from.
    const std::uint8_t* ends = tile.shared_grid != 0 ? raw_ + f_.head_bytes - tile.min_offset : raw_;
    for (int i = static_cast<int>(threadIdx.x); i < tile.depth; i += C::threads) {
      const int at = 2 * block_grid_index(f_, tile, raw_, i);
      const float low = widen(load16(ends + tile.min_offset + at));
      const float high = widen(load16(ends + tile.max_offset + at));
      const float width = (high - low) / static_cast<float>(block_levels(tile, planes, i) << block_lift(tile, i));
      grids_[grid + i] = BlockDequantizer::place_grid(low, width, tile.wide != 0);
    }
  }

  __device__ void unpack_keys(const BlockTile& tile, int number, int grid, int half) {
    const int begin = max(0, half * kStageTokens - tile.first);
    const int end = min(tile.rows, (half + 1) * kStageTokens - tile.first);
    if (begin >= end) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    for (int chunk = begin / kStageTokens; chunk <= (end - 1) / kStageTokens; ++chunk) {
      for (int pair = static_cast<int>(threadIdx.x) / 32; pair < tile.depth / kStep; pair += C::warps) {
        StepCodes codes;
        with_codes(tile, chunk, [&](const auto kind) {
          load_step<decltype(kind)::value, 0>(tile, planes_ + number * kBlockPlanes, raw_, chunk, g,
                                              8 * pair + lane % 4, codes);
        });
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int four = 8 * pair + 4 * h + lane % 4;
          const BlockDequantizer dequantizer(grids_ + grid + 4 * four, tile.wide != 0);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = (4 * chunk + j) * kTile;
            const int place = tile.first + row - half * kStageTokens;
            if (row >= tile.rows || place <= -kTile || place >= kStageTokens) continue;
            float x[2][4];
#pragma unroll
            for (int e = 0; e < 2; ++e) dequantizer.expand(codes[j][2 * h + e], x[e]);
            store_keys(tile, row, place, four, x);
          }
        }
      }
    }
  }

  // Rows row + g and row + g + 8 of a key tile, place and on of the half.
  __device__ __forceinline__ void store_keys(const BlockTile& tile, int row, int place, int four,
                                             const float (&x)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint4 packed{ptx::narrow2<C::bfloat>(x[0][0], x[0][1]), ptx::narrow2<C::bfloat>(x[1][0], x[1][1]),
                       ptx::narrow2<C::bfloat>(x[0][2], x[0][3]), ptx::narrow2<C::bfloat>(x[1][2], x[1][3])};
    if (tile.first % kTile == 0 && tile.order_offset < 0 && row + kTile <= tile.rows) {
      std::uint8_t* unit = keys_ + (place / kTile * (tile.depth / kTile) + four / 4) * kQuadBytes;
      *reinterpret_cast<uint4*>(unit + lane * 16) = packed;
      return;
    }
    scatter_keys(tile.rows - row, place, four, packed);
  }

  // Where channels have an order, or rows are not aligned with tiles. rows: that the tile has left.
  __device__ __forceinline__ void scatter_keys(int rows, int place, int four, const uint4& packed) {
    const std::uint32_t pairs[2][2] = {{packed.x, packed.z}, {packed.y, packed.w}};
    const int order = f_.key.order_offset;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int inside = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * e;
      const int at = place + inside;
      if (inside >= rows || at < 0 || at >= kStageTokens) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = order < 0 ? 4 * four + i : raw_[order + 4 * four + i];
        store_key(at, channel, static_cast<std::uint16_t>(pairs[e][i / 2] >> (16 * (i % 2)) & 0xFFFFU));
      }
    }
  }

  __device__ void unpack_values(int half) {
    constexpr int chunks = (C::value_tiles + 3) / 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int job = static_cast<int>(threadIdx.x) / 32; job < 2 * chunks; job += C::warps) {
      const int chunk = job / 2;
      const int four = (half * 2 + job % 2) * 8 + lane % 4;
      StepCodes codes;
      with_codes(f_.value, chunk, [&](const auto kind) {
        load_step<decltype(kind)::value, C::value_tiles>(f_.value, planes_ + 2 * kBlockPlanes, raw_, chunk, lane / 4,
                                                         four, codes);
      });
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const BlockDequantizer dequantizer(grids_ + kValueGrid + 4 * (four + 4 * h), f_.value.wide != 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (4 * chunk + j >= C::value_tiles) break;
          float x[2][4];
#pragma unroll
          for (int e = 0; e < 2; ++e) dequantizer.expand(codes[j][2 * h + e], x[e]);
          store_values(job % 2 * 2 + h, 4 * chunk + j, x);
        }
      }
    }
  }

  __device__ __forceinline__ void store_values(int token_tile, int channel_tile, float (&x)[2][4]) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    if (f_.value.factor_offset >= 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = widen(load16(raw_ + f_.value.factor_offset + 2 * (channel_tile * kTile + g + 8 * e)));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[e][i] *= factor;
      }
    }
    // Tokens 4t to 4t + 3 are two pairs, of two lanes each.
    std::uint8_t* to =
        values_ + (token_tile * C::value_tiles + channel_tile) * kQuadBytes + (4 * g + 2 * t % 4) * 16 + t / 2 * 8;
    *reinterpret_cast<uint2*>(to) = {ptx::narrow2<C::bfloat>(x[0][0], x[0][1]),
                                     ptx::narrow2<C::bfloat>(x[1][0], x[1][1])};
    *reinterpret_cast<uint2*>(to + 16) = {ptx::narrow2<C::bfloat>(x[0][2], x[0][3]),
                                          ptx::narrow2<C::bfloat>(x[1][2], x[1][3])};
  }

  __device__ __forceinline__ void store_key(int place, int channel, std::uint16_t x) {
    std::uint8_t* unit = keys_ + (place / kTile * (f_.key.depth / kTile) + channel / kTile) * kQuadBytes;
    *reinterpret_cast<std::uint16_t*>(unit + key_unit_at(place % kTile, channel % kTile)) = x;
  }

  // A slot of the values' list: value, channel and place in one word.
  __device__ __forceinline__ std::uint32_t load_slot(int slot) const {
    const BlockOutliers& list = f_.value.outliers;
    return load16(page_ + list.value_offset + 2 * slot) |
           static_cast<std::uint32_t>(page_[list.row_offset + slot]) << 16 |
           static_cast<std::uint32_t>(page_[list.depth_offset + slot]) << 24;
  }
  __device__ __forceinline__ void store_slot(std::uint32_t slot, int half) {
    const int channel = static_cast<int>(slot >> 16 & 0xFFU);
    const int place = static_cast<int>(slot >> 24);
    if (place / kStageTokens != half) return;
    std::uint8_t* unit = values_ + (place % kStageTokens / kTile * C::value_tiles + channel / kTile) * kQuadBytes;
    *reinterpret_cast<std::uint16_t*>(unit + unit_at(channel % kTile, place % kTile)) =
        static_cast<std::uint16_t>(slot & 0xFFFFU);
  }

  const BlockFormat& f_;
  int head_;
  std::uint8_t* keys_;
  std::uint8_t* values_;
  std::uint8_t* raw_;
  std::uint8_t* tokens_;
  BlockPlane* planes_;
  float2* grids_;
  const std::uint8_t* page_ = nullptr;
  BlockRange range_;
  std::uint32_t held_[kHeld] = {};
};

}  // namespace kvant::cuda
