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
__device__ void place_angles(const BlockTurns& turns, int position, float2* angles) {
  for (int i = C::unpack_thread(); i < kPage / kTile * turns.padded; i += C::unpack_threads) {
    const int pair = i % turns.padded;
    float2 angle{1, 0};
    if (pair < turns.pairs) {
      angle = sincos_of_turns(__dmul_rn(position + i / turns.padded * kTile, turns.turns[pair]));
      angle = {angle.x * turns.magnitude, angle.y * turns.magnitude};
    }
    angles[i] = angle;
  }
}

// The angles of a stage's tokens, after place_angles() for its page: two pairs' {cosine, sine, cosine, sine}.
struct StageAngles {
  const BlockTurns& turns;
  const float2* runs;
  const std::uint8_t* tokens;  // of the page in the stage's places; null: from first_token on
  int first_token;

  __device__ __forceinline__ int token(int place) const {
    return tokens == nullptr ? first_token + place : tokens[place];
  }
  __device__ __forceinline__ float4 run(int token, int pair) const {
    return *reinterpret_cast<const float4*>(runs + token / kTile * turns.padded + pair);
  }
  __device__ __forceinline__ float4 offset(int token, int pair) const {
    return __ldg(reinterpret_cast<const float4*>(turns.offsets + 2 * (token % kTile * turns.padded + pair)));
  }
  static __device__ __forceinline__ float4 sum(const float4& a, const float4& b) {
    return {a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y, a.z * b.z - a.w * b.w, a.w * b.z + a.z * b.w};
  }
  __device__ __forceinline__ float4 of(int token, int pair) const { return sum(run(token, pair), offset(token, pair)); }
};

// Pairs of a type may leave its range by what their codes are off: no infinity must meet a weight of zero.
template <bool Bfloat>
__device__ __forceinline__ std::uint32_t narrow_turned(float low, float high) {
  constexpr float limit = Bfloat ? 0x1.FEp127F : 65504.0F;
  return ptx::narrow2<Bfloat>(fminf(fmaxf(low, -limit), limit), fminf(fmaxf(high, -limit), limit));
}
// x, y: two channels' own and their partners'.
template <bool Bfloat>
__device__ __forceinline__ void turn_two(const float4& angle, std::uint32_t& x, std::uint32_t& y) {
  const float2 u = ptx::widen2<Bfloat>(x);
  const float2 v = ptx::widen2<Bfloat>(y);
  x = narrow_turned<Bfloat>(u.x * angle.x - v.x * angle.y, u.y * angle.z - v.y * angle.w);
  y = narrow_turned<Bfloat>(u.x * angle.y + v.x * angle.x, u.y * angle.w + v.y * angle.z);
}
template <bool Bfloat>
__device__ __forceinline__ std::uint32_t turn_one(float cosine, float sine, std::uint32_t pair) {
  const float2 u = ptx::widen2<Bfloat>(pair);
  return narrow_turned<Bfloat>(u.x * cosine - u.y * sine, u.x * sine + u.y * cosine);
}

// One pair after the other, wherever its channels lie.
template <class C, class Elements>
__device__ void turn_singly(const StageAngles& angles, const Elements& elements, std::uint8_t* keys) {
  const BlockTurns& turns = angles.turns;
  for (int i = C::unpack_thread(); i < kStageTokens * turns.pairs; i += C::unpack_threads) {
    const int place = i % kStageTokens;
    const int pair = i / kStageTokens;
    std::uint16_t* const x = elements.key(keys, place, turns.first(pair));
    std::uint16_t* const y = elements.key(keys, place, turns.second(pair));
    const float4 two = angles.of(angles.token(place), pair & ~1);
    const std::uint32_t turned = turn_one<C::bfloat>(pair % 2 == 0 ? two.x : two.z, pair % 2 == 0 ? two.y : two.w,
                                                     *x | static_cast<std::uint32_t>(*y) << 16);
    *x = static_cast<std::uint16_t>(turned);
    *y = static_cast<std::uint16_t>(turned >> 16);
  }
}

// One stage's tile of keys in units. Every thread of the block calls run(), once the tile is complete; it is turned
// when the block has met after that.
template <class C>
class KeyTurner {
 public:
  __device__ KeyTurner(const StageAngles& angles, const BlockFormat& format, std::uint8_t* keys)
      : angles_(angles),
        format_(format),
        key_tiles_(format.key.depth / kTile),
        keys_(keys),
        g_(static_cast<int>(threadIdx.x) % 32 / 4) {}

  __device__ void run() const {
    const BlockTurns& turns = angles_.turns;
    if (turns.step == 2) {
      over_fours(turns.padded / 2, [&](int tile, int four) { turn_neighbours(tile, four); });
    } else if (turns.pairs % kFour == 0) {
      over_fours(turns.pairs / kFour, [&](int tile, int four) { turn_fours(tile, four); });
    } else {  // a four may have channels of both halves
      turn_singly<C>(angles_, UnitElements<C>{format_}, keys_);
    }
  }

 private:
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

  __device__ __forceinline__ void turn_fours(int tile, int four) const {
    uint4* const x_words = words(tile, four);
    uint4* const y_words = words(tile, four + angles_.turns.pairs / kFour);
    uint4 x = *x_words;
    uint4 y = *y_words;
    const int low = angles_.token(tile * kTile + g_);
    const int high = angles_.token(tile * kTile + g_ + 8);
    turn_two<C::bfloat>(angles_.of(low, kFour * four), x.x, y.x);
    turn_two<C::bfloat>(angles_.of(high, kFour * four), x.y, y.y);
    turn_two<C::bfloat>(angles_.of(low, kFour * four + 2), x.z, y.z);
    turn_two<C::bfloat>(angles_.of(high, kFour * four + 2), x.w, y.w);
    *x_words = x;
    *y_words = y;
  }

  __device__ __forceinline__ void turn_neighbours(int tile, int four) const {
    uint4* const to = words(tile, four);
    const uint4 x = *to;
    const float4 low = angles_.of(angles_.token(tile * kTile + g_), 2 * four);
    const float4 high = angles_.of(angles_.token(tile * kTile + g_ + 8), 2 * four);
    *to = {turn_one<C::bfloat>(low.x, low.y, x.x), turn_one<C::bfloat>(high.x, high.y, x.y),
           turn_one<C::bfloat>(low.z, low.w, x.z), turn_one<C::bfloat>(high.z, high.w, x.w)};
  }

  StageAngles angles_;
  const BlockFormat& format_;
  int key_tiles_;
  std::uint8_t* keys_;
  int g_;
};

}  // namespace kvant::cuda
