// Which instruction sets this build has kernels for, which one runs, and how to force one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvant {

const char* version() noexcept;  // "0.1.0"

// Names of the kernel sets that this CPU can run, best first, for example {"avx512vnni", "avx512", "avx2", "sse4",
// "ssse3", "scalar"}. "scalar" is plain C++ and always there.
std::vector<std::string> kernel_names();

// The set in use. KVANT_KERNEL in the environment chooses one at start; an unknown name there is reported by the first
// call as Error(invalid_argument).
std::string active_kernel();

// Makes every later call use the named set. Throws Error(invalid_argument) listing the choices. Not thread-safe.
void force_kernel(std::string_view name);

}  // namespace kvant
