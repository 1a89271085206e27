// Pages of waterfill to tiles of cells: keys whose channels have widths of their own and lie by width class, beside
// rotated values. The tiles hold the values rotated as they are; the kernel turns the outputs back.
#pragma once

#include "cuda/decode_sorted.cuh"
#include "cuda/prefill_cells.cuh"
#include "cuda/prefill_tiles.cuh"

namespace kvant::cuda {

// `raw` is half a page of values; the key tile is whole because its planes cover all tokens.
template <class C, class Engine>
requires(C::cells) struct PageTiles<C, Engine> {
  // fresh: the page's keys are not in `raw` yet.
  static __device__ __forceinline__ void fetch(const DecodeArgs& args, std::uint8_t* raw, std::uint8_t* sorted,
                                               const std::uint8_t* page, int half, bool fresh) {
    copy_async<C, C::value.half_bytes()>(raw, page + args.key_bytes + half * C::value.half_bytes());
    if (!fresh) return;
    const std::uint32_t to = ptx::shared_address(sorted);
#pragma unroll 1  // two or three rounds
    for (int i = C::unpack_thread() * 16; i < args.key_bytes; i += C::unpack_threads * 16) {
      ptx::async_copy16(to + static_cast<std::uint32_t>(i), page + i);
    }
  }

  static __device__ __forceinline__ void unpack(const DecodeArgs& /*args*/, const std::uint8_t* raw,
                                                const std::uint8_t* sorted, int half, std::uint8_t* keys,
                                                std::uint8_t* values, std::uint8_t* /*ranks*/) {
    constexpr int key_jobs = C::key.dim / kFour / kFoursAtOnce;
    constexpr int jobs = key_jobs + C::value_tiles;  // a pair of row tiles and one of the two steps each
    for (int job = C::unpack_thread() / 32; job < jobs; job += C::unpack_warps) {
      if (job < key_jobs) {
        unpack_keys(sorted, half, job * kFoursAtOnce, keys);
      } else {
        unpack_values(raw, (job - key_jobs) / 2, (job - key_jobs) % 2, values);
      }
    }
  }

  static __device__ __forceinline__ void copy_exact(const std::uint8_t* tiles, std::uint8_t* keys,
                                                    std::uint8_t* values) {
    copy_exact_cells<C>(tiles, keys, values);
  }

 private:
  static constexpr int kFoursAtOnce = 4;  // a lane has token slots g of one of them

  // Adds a plane's fields to the codes: bits `Mask` of every byte, once words of row tile p are shifted right by
  // p * Bits - Left. Row halves of a tile are words 2p and 2p + 1.
  template <int Bits, int Left, std::uint32_t Mask, int First, int Tiles>
  static __device__ __forceinline__ void join(std::uint32_t upper, std::uint32_t lower, std::uint32_t (&codes)[8]) {
#pragma unroll
    for (int p = 0; p < Tiles; ++p) {
      const int right = p * Bits - Left;
      codes[2 * (First + p)] |= (right > 0 ? upper >> max(right, 0) : upper << max(-right, 0)) & Mask;
      codes[2 * (First + p) + 1] |= (right > 0 ? lower >> max(right, 0) : lower << max(-right, 0)) & Mask;
    }
  }

  // Codes of four `at` of the page; those of even width are doubled, so that planes have one place each. Word 2p + e:
  // tokens 16 p + 8 e + g of the half, a byte per channel. Returns the largest code of the width.
  static __device__ __forceinline__ int load_codes(const SortedRuns& runs, const std::uint8_t* plane, int half, int at,
                                                   int g, std::uint32_t (&codes)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) codes[j] = 0;
    int largest = 0;
    const int fours = runs.six + runs.four + runs.five;
    if (at < fours) {
      const uint4 w =
          *reinterpret_cast<const uint4*>(plane + at * (4 * kFourBytes) + half * 128 + (g ^ ((at & 3) << 1)) * 16);
      join<4, 1, 0x1E1E1E1EU, 0, 2>(w.x, w.y, codes);
      join<4, 1, 0x1E1E1E1EU, 2, 2>(w.z, w.w, codes);
      largest += 0x1E;
    }
    plane += fours * (4 * kFourBytes);
    const int ones = runs.five + runs.one + runs.three;
    const int one = at - (runs.six + runs.four);  // place in its plane
    if (one >= 0 && one < ones) {
      const uint2 w = *reinterpret_cast<const uint2*>(plane + one * kFourBytes + (g ^ ((one & 2) << 1)) * 8);
      join<1, 0, 0x01010101U, 0, 4>(w.x >> (4 * half), w.y >> (4 * half), codes);
      largest += 1;
    }
    plane += ones * kFourBytes;
    const int two = at - (fours + runs.one);
    if (two >= 0) {
      const uint2 w =
          *reinterpret_cast<const uint2*>(plane + two * (2 * kFourBytes) + (g ^ ((two & 3) << 1)) * 16 + 8 * half);
      join<2, 1, 0x06060606U, 0, 4>(w.x, w.y, codes);
      largest += 6;
    }
    if (at < runs.six) {
      plane += (runs.three + runs.two) * (2 * kFourBytes);
      const uint2 w =
          *reinterpret_cast<const uint2*>(plane + at * (2 * kFourBytes) + (g ^ ((at & 3) << 1)) * 16 + 8 * half);
      join<2, 5, 0x60606060U, 0, 4>(w.x, w.y, codes);
      largest += 0x60;
    }
    return largest;
  }

