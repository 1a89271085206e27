// What the kernels that seal block pages share: where a page and its rows are, ranges of rows, code words. Rows belong
// to warps.
#pragma once

#include "cuda/block_seal.hpp"
#include "cuda/seal_grid.cuh"

namespace kvant::cuda {

// The page that a block works on.
struct BlockSealPage {
  const BlockSealArgs& args;
  const BlockSealJob& job;
  int number;  // of the job

  __device__ ExactFormat exact_format() const { return {args.format.key.depth, args.format.value.rows}; }
  __device__ const std::uint8_t* exact(int head) const {
    return args.exact + job.exact_page * args.exact_stride +
           static_cast<std::int64_t>(head) * exact_format().page_bytes();
  }
  __device__ std::uint8_t* page() const { return args.pages + job.page * args.page_stride; }
  __device__ std::uint8_t* block(int head) const {
    return page() + static_cast<std::int64_t>(head) * args.format.head_bytes;
  }
  // Outliers of a head's values in each step of places; null where the list is written front to back.
  __device__ std::uint32_t* list_counts(int head) const {
    if (args.list_counts == nullptr) return nullptr;
    return args.list_counts + (number * args.format.kv_heads + head) * (kPage / kBlockSealPlaces);
  }
  // The token in a place of the page of a head.
  __device__ int token(int head, int place) const {
    return args.salient > 0 ? block(head)[args.format.tokens_offset + place] : place;
  }
};

// ---- ranges

// Floats as integers that order as they do.
__device__ __forceinline__ std::uint32_t ordered_bits(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float from_ordered(std::uint32_t key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7FFFFFFFU : ~key);
}

constexpr int kListed = BlockGridShared::kListed;

// The largest of up to kListed keys, four of a lane, without the `outside` first ones. 0 is no key.
__device__ __forceinline__ std::uint32_t select_key(std::uint32_t (&keys)[4], int outside) {
#pragma unroll 1
  while (true) {
    const std::uint32_t own = max(max(keys[0], keys[1]), max(keys[2], keys[3]));
    const std::uint32_t top = __reduce_max_sync(0xFFFFFFFFU, own);
    if (outside-- == 0) return top;
    const int owner = __ffs(static_cast<int>(__ballot_sync(0xFFFFFFFFU, own == top))) - 1;
    bool taken = static_cast<int>(threadIdx.x) % 32 != owner;
#pragma unroll
    for (std::uint32_t& key : keys) {
      if (taken || key != top) continue;
      key = 0;
      taken = true;
    }
  }
}

// The same by bisection over the bits of a row of n values, as ordered bits with those of `flip` turned.
template <class Row>
__device__ __forceinline__ std::uint32_t bisect_row(const Row& row, int n, int outside, std::uint32_t flip) {
  std::uint32_t found = 0;  // the largest number that enough values are not below
#pragma unroll 1
  for (std::uint32_t bit = 0x80000000U; bit > 0; bit >>= 1) {
    int above = 0;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x) % 32; i < n; i += 32) {
      above += (ordered_bits(row(i)) ^ flip) >= (found | bit) ? 1 : 0;
    }
    if (__reduce_add_sync(0xFFFFFFFFU, above) > outside) found |= bit;
  }
  return found;
}

// Appends to a list of kListed keys those of the lanes that have one; returns how many there are now, listed or not.
__device__ __forceinline__ int append_keys(std::uint32_t* list, int count, bool mine, std::uint32_t key) {
  const unsigned all = __ballot_sync(0xFFFFFFFFU, mine);
  const int at = count + __popc(all & ((1U << static_cast<int>(threadIdx.x) % 32) - 1U));
  if (mine && at < kListed) list[at] = key;
  return count + __popc(all);
}

