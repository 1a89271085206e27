// Prefill on warp-level matrix instructions (sm_80 and later): tiles are B fragments of m16n8k16.
//
// A unit is 512 bytes, 16 per lane: {rows 0..7, .x; rows 8..15, .x; rows 0..7, .y; rows 8..15, .y}, so that one load
// gives the operands of two instructions. The order of channels inside 16 is that of the code words; queries lie in the
// same.
#pragma once

#include "cuda/prefill_state.cuh"

namespace kvant::cuda {

template <class C>
struct MmaEngine {
  static __device__ __forceinline__ void store_keys(std::uint8_t* keys, int token_tile, int channel_tile,
                                                    const uint2& a, const uint2& b) {
    store(keys + (token_tile * C::key_tiles + channel_tile) * kQuadBytes, a, b);
  }
  static __device__ __forceinline__ void store_values(std::uint8_t* values, int token_tile, int channel_tile,
                                                      const uint2& a, const uint2& b) {
    store(values + (token_tile * C::value_tiles + channel_tile) * kQuadBytes, a, b);
  }
  // From an A fragment of m16n8k16, which has its channels in their order.
  static __device__ __forceinline__ void copy_keys(const std::uint8_t* from, std::uint8_t* keys, int token_tile,
                                                   int channel_tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Channel 4t + 2i is element (4t + 2i) % 8 of its row's half (4t) / 8: lane 4g + 2 (t % 2) + i of that matrix.
    const std::uint8_t* first = from + ((lane & ~3) + lane % 2 * 2) * 16 + lane % 4 / 2 * 8;
    const uint2 a = *reinterpret_cast<const uint2*>(first);
    const uint2 b = *reinterpret_cast<const uint2*>(first + 16);
    store_keys(keys, token_tile, channel_tile, {a.x, b.x}, {a.y, b.y});
  }
  // This warp's queries as A fragments; vectors that are not there become zeros.
  static __device__ void load_queries(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint8_t* queries = own_queries(shared);
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
      const std::uint16_t* rows[2] = {query_row(args, segment, vector_of<C>(m, 0)),
                                      query_row(args, segment, vector_of<C>(m, 1))};
      for (int k = 0; k < C::key_tiles; ++k) {
        uint2 x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = {0, 0};
          if (rows[e] != nullptr) x[e] = *reinterpret_cast<const uint2*>(rows[e] + 16 * k + 4 * (lane % 4));
        }
        store(queries + (m * C::key_tiles + k) * kQuadBytes, x[0], x[1]);
      }
    }
  }

  static __device__ __forceinline__ void multiply_keys(std::uint8_t* shared, Scores<C>& s) {
    multiply_key_tiles<C>(own_queries(shared), C::key_tiles, UnitTiles{shared + C::keys_offset, C::key_tiles}, s);
  }

  static __device__ __forceinline__ void multiply_values(std::uint8_t* shared, const Scores<C>& s,
                                                         PrefillState<C>& state) {
    multiply_value_tiles<C>(UnitTiles{shared + C::values_offset, C::value_tiles}, s, state);
  }

 private:
  static __device__ __forceinline__ void store(std::uint8_t* unit, const uint2& a, const uint2& b) {
    *reinterpret_cast<uint4*>(unit + threadIdx.x % 32 * 16) = {a.x, b.x, a.y, b.y};
  }
  static __device__ __forceinline__ std::uint8_t* own_queries(std::uint8_t* shared) {
    return shared + threadIdx.x / 32 * (C::m_tiles * C::key_tiles * kQuadBytes);
  }
};

}  // namespace kvant::cuda
