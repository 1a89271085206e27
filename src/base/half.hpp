// IEEE binary16 and bfloat16 to and from binary32: exact widening, round-to-nearest-even narrowing.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvant/types.hpp"

namespace kvant::base {

constexpr float kMaxHalf = 65504.0F;
constexpr float kRoundsToMaxHalf = 65519.0F;  // the largest integer that narrows to 65504
constexpr float kMaxBfloat = 3.38953139e38F;

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1FU;
  const std::uint32_t mantissa = half & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in binary32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return sign | 0x7E00U | static_cast<std::uint16_t>((magnitude >> 13) & 0x3FFU);
  if (magnitude >= 0x477FF000U) return sign | 0x7C00U;  // 65520 and above round to infinity
  if (magnitude < 0x38800000U) {                        // below 2^-14: subnormal, in units of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24F;
    return sign | static_cast<std::uint16_t>(std::nearbyint(scaled));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1U;
  return sign | static_cast<std::uint16_t>((magnitude - 0x38000000U + 0xFFFU + odd) >> 13);
}

inline float bfloat_to_float(std::uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bfloat) << 16);
}

inline std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  const std::uint32_t odd = (bits >> 16) & 1U;
  return static_cast<std::uint16_t>((bits + 0x7FFFU + odd) >> 16);
}

// Largest finite magnitude of a type.
inline float max_finite(DType type) {
  if (type == DType::f16) return kMaxHalf;
  return type == DType::bf16 ? kMaxBfloat : std::numeric_limits<float>::max();
}

// Largest magnitude that a cache of this type stores. binary32 and bfloat16 stop at half their range: max - min of a
// grid must stay finite.
inline float largest_stored(DType type) {
  return type == DType::f16 ? kMaxHalf : max_finite(type) / 2;
}

inline float load_float(const void* data, DType type, std::int64_t index) {
  if (type == DType::f32) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return type == DType::f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

inline void store_float(void* data, DType type, std::int64_t index, float value) {
  if (type == DType::f32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<std::uint16_t*>(data)[index] = type == DType::f16 ? float_to_half(value) : float_to_bfloat(value);
  }
}

}  // namespace kvant::base
