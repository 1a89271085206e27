// Sealing a page of kivi or kitty on the device: ranges, boosted channels, codes, packing. Sealed bytes are those of
// the CPU's encoder after conversion, but for the sign of an endpoint that is zero. Warps meet only where channels are
// ranked against each other.
#pragma once

#include "cuda/seal_columns.cuh"

namespace kvant::cuda {

template <class F>
struct ColumnSeal {
  static constexpr int warps = F::key.dim / kTile > kPage / kTile ? F::key.dim / kTile : kPage / kTile;
  static constexpr int threads = warps * 32;
};

// ---- keys: columns are channels, rows tokens

template <class F>
struct KeySealShared {
  double loudness[F::key.dim];
  alignas(16) std::uint32_t upper[F::key.dim];  // words of loudness
  std::uint8_t boosted[F::key.dim];
  std::uint8_t list[F::key.dim];             // boosted channels, ascending
  std::uint8_t above[2][kTile][F::key.dim];  // [group][row of a tile][channel]: upper fields of the group's row tiles
};

// How many channels are marked; the same in all lanes.
template <class F>
__device__ __forceinline__ int count_boosted(const KeySealShared<F>& shared) {
  const auto* marks = reinterpret_cast<const std::uint32_t*>(shared.boosted);
  int count = 0;
#pragma unroll
  for (int i = 0; i < F::key.dim / kFour; i += 32) {
    const int four = i + static_cast<int>(threadIdx.x) % 32;
    if (four < F::key.dim / kFour) count += __popc(marks[four]);
  }
  return static_cast<int>(__reduce_add_sync(0xFFFFFFFFU, static_cast<unsigned>(count)));
}

// The `boosted` channels of the largest mean |k|, ties to the lower channel. All threads of the block.
template <class F>
__device__ void choose_boosted(int boosted, KeySealShared<F>& shared) {
  constexpr int parts = ColumnSeal<F>::threads / F::key.dim >= 4 ? 4 : 2;  // threads of a channel
  const int channel = static_cast<int>(threadIdx.x) / parts;
  const int part = static_cast<int>(threadIdx.x) % parts;
  const auto mark = [&](int louder) {
#pragma unroll
    for (int bit = 1; bit < parts; bit *= 2) louder += __shfl_xor_sync(0xFFFFFFFFU, louder, bit);
    if (part == 0 && channel < F::key.dim) shared.boosted[channel] = louder < boosted ? 1 : 0;
    __syncthreads();
  };
  // Magnitudes order as their bits do. Channels whose upper words are the same are marked together: that is right
  // unless they are the last that could be.
  int louder = 0;
  if (channel < F::key.dim) {
    const std::uint32_t mine = shared.upper[channel];
#pragma unroll 4
    for (int other = 4 * part; other < F::key.dim; other += 4 * parts) {
      const auto four = *reinterpret_cast<const uint4*>(shared.upper + other);
      louder += (four.x > mine ? 1 : 0) + (four.y > mine ? 1 : 0) + (four.z > mine ? 1 : 0) + (four.w > mine ? 1 : 0);
    }
  }
  mark(louder);
  if (count_boosted<F>(shared) != boosted) {
    louder = 0;
    if (channel < F::key.dim) {
      const long long mine = __double_as_longlong(shared.loudness[channel]);
#pragma unroll 1
      for (int other = part; other < F::key.dim; other += parts) {
        // On a tie the lower channel is the louder one.
        louder += __double_as_longlong(shared.loudness[other]) > (other < channel ? mine - 1 : mine) ? 1 : 0;
      }
    }
    __syncthreads();  // the marks are counted
    mark(louder);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x < 32) {
    int before = 0;
#pragma unroll
    for (int c = lane; c < F::key.dim; c += 32) {
      const bool mine = shared.boosted[c] != 0;
      const unsigned all = __ballot_sync(0xFFFFFFFFU, mine);
      if (mine) shared.list[before + __popc(all & ((1U << lane) - 1U))] = static_cast<std::uint8_t>(c);
      before += __popc(all);
    }
  }
}

// The plane of upper fields and the list of the channels it belongs to.
template <class F>
__device__ void pack_boosted(int boosted, const KeySealShared<F>& shared, std::uint8_t* page) {
  constexpr int words = F::key.groups() * F::key.high_steps * 32 * 4;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += ColumnSeal<F>::threads) {
    const int r = i % 4;
    const int lane = i / 4 % 32;
    const int step = i / 128 % F::key.high_steps;
    const int group = i / 128 / F::key.high_steps;
    const int entry = step * kStep + 16 * (r >> 1) + 4 * (lane % 4);
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (entry + b >= boosted) break;
      const std::uint32_t field = shared.above[group][lane / 4 + 8 * (r & 1)][shared.list[entry + b]];
      word |= field << (8 * b);
    }
    const int quad = group * F::key.quads_per_group() + F::key.steps() + step;
    reinterpret_cast<std::uint32_t*>(page + F::key.codes_offset() + quad * kQuadBytes)[4 * lane + r] = word;
  }
  for (int i = static_cast<int>(threadIdx.x); i < F::key.high_steps * kStep; i += ColumnSeal<F>::threads) {
    page[F::key.index_offset() + i] = i < boosted ? shared.list[i] : 0;
  }
}

