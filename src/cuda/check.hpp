// CUDA calls that fail throw kvant::Error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "base/checked.hpp"

namespace kvant::cuda {

inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // an error of one call must not show up in the next
  base::fail(code == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::unsupported,
             std::string(what) + ": " + cudaGetErrorString(code));
}

inline cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "CUDA device");
  return device;
}

// Bytes of shared memory that the current device gives a block.
inline int most_shared_bytes() {
  int most = 0;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device()),
        "shared memory of a block");
  return most;
}

// Lets `function` have all of it. A kernel serves pools of several sizes: what one needs must not lower what another,
// perhaps in another thread, has been allowed.
inline void allow_most_shared(const void* function) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function), "attributes of a kernel");
  const int dynamic = most_shared_bytes() - static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
        "shared memory of a kernel");
}

// Waits for what the default stream has been given: copies and fills that return before they are done, and that streams
// of the cudaStreamNonBlocking kind do not wait for.
inline void settle_default_stream() {
  check(cudaStreamSynchronize(cudaStreamLegacy), "the default stream");
}

// Whether `function` waits for its predecessor (ptx::wait_for_predecessor), so that it may be launched before that has
// ended. PTX of an older architecture does not, on whatever device it runs.
inline bool waits_for_predecessor(const void* function) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function), "attributes of a kernel");
  return attributes.ptxVersion >= 90;
}

}  // namespace kvant::cuda
