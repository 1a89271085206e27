// Arrays of Python as views of kvant. Nothing is copied: strides are taken as they are.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <type_traits>

#include "kvant/array.hpp"

namespace kvant::python {

namespace nb = nanobind;

// Any object that speaks DLPack or the buffer protocol. uint16 stands for bf16: NumPy has no name for it that either
// protocol could carry, so kvant/_arrays.py passes such arrays as views of their bits.
using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;

// "f32", "f16" or "bf16" for what the kernels compute with, and "uint8", "bool", "int32", "float64" ... for the rest.
std::string dtype_name(nb::dlpack::dtype type);

// Views of f32, f16 and bf16 arrays. `name` is the argument in messages. Throw Error(invalid_argument) for another
// type, another rank or memory that is not the CPU's.
ConstArray read_floats(const In& array, const char* name, int rank);
Array write_floats(const Out& array, const char* name, int rank);

namespace detail {
void check_place(int device_type, const char* name);
void check_rank(std::size_t got, int rank, const char* name);
[[noreturn]] void refuse_type(nb::dlpack::dtype got, const char* wanted, const char* name);

// bool arrays may come as bytes: a buffer of '?' and one of 'B' hold the same.
template <typename T>
bool is_type(nb::dlpack::dtype type) {
  if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::uint8_t>) {
    if (type == nb::dtype<bool>() || type == nb::dtype<std::uint8_t>()) return true;
  }
  return type == nb::dtype<T>();
}

template <typename T, typename A>
Strided<T> grid(const A& array, const char* name, int rank) {
  using Plain = std::remove_const_t<T>;
  check_place(array.device_type(), name);
  check_rank(array.ndim(), rank, name);
  if (!is_type<Plain>(array.dtype())) refuse_type(array.dtype(), dtype_name(nb::dtype<Plain>()).c_str(), name);
  Strided<T> view;
  view.data = static_cast<T*>(array.data());
  view.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    const auto at = static_cast<std::size_t>(axis);
    view.extent[at] = static_cast<std::int64_t>(array.shape(at));
    view.stride[at] = array.stride(at);
  }
  return view;
}
}  // namespace detail

// Views of arrays of one known type.
template <typename T>
Strided<const T> read_grid(const In& array, const char* name, int rank) {
  return detail::grid<const T>(array, name, rank);
}
template <typename T>
Strided<T> write_grid(const Out& array, const char* name, int rank) {
  return detail::grid<T>(array, name, rank);
}

// Runs a kernel without the GIL. Views must have been taken before.
template <typename F>
auto without_gil(F&& kernel) {
  const nb::gil_scoped_release released;
  return kernel();
}

}  // namespace kvant::python
