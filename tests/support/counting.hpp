// Bytes that the program holds from operator new, as malloc rounds them (O5 of the fault list). Link
// support/counting.cpp.
#pragma once

#include <cstdint>

namespace kvant::testing {

std::int64_t live_bytes();

}  // namespace kvant::testing
