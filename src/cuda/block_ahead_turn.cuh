// Keys before RoPE in the tiles of warpgroup matrix instructions (block_turn.cuh).
#pragma once

#include "cuda/block_ahead_tiles.cuh"
#include "cuda/block_turn.cuh"

namespace kvant::cuda {

// One stage's tile of keys. Every thread that unpacks calls run(), once the tile is complete.
//
// A lane has one of 16 places and eight pairs of channels in each of the tile's runs of 16 places: where these are
// positions too, the angles beyond that of the run are the same for all of them.
template <class C>
class CoreTurner {
 public:
  __device__ CoreTurner(const StageAngles& angles, const BlockFormat& format, std::uint8_t* keys)
      : angles_(angles), format_(format), keys_(keys) {}

  __device__ __forceinline__ void run() const {
    const BlockTurns& turns = angles_.turns;
    if (turns.step == 2) {
      over_octets<false>(turns.padded / 4);
    } else if (turns.pairs % 8 == 0) {
      over_octets<true>(turns.pairs / 8);
    } else {  // an octet may have channels of both halves
      turn_singly<C>(angles_, CoreElements<C>(format_), keys_);
    }
  }

 private:
  // Halves: octet o has pairs 8 o to 8 o + 7, their partners lie pairs / 8 octets on; else pairs 4 o to 4 o + 3.
  template <bool Halves>
  __device__ __forceinline__ void over_octets(int octets) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int octet = C::unpack_thread() / 32 * 2 + lane / 16; octet < octets; octet += C::unpack_warps * 2) {
      if (angles_.tokens == nullptr) {
        turn_octet<Halves, false>(octet, lane % 16);
      } else {
        turn_octet<Halves, true>(octet, lane % 16);
      }
    }
  }

  template <bool Halves, bool Listed>
  __device__ __forceinline__ void turn_octet(int octet, int row) const {
    constexpr int twos = Halves ? 4 : 2;  // pairs by two
    const int pair = 2 * twos * octet;
    float4 offsets[twos];
#pragma unroll
    for (int k = 0; k < twos && !Listed; ++k) offsets[k] = angles_.offset(row, pair + 2 * k);
#pragma unroll 1
    for (int place = row; place < kStageTokens; place += kTile) {
      const int token = angles_.token(place);
      std::uint8_t* const at = keys_ + octet * C::key_depth_stride + core_row_at(place, C::key_row_stride);
      std::uint8_t* const partner = at + angles_.turns.pairs / 8 * C::key_depth_stride;
      std::uint32_t x[4], y[4];
      load(at, x);
      if constexpr (Halves) load(partner, y);
#pragma unroll
      for (int k = 0; k < twos; ++k) {
        const float4 offset = Listed ? angles_.offset(token, pair + 2 * k) : offsets[k];
        const float4 angle = StageAngles::sum(angles_.run(token, pair + 2 * k), offset);
        if constexpr (Halves) {
          turn_two<C::bfloat>(angle, x[k], y[k]);
        } else {
          x[2 * k] = turn_one<C::bfloat>(angle.x, angle.y, x[2 * k]);
          x[2 * k + 1] = turn_one<C::bfloat>(angle.z, angle.w, x[2 * k + 1]);
        }
      }
      store(at, x);
      if constexpr (Halves) store(partner, y);
    }
  }

  static __device__ __forceinline__ void load(const std::uint8_t* from, std::uint32_t (&x)[4]) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
  }
  static __device__ __forceinline__ void store(std::uint8_t* to, const std::uint32_t (&x)[4]) {
    *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  }

  const StageAngles& angles_;
  const BlockFormat& format_;
  std::uint8_t* keys_;
};

}  // namespace kvant::cuda
