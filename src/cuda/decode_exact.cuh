// Unquantized 16-token tiles (sinks and open pages) on half-precision tensor cores, straight from global memory.
#pragma once

#include "cuda/decode_unit.cuh"

namespace kvant::cuda {

struct ExactTile {
  const std::uint8_t* data = nullptr;  // null: the tile holds no token
  int position = 0;                    // of its first token
  int end = 0;                         // positions at and after it are not there
};

template <class C>
__device__ ExactTile exact_tile(const DecodeArgs& args, const Segment& segment, int unit) {
  const int number = unit - segment.coded_end;
  const int sink_tiles = (segment.sinks + kTile - 1) / kTile;
  const bool sink = number < sink_tiles;
  const int in_tail = number - sink_tiles;
  ExactTile tile;
  tile.position = kTile * (sink ? number : in_tail) + (sink ? 0 : segment.coded_end / C::units_per_page * kPage);
  tile.end = min(sink ? segment.sinks : INT_MAX, args.lengths[segment.sequence]);
  if (tile.position >= tile.end) return tile;
  const int slot = sink ? 0 : 1 + in_tail / (kPage / kTile);
  const std::int32_t page =
      args.exact_table[static_cast<std::int64_t>(segment.sequence) * args.exact_table_stride + slot];
  tile.data = args.exact + page * args.exact_stride +
              static_cast<std::int64_t>(segment.kv_head) * C::exact.page_bytes() +
              (sink ? number : in_tail) % (kPage / kTile) * C::exact.tile_bytes();
  return tile;
}

template <class C>
__device__ void add_exact_tile(const DecodeArgs& args, const Segment& segment, const ExactTile& tile,
                               WarpState<C>& state, const Lane& lane) {
  const int thread = static_cast<int>(threadIdx.x) % 32;
  const auto* keys = reinterpret_cast<const uint4*>(tile.data) + thread;
  const auto* values = reinterpret_cast<const uint4*>(tile.data + C::exact.key_bytes()) + thread;
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    // Column 2v holds the query of vector v as it is, column 2v + 1 zeros, so that scores land on the owner as codes'
    // do.
    const std::uint16_t* q = lane.half ? nullptr : query_row(args, segment, 4 * n + lane.vector);
    float c[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int k = 0; k < C::key.dim / 16; ++k) {
      std::uint32_t b0 = 0;
      std::uint32_t b1 = 0;
      if (q != nullptr) {
        b0 = *reinterpret_cast<const std::uint32_t*>(q + 16 * k + 2 * lane.t);
        b1 = *reinterpret_cast<const std::uint32_t*>(q + 16 * k + 2 * lane.t + 8);
      }
      ptx::mma_half<C::bfloat>(c, keys[k * 32], b0, b1);
    }
    float s[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int position = tile.position + lane.g + 8 * e;
      s[e] = c[2 * e] * (args.scale * kLog2e);
      if (args.softcap > 0) s[e] = cap_score(s[e], args);
      if (position < state.first[n] || position >= min(state.last[n], tile.end)) s[e] = kMinusInfinity;
    }
    const float peak = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(fmaxf(s[0], s[1]))));
    const float finite = state.raise(n, peak);
    std::uint32_t b[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float p = ptx::exp2_fast(s[e] - finite);
      state.sum[n] += p;
      const std::uint32_t rounded = ptx::narrow2<C::bfloat>(p, 0);
      const float rest = p - ptx::widen2<C::bfloat>(rounded).x;
      b[e] = ptx::transpose((rounded & 0xFFFFU) | ptx::narrow2<C::bfloat>(0, rest));
    }
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
      float o[4] = {0, 0, 0, 0};
      ptx::mma_half<C::bfloat>(o, values[j * 32], b[0], b[1]);
      state.o[n][j][0] += o[0] + o[1];
      state.o[n][j][1] += o[2] + o[3];
    }
  }
}

}  // namespace kvant::cuda
