// Checked size arithmetic and the helpers that raise kvant::Error.
#pragma once

#include <cstddef>
#include <string>

#include "kvant/error.hpp"

namespace kvant::base {

[[noreturn]] void fail(ErrorCode code, const std::string& message);

inline void require(bool condition, ErrorCode code, const char* message) {
  if (!condition) fail(code, message);
}

// Throws Error(out_of_memory) when the product or sum does not fit size_t.
std::size_t checked_multiply(std::size_t a, std::size_t b);
std::size_t checked_add(std::size_t a, std::size_t b);

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace kvant::base
