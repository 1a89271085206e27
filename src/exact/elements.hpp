// Reading and writing rows of strided arrays as float. Widening is exact; narrowing rounds once, to nearest even.
#pragma once

#include <cstdint>
#include <string>

#include "base/checked.hpp"
#include "base/half.hpp"
#include "kvant/array.hpp"
#include "tiles/kernels.hpp"

namespace kvant::exact {

inline std::size_t at(int axis) {
  return static_cast<std::size_t>(axis);
}

inline void require_rank(const char* name, int rank, int expected) {
  if (rank == expected) return;
  base::fail(ErrorCode::invalid_argument,
             std::string(name) + " has " + std::to_string(rank) + " axes; it must have " + std::to_string(expected));
}

inline void require_extent(const char* name, int axis, std::int64_t actual, std::int64_t expected) {
  if (actual == expected) return;
  base::fail(ErrorCode::invalid_argument, std::string(name) + " has extent " + std::to_string(actual) + " on axis " +
                                              std::to_string(axis) + "; it must be " + std::to_string(expected));
}

// Throws Error(invalid_argument) naming the argument, its value and the limits.
inline void require_between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  base::fail(ErrorCode::invalid_argument, std::string(name) + " = " + std::to_string(value) + " is outside " +
                                              std::to_string(low) + ".." + std::to_string(high));
}
inline void require_bits(const char* name, std::int64_t value) {
  require_between(name, value, 1, 8);
}
inline void require_group_size(const char* name, std::int64_t value) {
  if (value >= 1) return;
  base::fail(ErrorCode::invalid_argument, std::string(name) + " = " + std::to_string(value) + " must be at least 1");
}

// The last axis of an array at a fixed place of the other axes.
struct ConstRow {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t stride = 1;

  const void* start() const {
    return static_cast<const std::byte*>(data) + first * static_cast<std::int64_t>(size_of(type));
  }
  // out[i] = element i as float
  void load(float* out) const {
    if (count == 0) return;  // empty arrays may have null data
    if (stride == 1) {
      tiles::kernels().widen(start(), type, out, count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) out[i] = base::load_float(data, type, first + i * stride);
    }
  }
};

struct Row {
  void* data = nullptr;
  DType type = DType::f32;
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t stride = 1;

  void* start() const { return static_cast<std::byte*>(data) + first * static_cast<std::int64_t>(size_of(type)); }
  void store(const float* from) const {
    if (count == 0) return;
    if (stride == 1) {
      tiles::kernels().narrow(from, start(), type, count);
    } else {
      for (std::int64_t i = 0; i < count; ++i) base::store_float(data, type, first + i * stride, from[i]);
    }
  }
};

// Row `token` of array[batch][head] (rank 4), array[batch] (rank 3: `head` is 0) or array (rank 2: both are 0).
template <typename AnyArray>
std::int64_t row_start(const AnyArray& array, std::int64_t batch, std::int64_t head, std::int64_t token) {
  const Extents& s = array.stride;
  if (array.rank == 4) return batch * s[0] + head * s[1] + token * s[2];
  if (array.rank == 3) return batch * s[0] + token * s[1];
  return token * s[0];
}
inline ConstRow row_of(const ConstArray& a, std::int64_t batch, std::int64_t head, std::int64_t token) {
  return {a.data, a.type, row_start(a, batch, head, token), a.extent[at(a.rank - 1)], a.stride[at(a.rank - 1)]};
}
inline Row row_of(const Array& a, std::int64_t batch, std::int64_t head, std::int64_t token) {
  return {a.data, a.type, row_start(a, batch, head, token), a.extent[at(a.rank - 1)], a.stride[at(a.rank - 1)]};
}

}  // namespace kvant::exact
