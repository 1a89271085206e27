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

// Bytes of shared memory that the current device gives a block.
inline int most_shared_bytes() {
  int device = 0;
  int most = 0;
  check(cudaGetDevice(&device), "CUDA device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory of a block");
  return most;
}

// Whether `function` waits for its predecessor (ptx::wait_for_predecessor), so that it may be launched before that has
// ended. PTX of an older architecture does not, on whatever device it runs.
inline bool waits_for_predecessor(const void* function) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function), "attributes of a kernel");
  return attributes.ptxVersion >= 90;
}

}  // namespace kvant::cuda
