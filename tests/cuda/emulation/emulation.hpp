// Enough of CUDA for the kernels over block pages and those of prefill to run on the CPU, a stack of its own per lane,
// one cluster of thread blocks after another: to check what they compute, for every shape, where no GPU is. Included
// before any kernel; cuda/ptx.cuh of this folder takes the place of the machine instructions. Says nothing about speed,
// and little about races: lanes run one after another from barrier to barrier, and exchanges between lanes are barriers
// here.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/half.hpp"

#define __device__
#define __global__
#define __grid_constant__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx, gridDim, blockDim;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
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

namespace kvant::cuda {
extern std::uint8_t shared[];  // what kernels declare as theirs: that of the first block of a cluster
}

namespace emulation {

constexpr int kLanes = 32;

// ---- clusters: blocks that run at once

constexpr std::size_t kShared = 227 * 1024;
struct alignas(128) Shared {
  std::uint8_t bytes[kShared];
};
inline int ranks = 1;  // blocks
inline int rank = 0;   // of the lane that runs
inline std::vector<std::unique_ptr<Shared>> others;

inline std::uint8_t* memory(int of) {
  return of == 0 ? kvant::cuda::shared : others[static_cast<std::size_t>(of - 1)]->bytes;
}
inline void fill_memory(int in_cluster, std::uint8_t value) {
  while (others.size() + 1 < static_cast<std::size_t>(in_cluster)) others.push_back(std::make_unique<Shared>());
  for (int of = 0; of < in_cluster; ++of) std::memset(memory(of), value, kShared);
}

// ---- lanes: contexts that run until they have to wait

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

struct Barrier {
  int expected = 0;
  int arrived = 0;
  int round = 0;
  std::int64_t bytes = 0;      // still to come
  std::vector<Copy> copies{};  // under way

  void arrive_and_wait();
  // As an mbarrier: those who arrive and those who wait are others. parity: of the round that must be over.
  void arrive();
  void wait(unsigned parity);
  // What was under way is there; whether there was anything.
  bool finish_copies();

 private:
  void suspend();
  void end_round();
};

struct Lane {
  std::unique_ptr<std::byte[]> stack;
  ucontext_t start;
  jmp_buf at;
  bool started = false;
  bool done = false;
  const Barrier* waits = nullptr;
  int round = 0;                         // of that barrier when the lane arrived
  std::deque<std::vector<Copy>> copies;  // on their way, in groups; the last is still open

  int paused = -1;  // the turn of all warps in which it lets the others go first

  bool ready() const;
};

constexpr std::size_t kStack = 256 << 10;
inline std::vector<Lane> lanes;
inline std::function<void()> body;
inline Lane* current = nullptr;
inline jmp_buf scheduler;
inline int turn = 0;
inline unsigned first_block = 0;                   // of the cluster
inline std::map<std::uint32_t, Barrier> barriers;  // by their address in shared memory, or number, and block

inline bool Lane::ready() const {
  return !done && paused != turn && (waits == nullptr || waits->round != round);
}
// Every other warp goes on, as far as it gets, before this lane does.
[[gnu::noinline]] inline void let_others_run() {
  current->waits = nullptr;
  current->paused = turn;
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

[[gnu::noinline]] inline void Barrier::suspend() {
  current->waits = this;
  current->round = round;
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}
inline void Barrier::end_round() {
  if (arrived != expected || bytes != 0) return;
  arrived = 0;
  ++round;
}
inline void Barrier::arrive() {
  if (++arrived > expected) std::abort();
  end_round();
}
inline bool Barrier::finish_copies() {
  const bool any = !copies.empty();
  for (const auto& [to, from, count] : copies) {
    std::memcpy(to, from, count);
    bytes -= static_cast<std::int64_t>(count);
  }
  copies.clear();
  if (any) end_round();
  return any;
}
inline void Barrier::arrive_and_wait() {
  const int before = round;
  arrive();
  if (round == before) suspend();
}
inline void Barrier::wait(unsigned parity) {
  while ((static_cast<unsigned>(round) & 1U) == parity) suspend();
}

inline void enter() {
  body();
  current->done = true;
  _longjmp(scheduler, 1);
}

// Runs a lane until it waits or ends.
[[gnu::noinline]] inline void resume(std::size_t thread) {
  current = &lanes[thread];
  threadIdx.x = static_cast<unsigned>(thread) % blockDim.x;
  rank = static_cast<int>(static_cast<unsigned>(thread) / blockDim.x);
  blockIdx.x = first_block + static_cast<unsigned>(rank);
  if (_setjmp(scheduler) != 0) return;
  if (current->started) _longjmp(current->at, 1);
  current->started = true;
  setcontext(&current->start);
}

[[gnu::noinline]] inline void prepare(Lane& lane) {
  lane.started = lane.done = false;
  lane.waits = nullptr;
  lane.paused = -1;
  lane.copies.assign(1, {});
  getcontext(&lane.start);
  lane.start.uc_stack.ss_sp = lane.stack.get();
  lane.start.uc_stack.ss_size = kStack;
  lane.start.uc_link = nullptr;
  makecontext(&lane.start, enter, 0);
}

// As far as it gets; whether that is anywhere.
inline bool run_warp(std::size_t warp) {
  bool any = false;
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t t = warp * kLanes; t < (warp + 1) * kLanes; ++t) {
      if (!lanes[t].ready()) continue;
      resume(t);
      any = moved = true;
    }
  }
  return any;
}

