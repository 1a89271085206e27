// Enough of CUDA for the kernels over block pages and those of prefill to run on the CPU, a host thread per lane, one
// thread block after another: to check what they compute, for every shape, where no GPU is. Included before any kernel;
// cuda/ptx.cuh of this folder takes the place of the machine instructions. Says nothing about speed, and little about
// races: exchanges between lanes are barriers here.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/half.hpp"

#define __device__
#define __global__
#define __grid_constant__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline thread_local Index3 threadIdx, blockIdx;
inline Index3 gridDim, blockDim;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  std::int32_t x, y, z, w;
};

namespace emulation {

constexpr int kLanes = 32;

struct Warp {
  std::barrier<> meet{kLanes};
  std::uint64_t value[kLanes];
  std::uint32_t a[kLanes][4], b[kLanes][2];  // operands of a matrix instruction
};
inline std::vector<std::unique_ptr<Warp>> warps;
inline std::unique_ptr<std::barrier<>> block;

inline int lane() {
  return static_cast<int>(threadIdx.x % kLanes);
}
inline Warp& warp() {
  return *warps[threadIdx.x / kLanes];
}

// What `use` makes of the values of all lanes.
template <class T, class Use>
auto exchange(T x, const Use& use) {
  Warp& w = warp();
  w.value[lane()] = 0;
  std::memcpy(&w.value[lane()], &x, sizeof x);
  w.meet.arrive_and_wait();
  const auto result = use(w.value);
  w.meet.arrive_and_wait();
  return result;
}

// Runs every thread of a grid of blocks (x, y).
template <class Kernel>
void launch(int threads, int blocks_x, int blocks_y, const Kernel& kernel) {
  gridDim = {static_cast<unsigned>(blocks_x), static_cast<unsigned>(blocks_y), 1};
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      warps.clear();
      for (int i = 0; i < threads / kLanes; ++i) warps.push_back(std::make_unique<Warp>());
      block = std::make_unique<std::barrier<>>(threads);
      std::vector<std::thread> all;
      for (unsigned t = 0; t < static_cast<unsigned>(threads); ++t) {
        all.emplace_back([&, t] {
          threadIdx = {t, 0, 0};
          blockIdx = {x, y, 0};
          kernel();
        });
      }
      for (std::thread& thread : all) thread.join();
    }
  }
}

}  // namespace emulation

inline void __syncwarp() {
  emulation::warp().meet.arrive_and_wait();
}
inline void __syncthreads() {
  emulation::block->arrive_and_wait();
}
template <class T>
T __shfl_sync(unsigned /*mask*/, T x, int from) {
  return emulation::exchange(x, [&](const std::uint64_t* values) {
    T result;
    std::memcpy(&result, &values[from % emulation::kLanes], sizeof result);
    return result;
  });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits) {
  return __shfl_sync(mask, x, emulation::lane() ^ bits);
}
inline bool __any_sync(unsigned /*mask*/, bool x) {
  return emulation::exchange(x, [](const std::uint64_t* values) {
    return std::any_of(values, values + emulation::kLanes, [](std::uint64_t v) { return v != 0; });
  });
}
inline unsigned __reduce_max_sync(unsigned /*mask*/, unsigned x) {
  return emulation::exchange(x, [](const std::uint64_t* values) {
    return static_cast<unsigned>(*std::max_element(values, values + emulation::kLanes));
  });
}
inline unsigned __reduce_or_sync(unsigned /*mask*/, unsigned x) {
  return emulation::exchange(x, [](const std::uint64_t* values) {
    std::uint64_t all = 0;
    for (int i = 0; i < emulation::kLanes; ++i) all |= values[i];
    return static_cast<unsigned>(all);
  });
}

// The bytes of {x, y} that the selector's nibbles name; a nibble's high bit spreads the byte's sign.
inline std::uint32_t __byte_perm(std::uint32_t x, std::uint32_t y, std::uint32_t selector) {
  const std::uint64_t bytes = x | static_cast<std::uint64_t>(y) << 32;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 15U;
    auto byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7U)) & 0xFFU);
    if ((nibble & 8U) != 0) byte = (byte & 0x80U) != 0 ? 0xFFU : 0U;
    result |= byte << (8 * i);
  }
  return result;
}
inline std::uint32_t __funnelshift_r(std::uint32_t low, std::uint32_t high, unsigned shift) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31U));
}
// The larger one of each half.
inline std::uint32_t __vmaxu2(std::uint32_t x, std::uint32_t y) {
  return std::max(x & 0xFFFFU, y & 0xFFFFU) | std::max(x >> 16, y >> 16) << 16;
}
template <class To, class From>
To copy_bits(From x) {
  To to;
  static_assert(sizeof to == sizeof x);
  std::memcpy(&to, &x, sizeof to);
  return to;
}
inline std::uint32_t __float_as_uint(float x) {
  return copy_bits<std::uint32_t>(x);
}
inline float __uint_as_float(std::uint32_t x) {
  return copy_bits<float>(x);
}
inline int __float_as_int(float x) {
  return copy_bits<int>(x);
}
inline float __int_as_float(std::int32_t x) {
  return copy_bits<float>(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
template <class T>
T atomicAdd(T* to, T x) {
  return std::atomic_ref<T>(*to).fetch_add(x);
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline void __threadfence() {}
[[noreturn]] inline void __trap() {
  std::abort();
}

struct __half2 {
  std::uint16_t x, y;
};
inline __half2 __floats2half2_rn(float x, float y) {
  return {kvant::base::float_to_half(x), kvant::base::float_to_half(y)};
}
inline __half2 __float2half2_rn(float x) {
  return __floats2half2_rn(x, x);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto fma = [](std::uint16_t x, std::uint16_t y, std::uint16_t z) {
    return std::fma(kvant::base::half_to_float(x), kvant::base::half_to_float(y), kvant::base::half_to_float(z));
  };
  return __floats2half2_rn(fma(a.x, b.x, c.x), fma(a.y, b.y, c.y));
}

namespace kvant::cuda {
extern std::uint8_t shared[];  // what kernels declare as theirs
}
