// Prefill on warpgroup matrix instructions (sm_90a): the tensor cores read tiles from shared memory by themselves,
// which leaves its bandwidth and the registers to the rest.
//
// Tiles lie in core matrices of 8 rows by 16 bytes of depth, 128 bytes each, without swizzle: [depth / 8][row / 8].
// Queries lie the same way, 64 vectors of a warpgroup after the other. Cells (prefill_cells.cuh) are the same core
// matrices, but those of keys have 8 channels, which is their depth, by 16 bytes of tokens.
#pragma once

#include "cuda/prefill_cells.cuh"

namespace kvant::cuda {

namespace wgmma {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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

}  // namespace wgmma

template <class C>
class WgmmaEngine {
  static constexpr int kQueryBytes = 64 * C::key.dim * 2;
  static constexpr int kKeyDepthStride = C::cells ? kCoreBytes : kKeyCoreStride;
  static constexpr int kValueDepthStride = C::cells ? cell_stride(C::value.dim) : kCoreBytes * C::value.dim / 8;

 public:
  static __device__ __forceinline__ void store_keys(std::uint8_t* keys, int token_tile, int channel_tile,
                                                    const uint2& a, const uint2& b) {
    const Lane lane;
    std::uint8_t* to = keys + (2 * channel_tile + lane.t / 2) * kKeyCoreStride + 2 * token_tile * kCoreBytes +
                       lane.g * 16 + lane.t % 2 * 8;
    *reinterpret_cast<uint2*>(to) = a;
    *reinterpret_cast<uint2*>(to + kCoreBytes) = b;
  }
  static __device__ __forceinline__ void store_values(std::uint8_t* values, int token_tile, int channel_tile,
                                                      const uint2& a, const uint2& b) {
    store_quarters(values, kValueDepthStride, 2 * token_tile, 2 * channel_tile, {a.x, b.x, a.y, b.y});
  }
  static __device__ __forceinline__ void copy_keys(const std::uint8_t* from, std::uint8_t* keys, int token_tile,
                                                   int channel_tile) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + threadIdx.x % 32 * 16);
    store_quarters(keys, kKeyCoreStride, 2 * channel_tile, 2 * token_tile, x);
  }
  // The tensor cores read shared memory past the order of ordinary stores.
  static __device__ __forceinline__ void publish_tiles() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    ptx::proxy_fence();
#endif
  }

  // Vectors that are not there become zeros. Every thread of the block calls it.
  static __device__ void load_queries(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
    constexpr int cores = C::key.dim / 8;
    for (int i = static_cast<int>(threadIdx.x); i < C::vectors * cores; i += C::threads) {
      const int vector = i / cores;
      const std::uint16_t* row = query_row(args, segment, vector);
      uint4 x{0, 0, 0, 0};
      if (row != nullptr) {  // queries are aligned to 8 bytes
        const auto* from = reinterpret_cast<const uint2*>(row + i % cores * 8);
        x = {from[0].x, from[0].y, from[1].x, from[1].y};
      }
      // A warp has m_tiles row tiles, a warpgroup a tile of 64 of each (vector_of).
      const int warp = vector / 16 / C::m_tiles;
      const int tile = warp / 4 * C::m_tiles + vector / 16 % C::m_tiles;
      std::uint8_t* to = shared + tile * kQueryBytes + (i % cores * 8 + warp % 4 * 2) * kCoreBytes;
      *reinterpret_cast<uint4*>(to + vector % 16 * 16) = x;
    }
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // What the matrix instructions of a warpgroup are told of its queries and of the tiles in a buffer.
  using Queries = wgmma::Description<kCoreBytes * 8, kCoreBytes>;
  using Keys = wgmma::Description<kKeyDepthStride, C::cells ? cell_stride(C::key.dim) : kCoreBytes>;
  using Values = wgmma::Description<kValueDepthStride, kCoreBytes>;
  static __device__ __forceinline__ Queries describe_queries(const std::uint8_t* shared, int group) {
    return Queries(ptx::shared_address(shared) + static_cast<std::uint32_t>(group * C::m_tiles * kQueryBytes));
  }

  // Starts the products of row tile m.
  static __device__ __forceinline__ void start_scores(const Queries& queries, const Keys& keys, int m,
                                                      float (&s)[kStageTiles * 2][4]) {
    wgmma::begin();
#pragma unroll
    for (int k = 0; k < C::key_tiles; ++k) {
      wgmma::multiply_scores<C::bfloat, C::cells>(s, queries.at(m * kQueryBytes + k * (kCoreBytes * 8 * 2)),
                                                  keys.at(k * kKeyDepthStride * 2), k > 0);
    }
    wgmma::commit();
  }
  static __device__ __forceinline__ void start_outputs(const uint4 (&p)[kStageTiles], const Values& values,
                                                       float (&o)[C::value_tiles * 2][4]) {
    constexpr int columns = C::value.dim % 128 == 0 ? 128 : C::value.dim % 64 == 0 ? 64 : 32;
    wgmma::begin();
#pragma unroll
    for (int j = 0; j < kStageTiles; ++j) {
#pragma unroll
      for (int n = 0; n < C::value.dim; n += columns) {
        auto& part = reinterpret_cast<float(&)[columns / 8][4]>(o[n / 8]);
        wgmma::multiply_outputs<C::bfloat>(part, p[j], values.at(j * kValueDepthStride * 2 + n / 8 * kCoreBytes));
      }
    }
    wgmma::commit();
  }
#endif

 private:
  // Four core matrices from an A fragment of m16n8k16: {rows g, depth 2t; rows g + 8; rows g, depth 2t + 8; rows g +
  // 8}.
  static __device__ __forceinline__ void store_quarters(std::uint8_t* tile, int depth_stride, int depth8, int row8,
                                                        const uint4& x) {
    std::uint8_t* first = tile + depth8 * depth_stride + row8 * kCoreBytes + threadIdx.x % 32 * 4;
    std::uint8_t* second = first + depth_stride;
    *reinterpret_cast<std::uint32_t*>(first) = x.x;
    *reinterpret_cast<std::uint32_t*>(first + kCoreBytes) = x.y;
    *reinterpret_cast<std::uint32_t*>(second) = x.z;
    *reinterpret_cast<std::uint32_t*>(second + kCoreBytes) = x.w;
  }
};

}  // namespace kvant::cuda
