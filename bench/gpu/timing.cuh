// Graph replays and the read bandwidth of the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "cuda/device_buffer.hpp"

namespace kvant::cuda {

constexpr int kReplays = 31;

inline void need(cudaError_t code, const char* what) {
  check(code, what);
}

static __global__ void read_sum(const uint4* data, std::size_t count, unsigned* out) {
  unsigned sum = 0;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + stride);
    const uint4 c = __ldcs(data + i + 2 * stride), d = __ldcs(data + i + 3 * stride);
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  if (sum == 0x12345678U) *out = sum;
}

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Microseconds per launch of `launch(i)`, i = 0..count-1 captured in one graph.
template <class Launch>
double time_graph(int count, const Launch& launch) {
  cudaStream_t stream;
  need(cudaStreamCreate(&stream), "stream");
  need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < count; ++i) launch(i, stream);
  cudaGraph_t graph;
  need(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t exec;
  need(cudaGraphInstantiate(&exec, graph, 0), "graph");
  cudaEvent_t start, stop;
  need(cudaEventCreate(&start), "event");
  need(cudaEventCreate(&stop), "event");
  for (int i = 0; i < 3; ++i) need(cudaGraphLaunch(exec, stream), "graph");
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) {
    need(cudaEventRecord(start, stream), "event");
    need(cudaGraphLaunch(exec, stream), "graph");
    need(cudaEventRecord(stop, stream), "event");
    need(cudaEventSynchronize(stop), "replay");
    float ms = 0;
    need(cudaEventElapsedTime(&ms, start, stop), "event");
    times.push_back(ms * 1e3 / count);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return median(times);
}

inline double read_bandwidth() {
  const std::size_t bytes = std::size_t{4} << 30;
  DeviceBuffer<std::uint8_t> data(bytes);
  DeviceBuffer<unsigned> out(1);
  data.fill_zero();
  double best = 0;
  for (const int blocks : {132 * 2, 132 * 4, 132 * 8, 132 * 16}) {
    const double us = time_graph(1, [&](int, cudaStream_t stream) {
      read_sum<<<blocks, 512, 0, stream>>>(reinterpret_cast<const uint4*>(data.get()), bytes / 16, out.get());
    });
    best = std::max(best, static_cast<double>(bytes) / us * 1e-3);
  }
  return best;
}

}  // namespace kvant::cuda