// Smallest and largest of a row of n values without the `outside` first ones at either end. lists: two of the warp's
// own; null where rows are no longer than a list.
template <class Row>
__device__ __forceinline__ Ends inner_range(const Row& row, int n, int outside,
                                            std::uint32_t (*lists)[kListed] = nullptr) {
  constexpr std::uint32_t flip = 0xFFFFFFFFU;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t lows[4] = {}, highs[4] = {};
  if (n <= kListed) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (32 * j + lane >= n) break;
      highs[j] = ordered_bits(row(32 * j + lane));
      lows[j] = highs[j] ^ flip;
    }
    const std::uint32_t high = select_key(highs, outside);
    return {from_ordered(select_key(lows, outside) ^ flip), from_ordered(high)};
  }
  float low = INFINITY, high = -INFINITY;
#pragma unroll 8
  for (int i = lane; i < n; i += 32) {
    low = fminf(low, row(i));
    high = fmaxf(high, row(i));
  }
  lows[0] = ordered_bits(low) ^ flip;
  highs[0] = ordered_bits(high);
  int low_count = kListed + 1, high_count = kListed + 1;
  if (outside < 32) {
    // Of 32 parts the extremes: as many as needed are not inside of these two. Few others are.
    low = from_ordered(select_key(lows, outside) ^ flip);
    high = from_ordered(select_key(highs, outside));
    if (outside == 0) return {low, high};
    low_count = high_count = 0;
#pragma unroll 8
    for (int i = lane; i < n; i += 32) {
      const float x = row(i);
      if (!__any_sync(0xFFFFFFFFU, x <= low || x >= high)) continue;
      low_count = append_keys(lists[0], low_count, x <= low, ordered_bits(x) ^ flip);
      high_count = append_keys(lists[1], high_count, x >= high, ordered_bits(x));
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 32 * j + lane;
      lows[j] = i < low_count ? lists[0][i] : 0;
      highs[j] = i < high_count ? lists[1][i] : 0;
    }
    __syncwarp();
  }
  const std::uint32_t first = low_count <= kListed ? select_key(lows, outside) : bisect_row(row, n, outside, flip);
  const std::uint32_t last = high_count <= kListed ? select_key(highs, outside) : bisect_row(row, n, outside, 0);
  return {from_ordered(first ^ flip), from_ordered(last)};
}

// ---- values

// A token's values of one head as they are coded: divided by the channels' factors, rotated.
template <bool Bfloat>
__device__ __forceinline__ void load_values(const BlockSealPage& page, int head, int token, float* row) {
  const BlockTile& tile = page.args.format.value;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ExactFormat format = page.exact_format();
  const std::uint8_t* from = page.exact(head) + token / kTile * format.tile_bytes() + format.key_bytes() +
                             token % 8 / 2 * 16 + token % kTile / 8 * 8;
  const auto* factors = reinterpret_cast<const std::uint16_t*>(page.block(head) + tile.factor_offset);
  const float share = __fdiv_rn(1.0F, static_cast<float>(tile.rotation));
  const auto put = [&](int channel, std::uint32_t pair) {
    const float2 both = ptx::widen2<Bfloat>(pair);
    float x = token % 2 == 0 ? both.x : both.y;
    if (tile.factor_offset >= 0) {  // a channel of zeros has factor 0
      const float factor = ptx::widen2<Bfloat>(factors[channel]).x;
      x = factor > 0 ? __fdiv_rn(x, factor) : 0.0F;
    }
    row[channel] = __fmul_rn(x, share);
  };
#pragma unroll 2
  for (int i = lane; i < tile.rows / 2; i += 32) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from + i / 8 * kQuadBytes + i % 8 * 64);
    put(i / 8 * kTile + i % 8, pairs.x);
    put(i / 8 * kTile + i % 8 + 8, pairs.y);
  }
  __syncwarp();
  if (tile.rotation == 1) return;
#pragma unroll 1
  for (int half = 1; half < tile.rotation; half *= 2) {
    for (int i = lane; i < tile.rows / 2; i += 32) {
      float* at = row + (i & -half) * 2 + (i & (half - 1));
      const float a = at[0];
      const float b = at[half];
      at[0] = __fadd_rn(a, b);
      at[half] = __fsub_rn(a, b);
    }
    __syncwarp();
  }
}

// ---- codes

// The grid's number of steps at a depth index.
__device__ __forceinline__ int levels_at(const BlockTile& tile, const BlockPlane (&planes)[kBlockPlanes], int i) {
  return tile.levels > 0 ? tile.levels : block_levels(tile, planes, i);
}

