// Scores of a block page: products of queries with the codes, and what outliers have beyond their codes.
#pragma once

#include "cuda/block_slot.cuh"

namespace kvant::cuda {

template <class C>
class BlockScores : public BlockSlot<C> {
 public:
  __device__ BlockScores(const DecodeArgs& args, const BlockFormat& format, const Segment& segment,
                         std::uint8_t* shared)
      : BlockSlot<C>(args, format, segment, shared) {
    float largest[4] = {1e-30F, 1e-30F, 1e-30F, 1e-30F};
    for (int i = lane_; i < C::key.dim; i += 32) {
      const float4 q = queries_[i];
      largest[0] = fmaxf(largest[0], fabsf(q.x));
      largest[1] = fmaxf(largest[1], fabsf(q.y));
      largest[2] = fmaxf(largest[2], fabsf(q.z));
      largest[3] = fmaxf(largest[3], fabsf(q.w));
    }
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) query_peak_[k] = warp_max(largest[k]);
  }

  // Of the page whose keys are here, in units of log2, into shared memory.
  __device__ void score() {
    score_tile(f_.key, 0);
    if (f_.rest.rows > 0) score_tile(f_.rest, 1);
    __syncwarp();
    add_key_outliers();
    __syncwarp();
  }

 protected:
  using Slot = BlockSlot<C>;
  using Slot::args_;
  using Slot::extra;
  using Slot::f_;
  using Slot::lane_;
  using Slot::own_;
  using Slot::owner_;
  using Slot::place_planes;
  using Slot::planes;
  using Slot::queries_;
  using Slot::rate;
  using Slot::raw;
  using Slot::scores;
  using Slot::units;
  using Slot::warp_max;
  using Slot::widen;

  float key_unit_ = 0;  // of `extra` in scores of vector g / 2; 0: nothing there

