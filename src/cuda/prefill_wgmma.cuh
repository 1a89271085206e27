// Prefill on warpgroup matrix instructions (sm_90a): the tensor cores read tiles from shared memory by themselves,
// which leaves its bandwidth and the registers to the rest.
//
// Tiles lie in core matrices of 8 rows by 16 bytes of depth, 128 bytes each, without swizzle: [depth / 8][row / 8], or
// whatever strides the keys have. Queries lie the same way, 64 vectors of a warpgroup after the other. Cells
// (prefill_cells.cuh) are the same core matrices, but those of keys have 8 channels, which is their depth, by 16 bytes
// of tokens.
#pragma once

#include "cuda/prefill_cells.cuh"
#include "cuda/wgmma.cuh"

namespace kvant::cuda {

template <class C>
class WgmmaEngine {
  static constexpr int kQueryBytes = 64 * C::key.dim * 2;
  static constexpr int kValueDepthStride = C::cells ? cell_stride(C::value.dim) : kCoreBytes * C::value.dim / 8;

 public:
  static __device__ __forceinline__ void store_keys(std::uint8_t* keys, int token_tile, int channel_tile,
                                                    const uint2& a, const uint2& b) {
    const Lane lane;
    std::uint8_t* to = keys + (2 * channel_tile + lane.t / 2) * C::key_depth_stride +
                       2 * token_tile * C::key_row_stride + lane.g * 16 + lane.t % 2 * 8;
    *reinterpret_cast<uint2*>(to) = a;
    *reinterpret_cast<uint2*>(to + C::key_row_stride) = b;
  }
  static __device__ __forceinline__ void store_values(std::uint8_t* values, int token_tile, int channel_tile,
                                                      const uint2& a, const uint2& b) {
    store_quarters(values + 2 * token_tile * kValueDepthStride + 2 * channel_tile * kCoreBytes, kValueDepthStride,
                   kCoreBytes, {a.x, b.x, a.y, b.y});
  }
  static __device__ __forceinline__ void copy_keys(const std::uint8_t* from, std::uint8_t* keys, int token_tile,
                                                   int channel_tile) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + threadIdx.x % 32 * 16);
    store_quarters(keys + 2 * channel_tile * C::key_depth_stride + 2 * token_tile * C::key_row_stride,
                   C::key_depth_stride, C::key_row_stride, x);
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

#ifdef KVANT_WGMMA
  // What the matrix instructions of a warpgroup are told of its queries and of the tiles in a buffer.
  using Queries = wgmma::Description<kCoreBytes * 8, kCoreBytes>;
  using Keys = wgmma::Description<C::key_depth_stride, C::key_row_stride>;
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
                                                  keys.at(k * C::key_depth_stride * 2), k > 0);
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
  static __device__ __forceinline__ void store_quarters(std::uint8_t* tile, int depth_stride, int row_stride,
                                                        const uint4& x) {
    std::uint8_t* first = tile + threadIdx.x % 32 * 4;
    std::uint8_t* second = first + depth_stride;
    *reinterpret_cast<std::uint32_t*>(first) = x.x;
    *reinterpret_cast<std::uint32_t*>(first + row_stride) = x.y;
    *reinterpret_cast<std::uint32_t*>(second) = x.z;
    *reinterpret_cast<std::uint32_t*>(second + row_stride) = x.w;
  }
};

}  // namespace kvant::cuda
