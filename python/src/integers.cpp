#include "integers.hpp"

#include <cmath>
#include <limits>

#include "kvant/error.hpp"

namespace kvant::python {
namespace {

using Code = nb::dlpack::dtype_code;

bool is(nb::dlpack::dtype type, Code code, int bits) {
  return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

template <typename T, typename From>
T exactly(From value, const char* name) {
  const auto wide = static_cast<double>(value);
  const bool fits = wide >= static_cast<double>(std::numeric_limits<T>::min()) &&
                    wide <= static_cast<double>(std::numeric_limits<T>::max()) && wide == std::floor(wide);
  if (!fits)
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " holds " + std::to_string(wide) + ", which is no code");
  return static_cast<T>(value);
}

// One pass over an array of any strides in row-major order.
template <typename T, typename From>
void copy_values(const In& array, const char* name, T* out) {
  const auto* data = static_cast<const From*>(array.data());
  std::size_t index[kMaxRank] = {};
  const std::size_t rank = array.ndim();
  for (std::size_t n = array.size(); n > 0; --n) {
    std::int64_t offset = 0;
    for (std::size_t axis = 0; axis < rank; ++axis)
      offset += static_cast<std::int64_t>(index[axis]) * array.stride(axis);
    *out++ = exactly<T>(data[offset], name);
    for (std::size_t axis = rank; axis-- > 0;) {
      if (++index[axis] < array.shape(axis)) break;
      index[axis] = 0;
    }
  }
}

}  // namespace

template <typename T>
Integers<T>::Integers(const In& array, const char* name, int rank) {
  detail::check_place(array.device_type(), name);
  detail::check_rank(array.ndim(), rank, name);
  if (detail::is_type<T>(array.dtype())) {
    view_ = read_grid<T>(array, name, rank);
    return;
  }
  data_ = std::make_unique<T[]>(array.size());
  const nb::dlpack::dtype type = array.dtype();
  if (is(type, Code::UInt, 8) || is(type, Code::Bool, 8)) {
    copy_values<T, std::uint8_t>(array, name, data_.get());
  } else if (is(type, Code::Int, 8)) {
    copy_values<T, std::int8_t>(array, name, data_.get());
  } else if (is(type, Code::Int, 16)) {
    copy_values<T, std::int16_t>(array, name, data_.get());
  } else if (is(type, Code::Int, 32)) {
    copy_values<T, std::int32_t>(array, name, data_.get());
  } else if (is(type, Code::UInt, 32)) {
    copy_values<T, std::uint32_t>(array, name, data_.get());
  } else if (is(type, Code::Int, 64)) {
    copy_values<T, std::int64_t>(array, name, data_.get());
  } else if (is(type, Code::UInt, 64)) {
    copy_values<T, std::uint64_t>(array, name, data_.get());
  } else if (is(type, Code::Float, 32)) {
    copy_values<T, float>(array, name, data_.get());
  } else {
    detail::refuse_type(type, "integers or f32", name);
  }
  Extents extent{};
  for (int axis = 0; axis < rank; ++axis) {
    extent[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(array.shape(static_cast<std::size_t>(axis)));
  }
  view_ = {data_.get(), rank, extent, dense_strides(rank, extent)};
}

template class Integers<std::uint8_t>;
template class Integers<std::int32_t>;

}  // namespace kvant::python