 private:
  // q * width of every depth index as bytes: rows 2v and 2v + 1 are the high and the low ones of vector v. Returns, for
  // the owned vector, {integer score -> score, q . min}.
  __device__ __forceinline__ float2 prepare_keys(const BlockTile& tile, int number) {
    constexpr int fours = C::key.dim / kFour;
    constexpr int rounds = (fours + 31) / 32;
    auto* x = reinterpret_cast<std::uint32_t*>(own_ + C::x_offset);
    place_planes(tile, number);
    float v[rounds][C::vectors][4];
    float peak[4] = {1e-30F, 1e-30F, 1e-30F, 1e-30F};
    float offset[4] = {0, 0, 0, 0};
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int four = min(32 * round + lane_, fours - 1);
      const float live = 32 * round + lane_ < fours ? 1.0F : 0.0F;
      const auto lows = *reinterpret_cast<const uint2*>(raw() + tile.min_offset + 8 * four);
      const auto highs = *reinterpret_cast<const uint2*>(raw() + tile.max_offset + 8 * four);
      const float2 low[2] = {ptx::widen2<C::bfloat>(lows.x), ptx::widen2<C::bfloat>(lows.y)};
      const float2 high[2] = {ptx::widen2<C::bfloat>(highs.x), ptx::widen2<C::bfloat>(highs.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float min = live * (i % 2 == 0 ? low[i / 2].x : low[i / 2].y);
        const float max = live * (i % 2 == 0 ? high[i / 2].x : high[i / 2].y);
        const float width = (max - min) * rate(tile, number, 4 * four + i);
        const float4 q = queries_[tile.order_offset < 0 ? 4 * four + i : raw()[tile.order_offset + 4 * four + i]];
        const float parts[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int k = 0; k < C::vectors; ++k) {
          v[round][k][i] = parts[k] * width;
          peak[k] = fmaxf(peak[k], fabsf(v[round][k][i]));
          offset[k] = fmaf(parts[k], min, offset[k]);
        }
      }
    }
    const float top = combine_lanes(peak, [](float a, float b) { return fmaxf(a, b); });
    const float zero = combine_lanes(offset, [](float a, float b) { return a + b; });
    const float factor = 32512.0F * ptx::reciprocal(top);  // high byte within +-127
    __syncwarp();                                          // the last tile's readers are done
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) {
      const float f = __shfl_sync(0xFFFFFFFFU, factor, k);
#pragma unroll
      for (int round = 0; round < rounds; ++round) {
        const int four = 32 * round + lane_;
        std::uint32_t high, low;
        split_bytes(v[round][k], f, high, low);
        if (four >= fours) continue;
        x[2 * k * C::x_stride + four] = high;
        x[(2 * k + 1) * C::x_stride + four] = low;
      }
    }
    __syncwarp();
    const float scale = args_.scale * kLog2e;
    return {top * (scale / 32512.0F), zero * scale};
  }

  __device__ __forceinline__ void score_tile(const BlockTile& tile, int number) {
    const float2 turn = prepare_keys(tile, number);
    const auto* x = reinterpret_cast<const std::uint32_t*>(own_ + C::x_offset) + owner_.g * C::x_stride + owner_.t;
    constexpr int most = 4;  // steps whose sums stay exact in a float's mantissa: 255 * 128 * 32 each
    float* to = scores(owner_.t) + tile.first;
#pragma unroll 1
    for (int chunk = 0; chunk * 64 < tile.rows; ++chunk) {
      float s[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) s[j][0] = s[j][1] = turn.y;
#pragma unroll 1
      for (int first = 0; first < C::steps; first += most) {
        std::int32_t c[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0x4B400000;
        with_joined(tile, chunk, [&](const auto joined) {
          constexpr int kJoined = decltype(joined)::value;
#pragma unroll(kJoined > 0 ? 4 : 1)
          for (int step = first; step < min(first + most, C::steps); ++step) {
            StepCodes codes;
            load_step<kJoined, 0>(tile, planes(number), raw(), chunk, owner_.g, 8 * step + owner_.t, codes);
            const std::uint32_t b0 = x[8 * step];
            const std::uint32_t b1 = x[8 * step + 4];
#pragma unroll
            for (int j = 0; j < 4; ++j) ptx::mma_bytes<true>(c[j], codes[j], b0, b1);
          }
        });
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float high = __int_as_float(c[j][2 * e]) - kKeyMagic;
            const float low = __int_as_float(c[j][2 * e + 1]) - kKeyMagic;
            s[j][e] = fmaf(fmaf(high, 256.0F, low), turn.x, s[j][e]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = 64 * chunk + kTile * j + 8 * e + owner_.g;
          if (row < tile.rows) to[row] = s[j][e];
        }
      }
    }
  }

  // What an outlier has beyond the value that its code says, the end that it is beyond; 0 for slots that are not used,
  // which hold the maximum.
  __device__ __forceinline__ float key_rest(int slot, int channel) const {
    const BlockTile& tile = f_.key;
    const float x = widen(raw() + tile.outliers.value_offset + 2 * slot);
    const float low = widen(raw() + tile.min_offset + 2 * channel);
    const float high = widen(raw() + tile.max_offset + 2 * channel);
    const bool above = x > high;
    const int end = block_table_entry(tile, above ? (1 << tile.table_bits) - 1 : 0);
    const float rest = x - fmaf(static_cast<float>(end), (high - low) * (1.0F / kTableStepsOnDevice), low);
    return above || x < low ? rest : 0.0F;
  }
  __device__ __forceinline__ void add_key_outliers() {
    const BlockOutliers& list = f_.key.outliers;
    key_unit_ = 0;
    if (list.slots == 0) return;
    float largest = 0;
#pragma unroll 4
    for (int slot = lane_; slot < list.slots; slot += 32) {
      largest = fmaxf(largest, fabsf(key_rest(slot, block_slot_channel(list, slot))));
    }
    largest = warp_max(largest);
    if (largest == 0) return;
    float factor[C::vectors];
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) factor[k] = units(list.slots, largest * query_peak_[k]);
#pragma unroll 4
    for (int slot = lane_; slot < list.slots; slot += 32) {
      const int channel = block_slot_channel(list, slot);
      const float rest = key_rest(slot, channel);
      if (rest == 0) continue;
      const float4 q = queries_[channel];
      int* to = extra(0) + raw()[list.row_offset + slot];
      atomicAdd(to, __float2int_rn(q.x * rest * factor[0]));
      atomicAdd(to + C::extra_stride, __float2int_rn(q.y * rest * factor[1]));
      atomicAdd(to + 2 * C::extra_stride, __float2int_rn(q.z * rest * factor[2]));
      atomicAdd(to + 3 * C::extra_stride, __float2int_rn(q.w * rest * factor[3]));
    }
    const float own =
        owner_.vector < 2 ? (owner_.vector == 0 ? factor[0] : factor[1]) : (owner_.vector == 2 ? factor[2] : factor[3]);
    key_unit_ = args_.scale * kLog2e / own;
  }

  float query_peak_[C::vectors];  // largest magnitude of each query
};

}  // namespace kvant::cuda
