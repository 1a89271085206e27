#include <cstdint>
#include <limits>

#include "base/checked.hpp"
#include "kvant/types.hpp"

namespace kvant {

const char* name_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::out_of_range:
      return "out_of_range";
    case ErrorCode::not_finite:
      return "not_finite";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::bad_format:
      return "bad_format";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
  }
  return "unknown";
}

const char* name_of(DType type) noexcept {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "unknown";
}

namespace base {

void fail(ErrorCode code, const std::string& message) {
  throw Error(code, message);
}

std::size_t checked_multiply(std::size_t a, std::size_t b) {
  std::size_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    fail(ErrorCode::out_of_memory, "size " + std::to_string(a) + " x " + std::to_string(b) + " overflows");
  }
  return result;
}

std::size_t checked_add(std::size_t a, std::size_t b) {
  std::size_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    fail(ErrorCode::out_of_memory, "size " + std::to_string(a) + " + " + std::to_string(b) + " overflows");
  }
  return result;
}

}  // namespace base
}  // namespace kvant
