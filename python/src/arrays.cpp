#include "arrays.hpp"

#include "kvant/error.hpp"

namespace kvant::python {
namespace {

using Code = nb::dlpack::dtype_code;

bool is(nb::dlpack::dtype type, Code code, int bits) {
  return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
}

DType float_type(nb::dlpack::dtype type, const char* name) {
  if (is(type, Code::Float, 32)) return DType::f32;
  if (is(type, Code::Float, 16)) return DType::f16;
  if (is(type, Code::Bfloat, 16) || is(type, Code::UInt, 16)) return DType::bf16;
  detail::refuse_type(type, "f16, bf16 or f32", name);
}

template <typename View, typename A>
View floats(const A& array, const char* name, int rank) {
  detail::check_place(array.device_type(), name);
  detail::check_rank(array.ndim(), rank, name);
  View view;
  view.data = array.data();
  view.type = float_type(array.dtype(), name);
  view.rank = rank;
  for (int axis = 0; axis < rank; ++axis) {
    const auto at = static_cast<std::size_t>(axis);
    view.extent[at] = static_cast<std::int64_t>(array.shape(at));
    view.stride[at] = array.stride(at);
  }
  return view;
}

}  // namespace

std::string dtype_name(nb::dlpack::dtype type) {
  if (is(type, Code::Float, 32)) return "f32";
  if (is(type, Code::Float, 16)) return "f16";
  if (is(type, Code::Bfloat, 16) || is(type, Code::UInt, 16)) return "bf16";
  const std::string bits = std::to_string(type.bits);
  switch (static_cast<Code>(type.code)) {
    case Code::Bool:
      return "bool";
    case Code::Int:
      return "int" + bits;
    case Code::UInt:
      return "uint" + bits;
    case Code::Float:
      return "float" + bits;
    case Code::Complex:
      return "complex" + bits;
    default:
      return "dlpack type " + std::to_string(type.code) + " of " + bits + " bits";
  }
}

ConstArray read_floats(const In& array, const char* name, int rank) {
  return floats<ConstArray>(array, name, rank);
}

Array write_floats(const Out& array, const char* name, int rank) {
  return floats<Array>(array, name, rank);
}

namespace detail {

void check_place(int device_type, const char* name) {
  if (device_type == nb::device::cpu::value) return;
  throw Error(ErrorCode::unsupported, std::string(name) + " is in the memory of DLPack device type " +
                                          std::to_string(device_type) + "; only CPU arrays are read");
}

void check_rank(std::size_t got, int rank, const char* name) {
  if (got == static_cast<std::size_t>(rank)) return;
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " has " + std::to_string(got) + " axes, not " + std::to_string(rank));
}

void refuse_type(nb::dlpack::dtype got, const char* wanted, const char* name) {
  throw Error(ErrorCode::invalid_argument,
              std::string(name) + " is an array of " + dtype_name(got) + ", not of " + wanted);
}

}  // namespace detail
}  // namespace kvant::python
