// Attention from keys that pages hold as they were before RoPE: a stage's tile of them is turned in shared memory. A
// query meets every token at another angle, so nothing can be turned once for all of them.
//
// An angle is that of the first of 16 tokens, from binary64 for each page, plus that of 0 to 15 positions, from a table
// (as cache::Rotation::place has it).
#pragma once

#include "cuda/block_angles.cuh"
#include "cuda/block_tiles.cuh"

namespace kvant::cuda {

// The angles of a page's runs of 16 tokens, [run][padded]. position: of the page's first token.
template <class C>
__device__ void place_angles(const BlockTurns& turns, int position, const BlockShared& at, std::uint8_t* shared) {
  auto* angles = reinterpret_cast<float2*>(shared + at.angles);
  for (int i = static_cast<int>(threadIdx.x); i < kPage / kTile * turns.padded; i += C::threads) {
    const int pair = i % turns.padded;
    float2 angle{1, 0};
    if (pair < turns.pairs) {
      angle = sincos_of_turns(__dmul_rn(position + i / turns.padded * kTile, turns.turns[pair]));
      angle = {angle.x * turns.magnitude, angle.y * turns.magnitude};
    }
    angles[i] = angle;
  }
}

// One stage's tile of keys. Every thread of the block calls run(), once the tile is complete; it is turned when the
// block has met after that.
template <class C>
class KeyTurner {
 public:
  // After place_angles() for the stage's page. tokens: of the page in the stage's places; null: from first_token on.
  __device__ KeyTurner(const BlockTurns& turns, const BlockShared& at, std::uint8_t* shared, const std::uint8_t* tokens,
                       int first_token, int key_tiles)
      : turns_(turns),
        angles_(reinterpret_cast<const float2*>(shared + at.angles)),
        tokens_(tokens),
        first_token_(first_token),
        key_tiles_(key_tiles),
        keys_(shared + at.keys),
        g_(static_cast<int>(threadIdx.x) % 32 / 4) {}

  __device__ void run() const {
    if (turns_.step == 2) {
      over_fours(turns_.padded / 2, [&](int tile, int four) { turn_neighbours(tile, four); });
    } else if (turns_.pairs % kFour == 0) {
      over_fours(turns_.pairs / kFour, [&](int tile, int four) { turn_fours(tile, four); });
    } else {
      turn_singly();
    }
  }

 private:
  // Two pairs' {cosine, sine, cosine, sine}.
  __device__ __forceinline__ float4 angles_of(int token, int pair) const {
    const auto* bases = reinterpret_cast<const float4*>(angles_ + token / kTile * turns_.padded + pair);
    const auto* offsets = reinterpret_cast<const float4*>(turns_.offsets + 2 * (token % kTile * turns_.padded + pair));
    const float4 a = *bases;
    const float4 b = __ldg(offsets);
    return {a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y, a.z * b.z - a.w * b.w, a.w * b.z + a.z * b.w};
  }
  __device__ __forceinline__ int token(int place) const {
    return tokens_ == nullptr ? first_token_ + place : tokens_[place];
  }
  // Rows g and g + 8 of a token tile at a four of channels: {g, g + 8} at its first two channels, then the others.
  __device__ __forceinline__ uint4* words(int tile, int four) const {
    return reinterpret_cast<uint4*>(keys_ + (tile * key_tiles_ + four / 4) * kQuadBytes + (4 * g_ + four % 4) * 16);
  }

  // Quads of lanes have four fours in a row.
  template <class Turn>
  __device__ __forceinline__ void over_fours(int fours, const Turn& turn) const {
    const int runs = (fours + 3) / 4;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < kStageTiles * runs; i += C::warps) {
      const int four = i / kStageTiles * 4 + static_cast<int>(threadIdx.x) % 4;
      if (four < fours) turn(i % kStageTiles, four);
    }
  }

  // Pairs of a type may leave its range by what their codes are off: no infinity must meet a weight of zero.
  static __device__ __forceinline__ std::uint32_t narrow(float low, float high) {
    constexpr float limit = C::bfloat ? 0x1.FEp127F : 65504.0F;
    return ptx::narrow2<C::bfloat>(fminf(fmaxf(low, -limit), limit), fminf(fmaxf(high, -limit), limit));
  }
  // x, y: two channels' own and their partners'.
  static __device__ __forceinline__ void turn_two(const float4& angle, std::uint32_t& x, std::uint32_t& y) {
    const float2 u = ptx::widen2<C::bfloat>(x);
    const float2 v = ptx::widen2<C::bfloat>(y);
    x = narrow(u.x * angle.x - v.x * angle.y, u.y * angle.z - v.y * angle.w);
    y = narrow(u.x * angle.y + v.x * angle.x, u.y * angle.w + v.y * angle.z);
  }
  static __device__ __forceinline__ std::uint32_t turn_one(float cosine, float sine, std::uint32_t pair) {
    const float2 u = ptx::widen2<C::bfloat>(pair);
    return narrow(u.x * cosine - u.y * sine, u.x * sine + u.y * cosine);
  }

  __device__ __forceinline__ void turn_fours(int tile, int four) const {
    uint4* const x_words = words(tile, four);
    uint4* const y_words = words(tile, four + turns_.pairs / kFour);
    uint4 x = *x_words;
    uint4 y = *y_words;
    const int low = token(tile * kTile + g_);
    const int high = token(tile * kTile + g_ + 8);
    turn_two(angles_of(low, kFour * four), x.x, y.x);
    turn_two(angles_of(high, kFour * four), x.y, y.y);
    turn_two(angles_of(low, kFour * four + 2), x.z, y.z);
    turn_two(angles_of(high, kFour * four + 2), x.w, y.w);
    *x_words = x;
    *y_words = y;
  }

  __device__ __forceinline__ void turn_neighbours(int tile, int four) const {
    uint4* const to = words(tile, four);
    const uint4 x = *to;
    const float4 low = angles_of(token(tile * kTile + g_), 2 * four);
    const float4 high = angles_of(token(tile * kTile + g_ + 8), 2 * four);
    *to = {turn_one(low.x, low.y, x.x), turn_one(high.x, high.y, x.y), turn_one(low.z, low.w, x.z),
           turn_one(high.z, high.w, x.w)};
  }

  // Halves whose number of pairs is no multiple of four: a four may have channels of both.
  __device__ void turn_singly() const {
    for (int i = static_cast<int>(threadIdx.x); i < kStageTokens * turns_.pairs; i += C::threads) {
      const int place = i % kStageTokens;
      const int pair = i / kStageTokens;
      std::uint16_t* const x = element(place, turns_.first(pair));
      std::uint16_t* const y = element(place, turns_.second(pair));
      const float4 two = angles_of(token(place), pair & ~1);
      const std::uint32_t turned = turn_one(pair % 2 == 0 ? two.x : two.z, pair % 2 == 0 ? two.y : two.w,
                                            *x | static_cast<std::uint32_t>(*y) << 16);
      *x = static_cast<std::uint16_t>(turned);
      *y = static_cast<std::uint16_t>(turned >> 16);
    }
  }
  __device__ __forceinline__ std::uint16_t* element(int place, int channel) const {
    std::uint8_t* unit = keys_ + (place / kTile * key_tiles_ + channel / kTile) * kQuadBytes;
    return reinterpret_cast<std::uint16_t*>(unit + key_unit_at(place % kTile, channel % kTile));
  }

  const BlockTurns& turns_;
  const float2* angles_;
  const std::uint8_t* tokens_;
  int first_token_;
  int key_tiles_;
  std::uint8_t* keys_;
  int g_;
};

}  // namespace kvant::cuda
