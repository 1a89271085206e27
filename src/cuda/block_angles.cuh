// Cosines and sines of positions, the CPU's bits.
#pragma once

#include <iterator>

#include "tiles/kernels.hpp"

namespace kvant::cuda {

// A sum of src/tiles/rotate.cpp from term I on. Nothing here may become a fused multiply-add: what is sealed with these
// angles are the CPU's bytes.
template <bool Sine, int I = 0>
__device__ __forceinline__ double sum_terms(double square) {
  constexpr double term = Sine ? tiles::kSineTerms[I] : tiles::kCosineTerms[I];
  if constexpr (I + 1 == (Sine ? std::size(tiles::kSineTerms) : std::size(tiles::kCosineTerms))) {
    return term;
  } else {
    return __dadd_rn(__dmul_rn(sum_terms<Sine, I + 1>(square), square), term);
  }
}

// {cosine, sine} of an angle in turns. Binary64 up to the end: positions beyond 2^20 leave binary32 no fraction.
__device__ __forceinline__ float2 sincos_of_turns(double turn) {
  constexpr double radians = tiles::kTurn;
  const double rest = __dsub_rn(turn, rint(turn));    // -1/2..1/2
  const double quarter = rint(__dmul_rn(rest, 4.0));  // -2..2
  const double inside = __dsub_rn(rest, __dmul_rn(quarter, 0.25));
  const double x = __dmul_rn(inside, radians);
  const double square = __dmul_rn(x, x);
  const double sine = __dmul_rn(x, sum_terms<true>(square));
  const double cosine = sum_terms<false>(square);
  const bool odd = fabs(quarter) == 1.0;
  const bool half = fabs(quarter) > 1.5;
  const float c = __double2float_rn(odd ? sine : cosine);
  const float s = __double2float_rn(odd ? cosine : sine);
  return {half || quarter == 1.0 ? -c : c, half || quarter == -1.0 ? -s : s};
}

}  // namespace kvant::cuda
