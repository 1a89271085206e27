// The part of the CUDA runtime that the library's host code calls, on host memory. Everything has happened when a call
// returns.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "cuda/host/host.hpp"
#include "cuda/host/kernels.hpp"

namespace kvant::cuda::host {

State& state() {
  static State one;
  return one;
}

namespace {

bool fails() {
  return state().fail_after >= 0 && state().fail_after-- == 0;
}

}  // namespace
}  // namespace kvant::cuda::host

using kvant::cuda::host::fails;
using kvant::cuda::host::state;

extern "C" {

cudaError_t cudaMalloc(void** data, std::size_t size) {
  *data = std::malloc(size);
  if (*data == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xA5, size);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, std::size_t size) {
  return cudaMemsetAsync(data, value, size, nullptr);
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t size, cudaStream_t) {
  if (fails()) return cudaErrorStreamCaptureImplicit;
  if (size > 0) std::memset(data, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t) {
  if (fails()) return cudaErrorStreamCaptureImplicit;
  if (size > 0) std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = state().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = state().device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "host");
  properties->major = 9;
  properties->multiProcessorCount = state().multiprocessors;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  *count = state().multiprocessors / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** parameters) {
  if (fails()) return cudaErrorInvalidValue;
  const int ranks = *static_cast<int*>(parameters[2]);
  kvant::cuda::host::run_decode(function, *static_cast<kvant::cuda::DecodeArgs*>(parameters[0]),
                                *static_cast<kvant::cuda::InlinePlan*>(parameters[1]),
                                static_cast<int>(config->gridDim.x) / ranks);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3, void** parameters, std::size_t, cudaStream_t) {
  if (fails()) return cudaErrorInvalidValue;
  kvant::cuda::host::run_seal(*static_cast<kvant::cuda::SealBatch*>(parameters[0]), grid.x);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "made to fail";
}

}  // extern "C"