// Warps from the first to the last, from the last to the first, or at random: clusters take turns, so that none can
// rely on another that is always ahead. threads: of the cluster.
inline int run = 0;
inline void run_cluster(int threads, const std::function<void()>& kernel) {
  body = kernel;
  lanes.resize(std::max(lanes.size(), static_cast<std::size_t>(threads)));
  for (Lane& lane : lanes) {
    if (!lane.stack) lane.stack = std::make_unique<std::byte[]>(kStack);
    prepare(lane);
  }
  std::vector<std::size_t> order(static_cast<std::size_t>(threads / kLanes));
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (run % 3 == 1) std::reverse(order.begin(), order.end());
  std::mt19937 random(static_cast<unsigned>(run));
  bool any = true;
  for (turn = 0; any; ++turn) {
    any = false;
    if (run % 3 == 2) std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t warp : order) any = run_warp(warp) || any;
    if (any) continue;  // copies between blocks end as late as they may
    for (auto& [key, barrier] : barriers) any = barrier.finish_copies() || any;
  }
  ++run;
  for (std::size_t t = 0; t < static_cast<std::size_t>(threads); ++t) {
    if (!lanes[t].done) std::abort();  // some lane never came to the barrier
  }
}

// ---- thread blocks

struct Warp {
  Barrier meet{kLanes};
  std::uint64_t value[kLanes];
  std::uint32_t a[kLanes][4], b[kLanes][2];  // operands of a matrix instruction
};
inline std::vector<std::unique_ptr<Warp>> warps;
inline std::vector<Barrier> blocks;
inline Barrier cluster;

inline int lane() {
  return static_cast<int>(threadIdx.x % kLanes);
}
inline Warp& warp() {
  return *warps[(static_cast<unsigned>(rank) * blockDim.x + threadIdx.x) / kLanes];
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

// Runs every thread of a grid of blocks (x, y, z), in clusters of so many along x; of more than one, after
// fill_memory().
template <class Kernel>
void launch(int threads, int blocks_x, int blocks_y, const Kernel& kernel, int blocks_z = 1, int in_cluster = 1) {
  ranks = in_cluster;
  gridDim = {static_cast<unsigned>(blocks_x), static_cast<unsigned>(blocks_y), static_cast<unsigned>(blocks_z)};
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; x += static_cast<unsigned>(ranks)) {
        warps.clear();
        barriers.clear();
        for (int i = 0; i < ranks * threads / kLanes; ++i) warps.push_back(std::make_unique<Warp>());
        blocks.assign(static_cast<std::size_t>(ranks), Barrier{threads});
        cluster = {ranks * threads};
        blockIdx = {x, y, z};
        first_block = x;
        run_cluster(ranks * threads, kernel);
      }
    }
  }
}

}  // namespace emulation

inline void __syncwarp() {
  emulation::warp().meet.arrive_and_wait();
}
inline void __syncthreads() {
  emulation::blocks[static_cast<std::size_t>(emulation::rank)].arrive_and_wait();
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
T __shfl_up_sync(unsigned mask, T x, int count) {
  return __shfl_sync(mask, x, emulation::lane() < count ? emulation::lane() : emulation::lane() - count);
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
inline unsigned __ballot_sync(unsigned /*mask*/, bool x) {
  return emulation::exchange(x, [](const std::uint64_t* values) {
    unsigned all = 0;
    for (int i = 0; i < emulation::kLanes; ++i) all |= static_cast<unsigned>(values[i] != 0) << i;
    return all;
  });
}
template <class T, class Join>
T reduce_lanes(T x, const Join& join) {
  return emulation::exchange(x, [&](const std::uint64_t* values) {
    T all = static_cast<T>(values[0]);
    for (int i = 1; i < emulation::kLanes; ++i) all = join(all, static_cast<T>(values[i]));
    return all;
  });
}
inline unsigned __reduce_or_sync(unsigned /*mask*/, unsigned x) {
  return reduce_lanes(x, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_min_sync(unsigned /*mask*/, unsigned x) {
  return reduce_lanes(x, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_max_sync(unsigned /*mask*/, unsigned x) {
  return reduce_lanes(x, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __reduce_add_sync(unsigned /*mask*/, int x) {
  return reduce_lanes(x, [](int a, int b) { return a + b; });
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
inline long long __double_as_longlong(double x) {
  return copy_bits<long long>(x);
}
inline double __hiloint2double(int high, int low) {
  return copy_bits<double>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                           static_cast<std::uint32_t>(low));
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}

// Arithmetic that is rounded once, whatever stands around it (compiled without contraction).
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0F / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline double __fma_rn(double a, double b, double c) {
  return std::fma(a, b, c);
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
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