// A lane has the fields of channels 2t, 2t + 1 (words[0]) and 2t + 8, 2t + 9 (words[1]) of rows g (lower half) and
// g + 8; a code word has four neighbouring channels of one row. Lanes with even t end up with the lower channels.
__device__ __forceinline__ uint2 four_channels(const std::uint32_t (&words)[2], bool odd) {
  const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, odd ? words[0] : words[1], 1);
  const std::uint32_t first = odd ? other : words[0];
  const std::uint32_t second = odd ? words[1] : other;
  return {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
}

template <class F>
__device__ void seal_keys(const SealJob& job, int boosted, const std::uint8_t* exact, std::uint8_t* page) {
  constexpr bool ranked = F::key.high_steps > 0;
  constexpr int per_group = tiles_per_group(F::key.bits);
  __shared__ std::conditional_t<ranked, KeySealShared<F>, int> memory;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const bool live = warp < F::key.dim / kTile;
  constexpr int stride = F::exact.tile_bytes() / 16;
  const auto* data = reinterpret_cast<const uint4*>(exact) + warp * 32 + lane;
  ColumnRanges<F::bfloat> ranges;
  if (live) {
    double sums[4] = {0, 0, 0, 0};
    ranges = measure_columns<F::bfloat, ranked, kPage / kTile>(data, stride, job.skip, sums);
    if constexpr (ranked) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int bit = 4; bit < 32; bit *= 2) {
          sums[i] = __dadd_rn(sums[i], __shfl_xor_sync(0xFFFFFFFFU, sums[i], bit));
        }
        if (g == i) {
          const int channel = warp * kTile + i / 2 * 8 + 2 * t + i % 2;
          memory.loudness[channel] = sums[i];
          memory.upper[channel] = static_cast<std::uint32_t>(__double2hiint(sums[i]));
        }
      }
    }
  }
  int levels[4];
  std::uint32_t swap[2] = {0, 0};  // boosted columns, whose maximum is stored first
  if constexpr (ranked) {
    __syncthreads();
    choose_boosted<F>(boosted, memory);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool more = live && memory.boosted[warp * kTile + i / 2 * 8 + 2 * t + i % 2] != 0;
      levels[i] = more ? 15 : 3;
      if (more) swap[i / 2] |= 0xFFFFU << (16 * (i % 2));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) levels[i] = (1 << F::key.bits) - 1;
  }
  if (live) {
    if (g < 2) {
      const std::uint32_t change = (ranges.low.pair[g] ^ ranges.high.pair[g]) & swap[g];
      auto* ends = reinterpret_cast<std::uint32_t*>(page + key_endpoint_offset(warp * kTile + 8 * g + 2 * t));
      ends[0] = ranges.low.pair[g] ^ change;
      ends[2] = ranges.high.pair[g] ^ change;
    }
    const ColumnGrids grids = ColumnGrids::of(ranges, levels);
    GroupWords<F::key.bits, ranked> words;
#pragma unroll 1
    for (int group = 0; group < F::key.groups(); ++group) {
      uint4 rows[per_group];
#pragma unroll
      for (int p = 0; p < per_group; ++p) rows[p] = data[tile_of(F::key.bits, group, p) * stride];
      words.main[0] = words.main[1] = 0;
      if constexpr (ranked) words.above[0] = words.above[1] = 0;
      const auto add = [&](int p, uint2 codes) {
        if (job.skip > 0) {  // codes of sinks are 0
          const int token = tile_of(F::key.bits, group, p) * kTile + g;
          const std::uint32_t kept = (token < job.skip ? 0U : 0xFFFFU) | (token + 8 < job.skip ? 0U : 0xFFFF0000U);
          codes.x &= kept;
          codes.y &= kept;
        }
        words.add(0, codes.x, group, p);
        words.add(1, codes.y, group, p);
      };
      std::uint32_t closest[per_group];
#pragma unroll
      for (int p = 0; p < per_group; ++p) add(p, code_tile<F::bfloat, false>(rows[p], grids, closest[p]));
      redo_near_border(closest, [&](int p) {
        const uint4 again = data[tile_of(F::key.bits, group, p) * stride];
        std::uint32_t known;
        add(p, code_tile<F::bfloat, false>(again, grids, known));
        add(p, code_tile<F::bfloat, true>(again, grids, known));
      });
      const int target = t / 2 + (t % 2 != 0 ? 2 : 0);
      const int quad = group * F::key.quads_per_group() + warp / 2;
      auto* to = page + F::key.codes_offset() + quad * kQuadBytes + (4 * g + target) * 16 + warp % 2 * 8;
      *reinterpret_cast<uint2*>(to) = four_channels(words.main, t % 2 != 0);
      if constexpr (ranked) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int channel = warp * kTile + 8 * k + 2 * t;
          *reinterpret_cast<std::uint16_t*>(&memory.above[group][g][channel]) =
              static_cast<std::uint16_t>(words.above[k]);
          *reinterpret_cast<std::uint16_t*>(&memory.above[group][g + 8][channel]) =
              static_cast<std::uint16_t>(words.above[k] >> 16);
        }
      }
    }
    if constexpr (F::key.bits == 3) {  // both groups share the plane
      const int target = t / 2 + (t % 2 != 0 ? 2 : 0);
      auto* to = page + F::key.plane1_offset() + warp / 2 * kQuadBytes + (4 * g + target) * 16 + warp % 2 * 8;
      *reinterpret_cast<uint2*>(to) = four_channels(words.above, t % 2 != 0);
    }
  }
  if constexpr (ranked) {
    __syncthreads();
    pack_boosted<F>(boosted, memory, page);
  }
}

