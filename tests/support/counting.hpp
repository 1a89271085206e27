// Bytes that the program holds from operator new, as malloc rounds them (O5 of the fault list). Link
// support/counting.cpp.
#pragma once

#include <cstdint>

namespace kvant::testing {

std::int64_t live_bytes();
// `count` more calls of operator new succeed and one fails; negative: none does.
void fail_allocation_after(std::int64_t count);

}  // namespace kvant::testing
