// Bytes that the whole program has allocated with operator new and not yet freed, as requested (O5 of the fault list).
#pragma once

#include <cstdint>

namespace kvant::testing {

// -1 where a sanitizer owns the allocator.
std::int64_t live_bytes();

}  // namespace kvant::testing
