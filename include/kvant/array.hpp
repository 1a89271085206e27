// Strided views of arrays of rank 1..4 for the reference modules (kitty, kvquant, zipcache): batch first, tokens and
// channels last.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "kvant/types.hpp"

namespace kvant {

constexpr int kMaxRank = 4;
using Extents = std::array<std::int64_t, kMaxRank>;

// Row-major strides, in elements, of a dense array.
constexpr Extents dense_strides(int rank, const Extents& extent) {
  Extents stride{};
  std::int64_t step = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    stride[static_cast<std::size_t>(axis)] = step;
    step *= extent[static_cast<std::size_t>(axis)];
  }
  return stride;
}

// A view of T; strides count elements and may be anything, negative or zero included. Only the first `rank` entries of
// extent and stride mean something.
template <typename T>
struct Strided {
  T* data = nullptr;
  int rank = 0;
  Extents extent{};
  Extents stride{};

  operator Strided<const T>() const { return {data, rank, extent, stride}; }
};

// Floating-point arrays: the type of the elements is known at run time only.
struct ConstArray {
  const void* data = nullptr;
  DType type = DType::f32;
  int rank = 0;
  Extents extent{};
  Extents stride{};
};

// The writable twin of ConstArray.
struct Array {
  void* data = nullptr;
  DType type = DType::f32;
  int rank = 0;
  Extents extent{};
  Extents stride{};

  operator ConstArray() const { return {data, type, rank, extent, stride}; }
};

namespace detail {
constexpr Extents to_extents(std::initializer_list<std::int64_t> extent) {
  Extents result{};
  std::size_t axis = 0;
  for (const std::int64_t value : extent) {
    if (axis < result.size()) result[axis++] = value;
  }
  return result;
}
}  // namespace detail

// Dense row-major views.
inline ConstArray dense_array(const void* data, DType type, std::initializer_list<std::int64_t> extent) {
  const int rank = static_cast<int>(extent.size());
  const Extents extents = detail::to_extents(extent);
  return {data, type, rank, extents, dense_strides(rank, extents)};
}
inline Array dense_array(void* data, DType type, std::initializer_list<std::int64_t> extent) {
  const int rank = static_cast<int>(extent.size());
  const Extents extents = detail::to_extents(extent);
  return {data, type, rank, extents, dense_strides(rank, extents)};
}
template <typename T>
Strided<T> dense_grid(T* data, std::initializer_list<std::int64_t> extent) {
  const int rank = static_cast<int>(extent.size());
  const Extents extents = detail::to_extents(extent);
  return {data, rank, extents, dense_strides(rank, extents)};
}

}  // namespace kvant
