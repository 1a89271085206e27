// src/cuda/ptx.cuh by definition, on the CPU (emulation.hpp).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/half.hpp"
#include "emulation.hpp"

namespace kvant::cuda::ptx {

inline std::uint8_t* dynamic_shared() {
  return emulation::memory(emulation::rank);
}
inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(p) - dynamic_shared());
}
// Copies come as late as they may; until then there are NaNs in their place.
inline void async_copy(std::uint32_t to, const void* from, std::size_t bytes) {
  std::memset(dynamic_shared() + to, 0xFF, bytes);
  emulation::current->copies.back().push_back({dynamic_shared() + to, from, bytes});
}
inline void async_copy16(std::uint32_t to, const void* from) {
  async_copy(to, from, 16);
}
inline void async_copy4(std::uint32_t to, const void* from) {
  async_copy(to, from, 4);
}
inline void async_commit() {
  emulation::current->copies.emplace_back();
}
// All groups of copies but the last `Pending` closed ones.
template <int Pending>
void async_wait() {
  auto& groups = emulation::current->copies;
  while (groups.size() > Pending + 1) {
    for (const auto& [to, from, bytes] : groups.front()) std::memcpy(to, from, bytes);
    groups.pop_front();
  }
}

inline std::uint32_t add_acquire_release(std::uint32_t* to, std::uint32_t x) {
  return atomicAdd(to, x);
}

// Mapped addresses have the block's number in the cluster on top, from 1 on.
inline int cluster_rank() {
  return emulation::rank;
}
inline int cluster_ranks() {
  return emulation::ranks;
}
inline std::uint32_t map_shared(std::uint32_t address, int rank) {
  return address | static_cast<std::uint32_t>(rank + 1) << 24;
}
inline std::uint8_t* mapped(std::uint32_t address) {
  return emulation::memory(static_cast<int>(address >> 24) - 1) + (address & 0xFFFFFFU);
}
inline void cluster_arrive() {}
inline void cluster_wait() {
  emulation::cluster.arrive_and_wait();
}

inline void mapped_arrive(std::uint32_t barrier) {
  emulation::barriers.at(barrier).arrive();
}
inline void mapped_expect(std::uint32_t barrier, std::uint32_t bytes) {
  emulation::barriers.at(barrier).bytes += bytes;
  mapped_arrive(barrier);
}
// Reads and writes as late as it may, when all warps have gone as far as they get.
inline void mapped_copy(std::uint32_t to, std::uint32_t from, std::uint32_t bytes, std::uint32_t barrier) {
  std::memset(mapped(to), 0xFF, bytes);
  emulation::barriers.at(barrier).copies.push_back({mapped(to), dynamic_shared() + from, bytes});
}

inline void barrier_init(std::uint32_t barrier, int arrivals = 1) {
  emulation::barriers[map_shared(barrier, emulation::rank)] = {arrivals};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(std::uint32_t barrier) {
  mapped_arrive(map_shared(barrier, emulation::rank));
}
inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  emulation::barriers.at(map_shared(barrier, emulation::rank)).wait(parity);
}
inline void barrier_expect(std::uint32_t barrier, std::uint32_t bytes) {
  mapped_expect(map_shared(barrier, emulation::rank), bytes);
}
// Writes as late as it may, when all warps have gone as far as they get.
inline void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier) {
  std::memset(dynamic_shared() + to, 0xFF, bytes);
  emulation::barriers.at(map_shared(barrier, emulation::rank)).copies.push_back({dynamic_shared() + to, from, bytes});
}
inline void proxy_fence() {}
template <int Registers>
void raise_registers() {}
template <int Registers>
void lower_registers() {}
inline void meet_some(int barrier, int threads) {  // barrier < 16: shared memory begins with no mbarrier
  const std::uint32_t key = map_shared(static_cast<std::uint32_t>(barrier), emulation::rank);
  emulation::barriers.try_emplace(key, emulation::Barrier{threads}).first->second.arrive_and_wait();
}
template <int Barrier, int Threads>
void meet() {
  static_assert(Barrier < 16);
  meet_some(Barrier, Threads);
}
inline void release_dependents() {}
inline void wait_for_predecessor() {}

template <bool Bfloat>
float2 widen2(std::uint32_t pair) {
  const DType type = Bfloat ? DType::bf16 : DType::f16;
  return {base::load_float(&pair, type, 0), base::load_float(&pair, type, 1)};
}
template <bool Bfloat>
std::uint32_t narrow2(float low, float high) {
  std::uint32_t pair = 0;
  base::store_float(&pair, Bfloat ? DType::bf16 : DType::f16, 0, low);
  base::store_float(&pair, Bfloat ? DType::bf16 : DType::f16, 1, high);
  return pair;
}

