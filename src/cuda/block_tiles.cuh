// From block pages (block_format.hpp) to tiles of 64 places in shared memory, in half precision: any planes, tables of
// levels, orders of channels and tokens, outliers, factors.
//
// Tiles lie in the units of MmaEngine (prefill_mma.cuh). A warp makes four row tiles by two units at a time
// (block_codes.cuh).
#pragma once

#include "cuda/block_page.cuh"

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
  static constexpr int unpack_threads = threads;
  static constexpr int m_tiles = ValueDim <= 128 ? 2 : 1;
  static constexpr int vectors = warps * m_tiles * 16;
  static constexpr int blocks = 2;  // of a multiprocessor
  static constexpr int value_tiles = ValueDim / 16;
  static_assert(threads == kPage);

  static __device__ __forceinline__ int unpack_thread() { return static_cast<int>(threadIdx.x); }
};

// Bytes from the start of a unit of 16 rows by 16 depth indices to one element.
__device__ __forceinline__ int unit_at(int row, int depth) {
  return (row % 8 * 4 + depth % 8 / 2) * 16 + depth / 8 * 8 + row / 8 * 4 + depth % 2 * 2;
}
// The same for keys, whose four channels 4t to 4t + 3 lane 4g + t has.
__device__ __forceinline__ int key_unit_at(int row, int channel) {
  return (row % 8 * 4 + channel / 4) * 16 + channel % 4 / 2 * 8 + row / 8 * 4 + channel % 2 * 2;
}

// Of units [token tile][channel tile].
template <class C>
struct UnitElements {
  const BlockFormat& format;

  __device__ __forceinline__ std::uint16_t* key(std::uint8_t* keys, int place, int channel) const {
    std::uint8_t* unit = keys + (place / kTile * (format.key.depth / kTile) + channel / kTile) * kQuadBytes;
    return reinterpret_cast<std::uint16_t*>(unit + key_unit_at(place % kTile, channel % kTile));
  }
  __device__ __forceinline__ std::uint16_t* value(std::uint8_t* values, int place, int channel) const {
    std::uint8_t* unit = values + (place / kTile * C::value_tiles + channel / kTile) * kQuadBytes;
    return reinterpret_cast<std::uint16_t*>(unit + unit_at(channel % kTile, place % kTile));
  }
};

template <class C>
class UnitPage : public BlockPage<C, UnitElements<C>, HeldSlots<C>> {
  using Page = BlockPage<C, UnitElements<C>, HeldSlots<C>>;
  using Page::f_;
  using Page::grids_;
  using Page::planes_;
  using Page::raw_;

 public:
  using Page::Page;

  __device__ void unpack(int half, std::uint8_t* keys, std::uint8_t* values) {
    unpack_keys(keys, f_.key, 0, 0, half);
    if (f_.rest.rows > 0) unpack_keys(keys, f_.rest, 1, Page::kRestGrid, half);
    unpack_values(values, half);
  }

 private:
  __device__ void unpack_keys(std::uint8_t* keys, const BlockTile& tile, int number, int grid, int half) {
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
            store_keys(keys, tile, row, place, four, x);
          }
        }
      }
    }
  }

  // Rows row + g and row + g + 8 of a key tile, place and on of the half.
  __device__ __forceinline__ void store_keys(std::uint8_t* keys, const BlockTile& tile, int row, int place, int four,
                                             const float (&x)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint4 packed{ptx::narrow2<C::bfloat>(x[0][0], x[0][1]), ptx::narrow2<C::bfloat>(x[1][0], x[1][1]),
                       ptx::narrow2<C::bfloat>(x[0][2], x[0][3]), ptx::narrow2<C::bfloat>(x[1][2], x[1][3])};
    if (tile.first % kTile == 0 && tile.order_offset < 0 && row + kTile <= tile.rows) {
      std::uint8_t* unit = keys + (place / kTile * (tile.depth / kTile) + four / 4) * kQuadBytes;
      *reinterpret_cast<uint4*>(unit + lane * 16) = packed;
      return;
    }
    scatter_keys(keys, tile.rows - row, place, four, packed);
  }

  // Where channels have an order, or rows are not aligned with tiles. rows: that the tile has left.
  __device__ __forceinline__ void scatter_keys(std::uint8_t* keys, int rows, int place, int four, const uint4& packed) {
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
        *this->elements_.key(keys, at, channel) =
            static_cast<std::uint16_t>(pairs[e][i / 2] >> (16 * (i % 2)) & 0xFFFFU);
      }
    }
  }

  __device__ void unpack_values(std::uint8_t* values, int half) {
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
        const BlockDequantizer dequantizer(grids_ + Page::kValueGrid + 4 * (four + 4 * h), f_.value.wide != 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (4 * chunk + j >= C::value_tiles) break;
          float x[2][4];
#pragma unroll
          for (int e = 0; e < 2; ++e) dequantizer.expand(codes[j][2 * h + e], x[e]);
          store_values(values, job % 2 * 2 + h, 4 * chunk + j, x);
        }
      }
    }
  }

  __device__ __forceinline__ void store_values(std::uint8_t* values, int token_tile, int channel_tile,
                                               float (&x)[2][4]) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
    if (f_.value.factor_offset >= 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor =
            Page::widen(Page::load16(raw_ + f_.value.factor_offset + 2 * (channel_tile * kTile + g + 8 * e)));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[e][i] *= factor;
      }
    }
    // Tokens 4t to 4t + 3 are two pairs, of two lanes each.
    std::uint8_t* to =
        values + (token_tile * C::value_tiles + channel_tile) * kQuadBytes + (4 * g + 2 * t % 4) * 16 + t / 2 * 8;
    *reinterpret_cast<uint2*>(to) = {ptx::narrow2<C::bfloat>(x[0][0], x[0][1]),
                                     ptx::narrow2<C::bfloat>(x[1][0], x[1][1])};
    *reinterpret_cast<uint2*>(to + 16) = {ptx::narrow2<C::bfloat>(x[0][2], x[0][3]),
                                          ptx::narrow2<C::bfloat>(x[1][2], x[1][3])};
  }
};

}  // namespace kvant::cuda
