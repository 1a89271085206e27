// Matrix tiles (Intel AMX): eight registers of 16 rows x 64 bytes. One instruction multiplies 16 rows of x (signed
// bytes) by 64 depth indices x 16 tile rows of codes (unsigned bytes) into 16 x 16 32-bit sums; the joined codes
// [quad][row tile][16 lanes][4] already are the operand that it wants, 16 rows of 64 bytes one row block apart.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiles/kernels.hpp"

#if defined(__x86_64__) && defined(__linux__)
#define KVANT_AMX 1
#else
#define KVANT_AMX 0
#endif

namespace kvant::tiles {

constexpr int kMatrixDepth = 64;  // depth indices of one instruction
constexpr int kMatrixRows = 16;   // rows of x
// Vectors from which matrix products are not slower than VNNI: below, half of the rows of x or more would be empty.
constexpr int kMatrixVectors = 5;

// Rows of x against up to 4 row tiles.
struct MatrixProduct {
  const std::int32_t* x = nullptr;  // 16 rows of 16 words
  std::ptrdiff_t x_step = 0;        // words to the next 64 depth indices
  const std::uint8_t* codes = nullptr;
  std::ptrdiff_t quad_bytes = 0;  // from a quad of depth indices to the next
  int steps = 0;                  // of 64 depth indices
  std::int32_t* sums = nullptr;   // out [tiles][16 rows of x][16 rows of the tile]
};

// The same result from plain arithmetic, so that tests of the code around it run on every CPU.
template <int kTiles>
struct EmulatedMatrix {
  static void multiply(const MatrixProduct& a) {
    for (int i = 0; i < kTiles * kMatrixRows * 16; ++i) a.sums[i] = 0;
    const auto* x = reinterpret_cast<const std::int8_t*>(a.x);
    for (int i = 0; i < kTiles * kMatrixRows * a.steps * kMatrixDepth; ++i) {
      const int depth = i % kMatrixDepth;
      const int step = i / kMatrixDepth % a.steps;
      const int row = i / kMatrixDepth / a.steps % kMatrixRows;
      const int tile = i / kMatrixDepth / a.steps / kMatrixRows;
      const std::uint8_t* code = a.codes + (step * kMatrixDepth + depth) / 4 * a.quad_bytes + tile * 64 + depth % 4;
      const int factor = static_cast<int>(x[(step * a.x_step + row * 16) * 4 + depth]);
      for (int lane = 0; lane < 16; ++lane) a.sums[(tile * kMatrixRows + row) * 16 + lane] += factor * code[4 * lane];
    }
  }
  static bool begin(ThreadState&) { return false; }
  static void end(const ThreadState&) {}
};

#if KVANT_AMX
#define KVANT_AMX_ATTR __attribute__((target("amx-tile,amx-int8")))

// Palette 1: eight tiles of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == sizeof(ThreadState));

// GCC's intrinsics tell the compiler neither which memory they read nor all that they write: instructions by name.
template <int kTiles>
struct AmxMatrix {
  // Sums in tmm0-3, x in tmm4, codes in turn in tmm5-7. Loads are the bound where one load of codes meets only one tile
  // of x: 8 of 8 cycles and more for four products of 16 cycles, half of them empty at 4 vectors.
  KVANT_AMX_ATTR static void multiply(const MatrixProduct& a) {
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::);
    const std::int32_t* x = a.x;
    const std::uint8_t* codes = a.codes;
    for (int step = 0; step < a.steps; ++step) {
      asm volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(x), "r"(std::ptrdiff_t{64}) : "memory");
      asm volatile("tileloadd (%0,%1,1), %%tmm5\n\ttdpbsud %%tmm5, %%tmm4, %%tmm0"
                   :
                   : "r"(codes), "r"(a.quad_bytes)
                   : "memory");
      if constexpr (kTiles > 1) {
        asm volatile("tileloadd 64(%0,%1,1), %%tmm6\n\ttdpbsud %%tmm6, %%tmm4, %%tmm1"
                     :
                     : "r"(codes), "r"(a.quad_bytes)
                     : "memory");
      }
      if constexpr (kTiles > 2) {
        asm volatile(
            "tileloadd 128(%0,%1,1), %%tmm7\n\ttdpbsud %%tmm7, %%tmm4, %%tmm2\n\t"
            "tileloadd 192(%0,%1,1), %%tmm5\n\ttdpbsud %%tmm5, %%tmm4, %%tmm3"
            :
            : "r"(codes), "r"(a.quad_bytes)
            : "memory");
      }
      x += a.x_step;
      codes += 16 * a.quad_bytes;
    }
    asm volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(a.sums), "r"(std::ptrdiff_t{64}) : "memory");
    if constexpr (kTiles > 1) {
      asm volatile("tilestored %%tmm1, 1024(%0,%1,1)" : : "r"(a.sums), "r"(std::ptrdiff_t{64}) : "memory");
    }
    if constexpr (kTiles > 2) {
      asm volatile("tilestored %%tmm2, 2048(%0,%1,1)\n\ttilestored %%tmm3, 3072(%0,%1,1)"
                   :
                   : "r"(a.sums), "r"(std::ptrdiff_t{64})
                   : "memory");
    }
  }

  // Keeps the thread's configuration (a host may have its own) and loads ours; false if it is ours already: loading
  // takes 200 cycles, storing 15.
  KVANT_AMX_ATTR static bool begin(ThreadState& before) {
    static constexpr TileConfig kConfig;
    asm volatile("sttilecfg %0" : "=m"(before) : : "memory");
    if (__builtin_memcmp(&before, &kConfig, sizeof before) == 0) return false;
    asm volatile("ldtilecfg %0" : : "m"(kConfig));
    return true;
  }
  // An empty configuration, which is what most threads had, releases the tiles.
  KVANT_AMX_ATTR static void end(const ThreadState& before) { asm volatile("ldtilecfg %0" : : "m"(before) : "memory"); }
};

// Whether this CPU has AMX with 8-bit products and the kernel lets this process use it (asks for the permission).
bool amx_usable();
#endif

}  // namespace kvant::tiles
