// Keys as they were before RoPE, for pages that hold these: the CPU's bits (turn_back in src/cache/encode.cpp).
#pragma once

#include "cuda/block_angles.cuh"
#include "cuda/block_seal_rows.cuh"

namespace kvant::cuda {

// A pair may grow by the root of 2; beyond what rows may be (base::largest_stored) it ends there.
template <bool Bfloat>
__device__ __forceinline__ std::uint16_t narrow_clamped(float x) {
  constexpr float limit = Bfloat ? 0x1.FEp126F : 65504.0F;
  return static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(fminf(fmaxf(x, -limit), limit), 0));
}

// Turns keys [channel][stride] back in place, the first `count` of each channel; position(i): of key i. A warp has a
// pair.
template <bool Bfloat, class Position>
__device__ void turn_keys_back(const BlockTurns& turns, std::uint16_t* keys, int stride, int count,
                               const Position& position) {
  const float factor = __fdiv_rn(1.0F, turns.magnitude);
  for (int pair = static_cast<int>(threadIdx.x) / 32; pair < turns.pairs; pair += kBlockSealWarps) {
    const double turn = turns.turns[pair];
    std::uint16_t* const first = keys + turns.first(pair) * stride;
    std::uint16_t* const second = keys + turns.second(pair) * stride;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
      const float2 angle = sincos_of_turns(__dmul_rn(position(i), turn));
      const float cosine = __fmul_rn(angle.x, factor);
      const float sine = __fmul_rn(angle.y, -factor);
      const float x = ptx::widen2<Bfloat>(first[i]).x;
      const float y = ptx::widen2<Bfloat>(second[i]).x;
      first[i] = narrow_clamped<Bfloat>(__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)));
      second[i] = narrow_clamped<Bfloat>(__fadd_rn(__fmul_rn(x, sine), __fmul_rn(y, cosine)));
    }
  }
}

}  // namespace kvant::cuda
