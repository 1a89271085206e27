// Tiles of 64 tokens as cells: 16 bytes that hold eight tokens of one channel, keys and values alike.
//
// A code word of a page names four channels and, by its bits, tokens 16 apart; with its neighbour a lane has tokens g,
// g + 8, ..., g + 56 of a channel, and that is a cell: slot group g, [slot group][channel]. So channels of any order go
// to their place with whole 16-byte stores. Slot 8 s + j of a tile is token s + 8 j, for keys and values alike, so that
// only masks need to know. To matrix instructions keys are a matrix with tokens running fastest, values one with depth
// running fastest. Slot groups are 16 bytes more apart than their channels take: lanes that differ in g meet other
// banks.
#pragma once

#include "cuda/prefill_state.cuh"

namespace kvant::cuda {

constexpr int kCellBytes = 16;

// Bytes from a slot group to the next.
KVANT_BOTH constexpr int cell_stride(int dim) {
  return (dim + 1) * kCellBytes;
}
KVANT_BOTH constexpr int cell_tile_bytes(int dim) {
  return kStageTokens / 8 * cell_stride(dim);
}

template <int Dim>
__device__ __forceinline__ std::uint8_t* cell_at(std::uint8_t* tile, int slot_group, int channel) {
  return tile + slot_group * cell_stride(Dim) + channel * kCellBytes;
}

// The cells of two neighbouring rows or columns: the lower and the upper halves of eight words.
template <int Dim>
__device__ __forceinline__ void store_cells(std::uint8_t* tile, int slot_group, int channel, int next_group,
                                            int next_channel, const uint4 (&x)[2]) {
  const std::uint32_t words[8] = {x[0].x, x[1].x, x[0].y, x[1].y, x[0].z, x[1].z, x[0].w, x[1].w};
  std::uint32_t low[4], high[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    low[j] = __byte_perm(words[2 * j], words[2 * j + 1], 0x5410);
    high[j] = __byte_perm(words[2 * j], words[2 * j + 1], 0x7632);
  }
  *reinterpret_cast<uint4*>(cell_at<Dim>(tile, slot_group, channel)) = {low[0], low[1], low[2], low[3]};
  *reinterpret_cast<uint4*>(cell_at<Dim>(tile, next_group, next_channel)) = {high[0], high[1], high[2], high[3]};
}

// Four unquantized 16-token tiles, straight from global memory, where they are A fragments of m16n8k16.
template <class C>
__device__ void copy_exact_cells(const std::uint8_t* tiles, std::uint8_t* keys, std::uint8_t* values) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  for (int unit = C::unpack_thread() / 32; unit < C::key_tiles + C::value_tiles; unit += C::unpack_warps) {
    const bool is_key = unit < C::key_tiles;
    const int tile = is_key ? unit : unit - C::key_tiles;
    const std::uint8_t* from = tiles + (is_key ? 0 : C::exact.key_bytes()) + tile * kQuadBytes + lane * 16;
    uint4 x[kStageTiles];
#pragma unroll
    for (int j = 0; j < kStageTiles; ++j) x[j] = *reinterpret_cast<const uint4*>(from + j * C::exact.tile_bytes());
    if (is_key) {  // tokens g, g + 8 of channels 2t, 2t + 1; then of channels 2t + 8, 2t + 9
      store_cells<C::key.dim>(keys, g, 16 * tile + 2 * t, g, 16 * tile + 2 * t + 1,
                              {{x[0].x, x[1].x, x[2].x, x[3].x}, {x[0].y, x[1].y, x[2].y, x[3].y}});
      store_cells<C::key.dim>(keys, g, 16 * tile + 2 * t + 8, g, 16 * tile + 2 * t + 9,
                              {{x[0].z, x[1].z, x[2].z, x[3].z}, {x[0].w, x[1].w, x[2].w, x[3].w}});
    } else {  // tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of channel g; then of channel g + 8
      store_cells<C::value.dim>(values, 2 * t, 16 * tile + g, 2 * t + 1, 16 * tile + g,
                                {{x[0].x, x[1].x, x[2].x, x[3].x}, {x[0].z, x[1].z, x[2].z, x[3].z}});
      store_cells<C::value.dim>(values, 2 * t, 16 * tile + g + 8, 2 * t + 1, 16 * tile + g + 8,
                                {{x[0].y, x[1].y, x[2].y, x[3].y}, {x[0].w, x[1].w, x[2].w, x[3].w}});
    }
  }
}

// Warp-level matrix instructions (sm_80 and later) over cells; those of warpgroups are in prefill_wgmma.cuh.
template <class C>
struct MmaCellEngine {
  // This warp's queries as A fragments, channels in order; vectors that are not there become zeros.
  static __device__ void load_queries(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    std::uint8_t* queries = own_queries(shared) + lane * 16;
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
      const std::uint16_t* rows[2] = {query_row(args, segment, vector_of<C>(m, 0)),
                                      query_row(args, segment, vector_of<C>(m, 1))};
      for (int k = 0; k < C::key_tiles; ++k) {
        std::uint32_t x[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (rows[e] == nullptr) continue;
          const auto* from = reinterpret_cast<const std::uint32_t*>(rows[e] + 16 * k + 2 * (lane % 4));
          x[e][0] = from[0];
          x[e][1] = from[4];
        }
        *reinterpret_cast<uint4*>(queries + (m * C::key_tiles + k) * kQuadBytes) = {x[0][0], x[1][0], x[0][1], x[1][1]};
      }
    }
  }

  static __device__ __forceinline__ void multiply_keys(std::uint8_t* shared, Scores<C>& s) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Matrices of 8 channels by 8 slots: of channels 0 and 8 of a slot group, then of the next. A lane names a row.
    const std::uint32_t keys =
        ptx::shared_address(cell_at<C::key.dim>(shared + C::keys_offset, lane / 16, lane / 8 % 2 * 8 + lane % 8));
    const auto load = [&](int j, int k) {
      return ptx::load_matrices<true>(
          keys + static_cast<std::uint32_t>(2 * j * cell_stride(C::key.dim) + k * 16 * kCellBytes));
    };
    multiply_key_tiles<C>(own_queries(shared), C::key_tiles, load, s);
  }

  static __device__ __forceinline__ void multiply_values(std::uint8_t* shared, const Scores<C>& s,
                                                         PrefillState<C>& state) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Matrices of 8 channels by 8 slots: of slot groups 0 and 1, then of the next 8 channels.
    const std::uint32_t values =
        ptx::shared_address(cell_at<C::value.dim>(shared + C::values_offset, lane / 8 % 2, lane / 16 * 8 + lane % 8));
    const auto load = [&](int j, int n) {
      return ptx::load_matrices<false>(
          values + static_cast<std::uint32_t>(2 * j * cell_stride(C::value.dim) + n * 16 * kCellBytes));
    };
    multiply_value_tiles<C>(load, s, state);
  }

 private:
  static __device__ __forceinline__ std::uint8_t* own_queries(std::uint8_t* shared) {
    return shared + threadIdx.x / 32 * (C::m_tiles * C::key_tiles * kQuadBytes);
  }
};

}  // namespace kvant::cuda