// D[row][column] += product(row, column) for the four elements of a lane, once every lane has put its operands down.
template <class Sum, class Product>
void multiply(Sum (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, const Product& product) {
  emulation::Warp& warp = emulation::warp();
  const int lane = emulation::lane();
  std::copy(a, a + 4, warp.a[lane]);
  warp.b[lane][0] = b0;
  warp.b[lane][1] = b1;
  warp.meet.arrive_and_wait();
  for (int i = 0; i < 4; ++i) c[i] += product(warp, lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
  warp.meet.arrive_and_wait();
}

template <bool SignedB>
void mma_bytes(std::int32_t (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  multiply(c, a, b0, b1, [](const emulation::Warp& warp, int row, int column) {
    std::int32_t sum = 0;
    for (int k = 0; k < 32; ++k) {
      const int t = k % 16 / 4;
      const auto x = warp.a[row % 8 * 4 + t][row / 8 + k / 16 * 2] >> (8 * (k % 4)) & 0xFFU;
      const auto y = warp.b[column * 4 + t][k / 16] >> (8 * (k % 4)) & 0xFFU;
      sum += static_cast<std::int32_t>(x) * (SignedB ? static_cast<std::int8_t>(y) : static_cast<std::int32_t>(y));
    }
    return sum;
  });
}
template <bool Bfloat>
void mma_half(float (&c)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  multiply(c, {a.x, a.y, a.z, a.w}, b0, b1, [](const emulation::Warp& warp, int row, int column) {
    double sum = 0;
    for (int k = 0; k < 16; k += 2) {
      const int t = k % 8 / 2;
      const float2 x = widen2<Bfloat>(warp.a[row % 8 * 4 + t][row / 8 + k / 8 * 2]);
      const float2 y = widen2<Bfloat>(warp.b[column * 4 + t][k / 8]);
      sum += static_cast<double>(x.x) * y.x + static_cast<double>(x.y) * y.y;
    }
    return static_cast<float>(sum);
  });
}
// Named by kernels of other pages that share headers with those of block pages.
template <bool SignedB>
void mma_bytes_from(std::int32_t start, std::int32_t (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                    std::uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = start;
  mma_bytes<SignedB>(c, a, b0, b1);
}
void mma_half_step(std::int32_t (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b);
void mma_half_step_from(std::int32_t start, std::int32_t (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b);

inline std::uint32_t permute(std::uint32_t x, std::uint32_t y, std::uint32_t selector) {
  return __byte_perm(x, y, selector);
}
inline std::uint32_t keep_in_register(std::uint32_t x) {
  return x;
}
template <std::uint32_t Value>
std::uint32_t hidden_constant() {
  return Value;
}

// Four 8x8 matrices in shared memory, a row per lane.
template <bool Transposed>
uint4 load_matrices(std::uint32_t row) {
  return emulation::exchange(row, [](const std::uint64_t* rows) {
    const int g = emulation::lane() / 4;
    const int t = emulation::lane() % 4;
    std::uint32_t x[4] = {};
    for (int m = 0; m < 4; ++m) {
      for (int i = 0; i < 2; ++i) {
        const int r = Transposed ? 2 * t + i : g;
        const int column = Transposed ? g : 2 * t + i;
        std::uint16_t element = 0;
        std::memcpy(&element, dynamic_shared() + rows[8 * m + r] + 2 * column, 2);
        x[m] |= static_cast<std::uint32_t>(element) << (16 * i);
      }
    }
    return uint4{x[0], x[1], x[2], x[3]};
  });
}

// An 8x8 matrix of 16-bit elements, two of a row per lane.
inline std::uint32_t transpose(std::uint32_t x) {
  return emulation::exchange(x, [](const std::uint64_t* values) {
    const int column = emulation::lane() / 4;
    std::uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * (emulation::lane() % 4) + i;
      result |= static_cast<std::uint32_t>(values[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFFU) << (16 * i);
    }
    return result;
  });
}

inline float exp2_fast(float x) {
  return std::exp2(x);
}
inline float log2_fast(float x) {
  return std::log2(x);
}
inline float reciprocal(float x) {
  return 1.0F / x;
}
template <int Bit>
float xor_max(float x) {
  return std::fmax(x, __shfl_xor_sync(0xFFFFFFFFU, x, Bit));
}
template <int Bit>
float xor_sum(float x) {
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, Bit);
}

}  // namespace kvant::cuda::ptx
