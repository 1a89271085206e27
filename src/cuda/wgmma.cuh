// Warpgroup matrix instructions (sm_90a), one function each. KVANT_WGMMA: they are there.
#pragma once

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define KVANT_WGMMA
#endif

namespace kvant::cuda::wgmma {

#ifdef KVANT_WGMMA
// Where a matrix lies. The strides are bytes from a core matrix to the next in depth, and in rows. Steps only move the
// address, whose word is all of a description that needs registers.
template <int DepthStride, int RowStride>
class Description {
 public:
  __device__ __forceinline__ explicit Description(std::uint32_t address)
      : low_((address & 0x3FFFFU) >> 4 | static_cast<std::uint32_t>(DepthStride >> 4) << 16) {}
  __device__ __forceinline__ std::uint64_t at(int bytes) const {
    std::uint64_t all;
    asm("mov.b64 %0, {%1, %2};" : "=l"(all) : "r"(low_ + static_cast<std::uint32_t>(bytes / 16)), "n"(RowStride >> 4));
    return all;
  }

 private:
  std::uint32_t low_;
};
__device__ __forceinline__ void begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until no more than the last `Pending` committed groups are under way.
template <int Pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps uses of x behind wait(): to the compiler an instruction's result is there once it is issued.
template <int Count>
__device__ __forceinline__ void settle(float (&x)[Count][4]) {
#pragma unroll
  for (int i = 0; i < Count; ++i)
    asm volatile("" : "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])::"memory");
}

#define KVANT_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KVANT_D16(n) KVANT_D4(n), KVANT_D4(n + 1), KVANT_D4(n + 2), KVANT_D4(n + 3)

#define KVANT_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KVANT_R32 KVANT_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KVANT_R64                                                    \
  KVANT_R32                                                          \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d = A * B, or d += A * B: 64 vectors by 64 tokens by 16 channels, both from shared memory. transposed: in B tokens
// run fastest.
#define KVANT_SCORES(type, transposed)                              \
  asm volatile(                                                     \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"              \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type   \
      " "                                                           \
      "{" KVANT_R32 "}, %32, %33, add, 1, 1, 0, " transposed ";\n}" \
      : KVANT_D16(0), KVANT_D16(4)                                  \
      : "l"(a), "l"(b), "r"(add))
template <bool Bfloat, bool Transposed>
__device__ __forceinline__ void multiply_scores(float (&d)[8][4], std::uint64_t a, std::uint64_t b, int add) {
  if constexpr (Bfloat && Transposed) {
    KVANT_SCORES("bf16", "1");
  } else if constexpr (Bfloat) {
    KVANT_SCORES("bf16", "0");
  } else if constexpr (Transposed) {
    KVANT_SCORES("f16", "1");
  } else {
    KVANT_SCORES("f16", "0");
  }
}
#undef KVANT_SCORES

// d += A * B: 64 vectors by some channels by 16 tokens, A in registers.
#define KVANT_OUTPUTS(type, columns, registers, a0, a1, a2, a3, description, ...)                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" registers "}, {" a0 "," a1 \
               "," a2 "," a3 "}, " description ", 1, 1, 1, 0;"                                                      \
               : __VA_ARGS__                                                                                        \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))
template <bool Bfloat>
__device__ __forceinline__ void multiply_outputs(float (&d)[4][4], const uint4& a, std::uint64_t b) {
  if constexpr (Bfloat) {
    KVANT_OUTPUTS("bf16", "32", KVANT_R16, "%16", "%17", "%18", "%19", "%20", KVANT_D16(0));
  } else {
    KVANT_OUTPUTS("f16", "32", KVANT_R16, "%16", "%17", "%18", "%19", "%20", KVANT_D16(0));
  }
}
template <bool Bfloat>
__device__ __forceinline__ void multiply_outputs(float (&d)[8][4], const uint4& a, std::uint64_t b) {
  if constexpr (Bfloat) {
    KVANT_OUTPUTS("bf16", "64", KVANT_R32, "%32", "%33", "%34", "%35", "%36", KVANT_D16(0), KVANT_D16(4));
  } else {
    KVANT_OUTPUTS("f16", "64", KVANT_R32, "%32", "%33", "%34", "%35", "%36", KVANT_D16(0), KVANT_D16(4));
  }
}
template <bool Bfloat>
__device__ __forceinline__ void multiply_outputs(float (&d)[16][4], const uint4& a, std::uint64_t b) {
  if constexpr (Bfloat) {
    KVANT_OUTPUTS("bf16", "128", KVANT_R64, "%64", "%65", "%66", "%67", "%68", KVANT_D16(0), KVANT_D16(4), KVANT_D16(8),
                  KVANT_D16(12));
  } else {
    KVANT_OUTPUTS("f16", "128", KVANT_R64, "%64", "%65", "%66", "%67", "%68", KVANT_D16(0), KVANT_D16(4), KVANT_D16(8),
                  KVANT_D16(12));
  }
}
#undef KVANT_OUTPUTS
#undef KVANT_R16
#undef KVANT_R32
#undef KVANT_R64
#undef KVANT_D16
#undef KVANT_D4
#endif

}  // namespace kvant::cuda::wgmma