// ---- values: columns are tokens, rows channels

template <class F>
__device__ void seal_values(const SealJob& job, const std::uint8_t* exact, std::uint8_t* page) {
  constexpr int per_group = tiles_per_group(F::value.bits);
  constexpr int tiles = F::value.dim / kTile;
  const int tile = static_cast<int>(threadIdx.x) / 32;  // of tokens
  if (tile >= kPage / kTile) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const auto* data = reinterpret_cast<const uint4*>(exact + tile * F::exact.tile_bytes() + F::exact.key_bytes()) + lane;
  double none[4];
  ColumnRanges<F::bfloat> ranges = measure_columns<F::bfloat, false, tiles>(data, 32, 0, none);
#pragma unroll
  for (int k = 0; k < 2; ++k) {  // sinks have endpoints and codes 0: never read, always the same bytes
    const int token = tile * kTile + 8 * k + 2 * t;
    const std::uint32_t kept = (token < job.skip ? 0U : 0xFFFFU) | (token + 1 < job.skip ? 0U : 0xFFFF0000U);
    ranges.low.pair[k] &= kept;
    ranges.high.pair[k] &= kept;
  }
  std::uint8_t* half = page + tile / 4 * F::value.half_bytes();
  if (g < 2) {  // tokens 2t + g and 2t + g + 8 lie side by side
    const unsigned which = g == 0 ? 0x5410U : 0x7632U;
    auto* ends = reinterpret_cast<std::uint32_t*>(half + (2 * t + g) * 16 + tile % 4 * 4);
    ends[0] = __byte_perm(ranges.low.pair[0], ranges.low.pair[1], which);
    ends[32] = __byte_perm(ranges.high.pair[0], ranges.high.pair[1], which);
  }
  constexpr int top = (1 << F::value.bits) - 1;
  const int levels[4] = {top, top, top, top};
  const ColumnGrids grids = ColumnGrids::of(ranges, levels);
  GroupWords<F::value.bits, false> words;
#pragma unroll 1
  for (int group = 0; group < F::value.groups(); ++group) {
    uint4 rows[per_group];
#pragma unroll
    for (int p = 0; p < per_group; ++p) {
      const int row_tile = tile_of(F::value.bits, group, p);
      if (tiles % per_group == 0 || row_tile < tiles) rows[p] = data[row_tile * 32];
    }
    words.main[0] = words.main[1] = 0;
    const auto add = [&](int p, const uint2& codes) {
      // A code word has tokens 2t, 2t + 8, 2t + 1 and 2t + 9 of one channel.
      words.add(0, __byte_perm(codes.x, codes.y, 0x5140), group, p);
      words.add(1, __byte_perm(codes.x, codes.y, 0x7362), group, p);
    };
    const auto beyond = [&](int p) {  // codes are 0 past the last channel
      return tiles % per_group != 0 && tile_of(F::value.bits, group, p) >= tiles;
    };
    std::uint32_t closest[per_group];
#pragma unroll
    for (int p = 0; p < per_group; ++p) {
      closest[p] = 0xFFFFFFFFU;
      if (!beyond(p)) add(p, code_tile<F::bfloat, false>(rows[p], grids, closest[p]));
    }
    redo_near_border(closest, [&](int p) {
      const uint4 again = data[tile_of(F::value.bits, group, p) * 32];
      std::uint32_t known;
      add(p, code_tile<F::bfloat, false>(again, grids, known));
      add(p, code_tile<F::bfloat, true>(again, grids, known));
    });
    const int place = tile / 2 % 2 * kQuadBytes + lane * 16 + tile % 2 * 8;
    auto* to = half + F::value.codes_offset() + group * (2 * kQuadBytes) + place;
    *reinterpret_cast<uint2*>(to) = {words.main[0], words.main[1]};
    if constexpr (F::value.bits == 3) {  // two groups share a word of the plane
      if (group % 2 != 0 || group + 1 == F::value.groups()) {
        to = half + F::value.plane1_offset() + group / 2 * (2 * kQuadBytes) + place;
        *reinterpret_cast<uint2*>(to) = {words.above[0], words.above[1]};
        words.above[0] = words.above[1] = 0;
      }
    }
  }
}

// Grid: pages, KV heads, keys and values.
template <class F>
__global__ void __launch_bounds__(ColumnSeal<F>::threads, 1024 / ColumnSeal<F>::threads)
    seal_kernel(const __grid_constant__ SealBatch batch) {
  const SealArgs& args = batch.args;
  const SealJob job = batch.jobs[blockIdx.x];
  const auto head = static_cast<std::int64_t>(blockIdx.y);
  const std::uint8_t* exact = args.exact + job.exact_page * args.exact_stride + head * F::exact.page_bytes();
  std::uint8_t* keys = args.pages + job.page * args.page_stride + head * (F::key.bytes() + F::value.bytes());
  if (blockIdx.z == 0) {
    seal_keys<F>(job, args.boosted, exact, keys);
  } else {
    seal_values<F>(job, exact, keys + F::key.bytes());
  }
}

}  // namespace kvant::cuda
