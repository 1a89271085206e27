// What the kernels that write pages share: the format they write, a grid, a code as the CPU rounds it.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/seal.hpp"

namespace kvant::cuda {

template <int KeyBits, int ValueBits, int HighSteps, int KeyDim, int ValueDim, bool Bfloat>
struct SealConfig {
  static constexpr KeyFormat key{KeyBits, KeyDim, HighSteps};
  static constexpr ValueFormat value{ValueBits, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool bfloat = Bfloat;
};

// One grid: minimum, step and its inverse (0 without a step: every code is then 0).
struct Grid {
  float min, step, inverse;

  __device__ static Grid of(float min, float max, int levels) {
    const float step = __fdiv_rn(max - min, static_cast<float>(levels));
    return {min, step, step > 0 ? __frcp_rn(step) : 0.0F};
  }
};

// floor((x - min) / step + 1/2) as the CPU rounds it.
static __device__ __noinline__ std::uint32_t divide_code(float x, Grid grid, int levels) {
  const float t = __fadd_rn(__fdiv_rn(__fsub_rn(x, grid.min), grid.step), 0.5F);
  return grid.step > 0 ? static_cast<std::uint32_t>(fminf(fmaxf(floorf(t), 0.0F), static_cast<float>(levels))) : 0U;
}

// Whole numbers from 0 to 2^22, added to this, are in the low bits of the sum.
constexpr float kRowMagic = 12582912.0F;  // 1.5 * 2^23
constexpr std::uint32_t kRowMagicBits = 0x4B400000U;

}  // namespace kvant::cuda