// Whether a value lies beyond its row's range.
__device__ __forceinline__ bool is_outlier(float x, Ends range) {
  return x < range.min || x > range.max;
}

// Codes as the planes of a tile hold them, of rows on uniform grids or with a table of levels.
struct BlockCoder {
  const std::uint8_t* nearest;  // null: no table
  int middle;                   // code of outliers; negative: that of their end
  Ends ends;
  Grid grid;
  int levels, shift;  // even widths lie one bit up

  // all_levels: of the depth index (levels_at).
  __device__ __forceinline__ BlockCoder(const BlockTile& tile, const std::uint8_t* table, bool keys, Ends range,
                                        int all_levels)
      : nearest(tile.table_bits > 0 ? table : nullptr),
        middle(tile.table_bits > 0 && !keys ? 1 << tile.table_bits >> 1 : -1),
        ends(range) {
    shift = nearest == nullptr && all_levels % 2 == 0 ? 1 : 0;
    levels = all_levels >> shift;
    grid = Grid::of(ends.min, ends.max, levels);
  }
  __device__ __forceinline__ void code(const float (&x)[4], std::uint32_t (&codes)[4]) const {
    row_codes(x, grid, levels, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] -= kRowMagicBits;
      codes[i] = nearest != nullptr ? nearest[codes[i]] : codes[i] << shift;
      if (middle >= 0 && is_outlier(x[i], ends)) codes[i] = static_cast<std::uint32_t>(middle);
    }
  }
};

// Who writes the words of a row block of a plane: all threads, or where there are few words one warp after another.
class PackTurns {
 public:
  __device__ explicit PackTurns(bool by_warp) : by_warp_(by_warp) {}
  // The first word of this thread in the next row block; negative: none.
  __device__ int first() {
    const auto thread = static_cast<int>(threadIdx.x);
    if (!by_warp_) return thread;
    return turn_++ % kBlockSealWarps == thread / 32 ? thread % 32 : -1;
  }
  __device__ int stride() const { return by_warp_ ? 32 : kBlockSealThreads; }

 private:
  bool by_warp_;
  int turn_ = 0;
};

// Words of fours begin..end-1 of a plane, which start a word group. codes: byte b of word (row, four) at
// codes[row * stride + four - base] is depth index 4 four + b of the tile; `block` is the head's.
__device__ __forceinline__ void pack_fours(const BlockPlane& plane, int row_tiles, int begin, int end,
                                           const std::uint32_t* codes, int stride, int base, std::uint8_t* block,
                                           PackTurns& turns) {
  const int bits = plane.bits;
  const std::uint32_t field = static_cast<std::uint32_t>((1 << bits) - 1) * 0x01010101U;
  std::uint8_t* to = block + plane.offset;
#pragma unroll 1
  for (int tile = 0; tile < row_tiles;) {
    const int left = row_tiles - tile;
    const int tiles = left >= 4 && bits < 4 ? 4 : (left >= 2 ? 2 : 1);
    const int shift = block_group_shift(bits, tiles);
    const int words = ((end + (1 << shift) - 1) >> shift << 4) - (begin >> shift << 4);
    const int from = turns.first();
    for (int i = from; from >= 0 && i < words; i += turns.stride()) {
      const int group = (begin >> shift) + i / kTile;
      const std::uint32_t* quads = codes + (tile * kTile + i % kTile) * stride + plane.first + (group << shift) - base;
      const int fours = min(1 << shift, end - (group << shift));
      std::uint32_t word = 0;
      int position = 0;
      for (int q = 0; q < fours; ++q) {
        for (int p = 0; p < tiles; ++p, position += bits) {
          word |= (quads[p * kTile * stride + q] >> plane.shift & field) << position;
        }
      }
      *reinterpret_cast<std::uint32_t*>(to + group * kFourBytes + i % kTile * kFour) = word;
    }
    to += block_groups(bits, tiles, plane.fours) * kFourBytes;
    tile += tiles;
  }
}

}  // namespace kvant::cuda
