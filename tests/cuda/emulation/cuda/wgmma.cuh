// src/cuda/wgmma.cuh by definition, on the CPU (emulation.hpp). Instructions read shared memory and write their results
// as late as they may: when a wait says that they are done, after all other warps have gone as far as they get.
#pragma once

#include <cmath>
#include <deque>
#include <functional>

#include "cuda/ptx.cuh"

#define KVANT_WGMMA

namespace kvant::cuda::wgmma {

// Core matrices of 8 rows by 16 bytes, strides between them in depth and in rows.
template <int DepthStride, int RowStride>
class Description {
 public:
  explicit Description(std::uint32_t address) : address_(address) {}
  std::uint64_t at(int bytes) const {
    const std::uint64_t strides = static_cast<std::uint64_t>(RowStride) << 40 | static_cast<std::uint64_t>(DepthStride)
                                                                                    << 20;
    return strides | (address_ + static_cast<std::uint32_t>(bytes));
  }

 private:
  std::uint32_t address_;
};

// Element (row, depth). transposed: the 16 bytes of a core matrix run along the rows.
template <bool Bfloat>
float element(std::uint64_t description, int row, int depth, bool transposed) {
  const auto field = [&](int shift) { return static_cast<int>(description >> shift & 0xFFFFFU); };
  const int inside = transposed ? depth % 8 * 16 + row % 8 * 2 : row % 8 * 16 + depth % 8 * 2;
  const int at = field(0) + depth / 8 * field(20) + row / 8 * field(40) + inside;
  return base::load_float(ptx::dynamic_shared() + at, Bfloat ? DType::bf16 : DType::f16, 0);
}

// What a lane has started: groups of instructions, the last one not closed yet.
inline std::vector<std::deque<std::vector<std::function<void()>>>> started;
inline auto& groups() {
  const std::size_t thread = static_cast<unsigned>(emulation::rank) * blockDim.x + threadIdx.x;
  if (started.size() <= thread) started.resize(thread + 1);
  auto& mine = started[thread];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

inline void begin() {}
inline void commit() {
  groups().emplace_back();
}
template <int Pending>
void wait() {
  emulation::let_others_run();
  while (groups().size() > Pending + 1) {
    for (const auto& instruction : groups().front()) instruction();
    groups().pop_front();
  }
}
template <int Count>
void settle(float (&/*x*/)[Count][4]) {}

// Lane 4g + t has rows g and g + 8 of its warp's 16, columns 8n + 2t and + 1. a(row, depth): those two rows, 0 and 1.
template <bool Bfloat, int Columns8, class A>
void start(float (&d)[Columns8][4], std::uint64_t b, bool add, bool transposed, const A& a) {
  float(*to)[4] = d;
  const int t = emulation::lane() % 4;
  groups().back().push_back([=] {
    for (int n = 0; n < Columns8; ++n) {
      for (int i = 0; i < 4; ++i) {
        double sum = add ? to[n][i] : 0;
        for (int k = 0; k < 16; ++k) {
          sum += static_cast<double>(a(i / 2, k)) * element<Bfloat>(b, 8 * n + 2 * t + i % 2, k, transposed);
        }
        to[n][i] = static_cast<float>(sum);
      }
    }
  });
}

template <bool Bfloat, bool Transposed>
void multiply_scores(float (&d)[8][4], std::uint64_t a, std::uint64_t b, int add) {
  const int first = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + emulation::lane() / 4;
  if (add == 0) std::fill(&d[0][0], &d[0][0] + 32, NAN);
  start<Bfloat>(d, b, add != 0, Transposed,
                [=](int row, int depth) { return element<Bfloat>(a, first + 8 * row, depth, false); });
}
template <bool Bfloat, int Columns8>
void multiply_outputs(float (&d)[Columns8][4], const uint4& a, std::uint64_t b) {
  emulation::Warp& warp = emulation::warp();
  const std::uint32_t own[4] = {a.x, a.y, a.z, a.w};
  std::copy(own, own + 4, warp.a[emulation::lane()]);
  warp.meet.arrive_and_wait();
  std::array<std::array<float, 16>, 2> rows{};
  for (int k = 0; k < 16; ++k) {
    for (int e = 0; e < 2; ++e) {
      const float2 pair = ptx::widen2<Bfloat>(warp.a[emulation::lane() / 4 * 4 + k % 8 / 2][e + k / 8 * 2]);
      rows[static_cast<std::size_t>(e)][static_cast<std::size_t>(k)] = k % 2 == 0 ? pair.x : pair.y;
    }
  }
  warp.meet.arrive_and_wait();
  start<Bfloat>(d, b, true, false, [=](int row, int depth) {
    return rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(depth)];
  });
}

}  // namespace kvant::cuda::wgmma