  static __device__ __forceinline__ void unpack_keys(const std::uint8_t* tile, int half, int first,
                                                     std::uint8_t* keys) {
    // Lanes of a quarter warp share a four: they read all banks, and write to cells of all slot groups.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane % 8;
    const int at = first + lane / 8;
    const SortedRuns runs(tile + C::key.counts_offset());
    std::uint32_t codes[8];
    const int largest = load_codes(runs, tile + C::key.codes_offset(), half, at, g, codes);
    const ByteRaiser bytes;
    const float rate = ptx::reciprocal(static_cast<float>(largest));
    const uint4 ends = *reinterpret_cast<const uint4*>(tile + at * 16);
    const auto channels = *reinterpret_cast<const std::uint32_t*>(tile + C::key.index_offset() + at * kFour);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const float2 mins = ptx::widen2<C::bfloat>(i < 2 ? ends.x : ends.y);
      const float2 maxs = ptx::widen2<C::bfloat>(i < 2 ? ends.z : ends.w);
      const float min = i % 2 == 0 ? mins.x : mins.y;
      const float step = ((i % 2 == 0 ? maxs.x : maxs.y) - min) * rate;
      const float low = fmaf(-128.0F, step, min);
      std::uint32_t cell[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cell[j] = ptx::narrow2<C::bfloat>(fmaf(bytes.raise(codes[2 * j], i), step, low),
                                          fmaf(bytes.raise(codes[2 * j + 1], i), step, low));
      }
      const int channel = static_cast<int>(channels >> (8 * i) & 0xFFU);
      *reinterpret_cast<uint4*>(cell_at<C::key.dim>(keys, g, channel)) = {cell[0], cell[1], cell[2], cell[3]};
    }
  }

  // Row tiles 2 pair and 2 pair + 1, tokens of one step.
  static __device__ __forceinline__ void unpack_values(const std::uint8_t* half_page, int pair, int step,
                                                       std::uint8_t* values) {
    if constexpr (tiles_per_group(C::value.bits) == 2) {
      unpack_pair<0>(half_page, pair, step, pair, values);
    } else if (pair % 2 == 0) {
      unpack_pair<0>(half_page, pair / 2, step, pair, values);
    } else {
      unpack_pair<2>(half_page, pair / 2, step, pair, values);
    }
  }

  // Position: of the pair's first row tile in the words of its group. Bytes of a word are tokens 2t, 2t + 8, 2t + 1,
  // 2t + 9 of 16.
  template <int Position>
  static __device__ __forceinline__ void unpack_pair(const std::uint8_t* half_page, int group, int step, int pair,
                                                     std::uint8_t* values) {
    constexpr int bits = C::value.bits;
    const Lane lane;
    CodeWords<bits> words;
    words.load(half_page + C::value.codes_offset() + (group * 2 + step) * kQuadBytes,
               half_page + C::value.plane1_offset() + (group / 2 * 2 + step) * kQuadBytes, group % 2 != 0);
    const ValueGrid<C> grids[2] = {{half_page, 2 * step, lane.t}, {half_page, 2 * step + 1, lane.t}};
    const ValueDequantizer<C, false> dequantizers[2] = {{grids[0].low, grids[0].step}, {grids[1].low, grids[1].step}};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      std::uint32_t w[4];
      words.fragment(Position + p, w);
      const int shift = code_shift(bits, Position + p);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint2 a = dequantizers[0].expand(w[e], shift);
        const uint2 b = dequantizers[1].expand(w[2 + e], shift);
        std::uint8_t* to =
            cell_at<C::value.dim>(values, 2 * lane.t, (2 * pair + p) * kTile + lane.g + 8 * e) + 8 * step;
        *reinterpret_cast<uint2*>(to) = {a.x, b.x};
        *reinterpret_cast<uint2*>(to + cell_stride(C::value.dim)) = {a.y, b.y};
      }
    }
  }
};

}  // namespace kvant::cuda
