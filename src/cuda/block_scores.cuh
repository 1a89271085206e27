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
    if constexpr (C::team == 1) scale_queries(shared);
  }

  // A team's queries, when the block has them in shared memory.
  __device__ void take_queries(const std::uint8_t* shared) {
    scales_ = reinterpret_cast<const float*>(shared + C::scale_offset);
    scale_ = scales_[owner_.t];
  }
  // What outliers add to the scores of this warp's tokens starts at nothing; a team's score() expects it.
  __device__ void clear_scores() const {
    if (f_.key.outliers.slots == 0) return;
    constexpr int own = kPage / C::team;  // tokens
    static_assert(C::vectors * own == 4 * 32 || C::team == 1);
    int* to = fixed_scores(4 * lane_ / own) + own * rank_ + 4 * lane_ % own;
    *reinterpret_cast<int4*>(to) = {0, 0, 0, 0};
  }

  // Of the page whose keys are here, in units of log2, into shared memory.
  __device__ void score() {
    add_key_outliers();
    if constexpr (C::team == 1) {
      score_tile(f_.key, 0);
      if (f_.rest.rows > 0) score_tile(f_.rest, 1);
      __syncwarp();
    } else {
      score_together();
    }
  }

 protected:
  using Slot = BlockSlot<C>;
  using Slot::args_;
  using Slot::bytes_of;
  using Slot::clear;
  using Slot::f_;
  using Slot::fixed_product;
  using Slot::fixed_scores;
  using Slot::kFixedRange;
  using Slot::lane_;
  using Slot::largest_magnitude;
  using Slot::own_;
  using Slot::owner_;
  using Slot::place_planes;
  using Slot::planes;
  using Slot::queries_;
  using Slot::query;
  using Slot::rank_;
  using Slot::rate;
  using Slot::raw;
  using Slot::scores;
  using Slot::warp_max;
  using Slot::widen;

  // to: where the scores of the tile's row 0 go. with_outliers: on top of what outliers add to them, which is there.
  __device__ __forceinline__ void store_scores(const BlockTile& tile, int chunk, bool with_outliers, float (&s)[4][2],
                                               float* to) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 64 * chunk + kTile * j + 8 * e + owner_.g;
        if (row >= tile.rows) continue;
        if (with_outliers) s[j][e] = fmaf(static_cast<float>(reinterpret_cast<int*>(to)[row]), key_unit_, s[j][e]);
        to[row] = s[j][e];
      }
    }
  }
  // A key channel's range, and what its lowest and its highest code say.
  struct CodeEnds {
    float low, high, low_code, high_code;
  };
  __device__ __forceinline__ CodeEnds code_ends(int channel) const {
    const BlockTile& tile = f_.key;
    const float low = widen(raw() + tile.min_offset + 2 * channel);
    const float high = widen(raw() + tile.max_offset + 2 * channel);
    const float step = (high - low) * (1.0F / kTableStepsOnDevice);
    const auto level = [&](int code) { return static_cast<float>(block_table_entry(tile, code)); };
    return {low, high, fmaf(level(0), step, low), fmaf(level((1 << tile.table_bits) - 1), step, low)};
  }

  float scale_;         // of scores of vector t: queries in shared memory are scaled to a peak of 1
  float key_unit_ = 0;  // of fixed_scores() in scores of vector t; 0: nothing there

 private:
  __device__ __forceinline__ void scale_queries(std::uint8_t* shared) {
    float largest[4] = {1e-30F, 1e-30F, 1e-30F, 1e-30F};
    for (int i = lane_; i < C::key.dim; i += 32) {
      const float4 q = queries_[i];
      largest[0] = fmaxf(largest[0], fabsf(q.x));
      largest[1] = fmaxf(largest[1], fabsf(q.y));
      largest[2] = fmaxf(largest[2], fabsf(q.z));
      largest[3] = fmaxf(largest[3], fabsf(q.w));
    }
    const int scaled = static_cast<int>(threadIdx.x) % C::vectors;
    float own = 0;
    float factor = 0;
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) {
      const float peak = warp_max(largest[k]);
      if (owner_.t == k) own = peak;
      if (scaled == k) factor = 1.0F / peak;
    }
    scale_ = own * args_.scale * kLog2e;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < C::vectors * C::key.dim; i += C::threads) {
      reinterpret_cast<float*>(shared)[i] *= factor;
    }
    __syncthreads();
  }

  // The ranges of the four channels of a four.
  struct Ends {
    float min[4], max[4];
  };
  __device__ __forceinline__ Ends ends_of(const BlockTile& tile, int four) const {
    const auto lows = *reinterpret_cast<const uint2*>(raw() + tile.min_offset + 8 * four);
    const auto highs = *reinterpret_cast<const uint2*>(raw() + tile.max_offset + 8 * four);
    const float2 low[2] = {ptx::widen2<C::bfloat>(lows.x), ptx::widen2<C::bfloat>(lows.y)};
    const float2 high[2] = {ptx::widen2<C::bfloat>(highs.x), ptx::widen2<C::bfloat>(highs.y)};
    return {{low[0].x, low[0].y, low[1].x, low[1].y}, {high[0].x, high[0].y, high[1].x, high[1].y}};
  }

  // q * width of every depth index as bytes: rows 2v and 2v + 1 are the high and the low ones of vector v. Returns, for
  // the owned vector, {integer score -> score, q . min}.
  __device__ __forceinline__ float2 prepare_keys(const BlockTile& tile, int number) {
    constexpr int fours = C::key.dim / kFour;
    constexpr int rounds = (fours + 31) / 32;
    std::uint32_t* x = bytes_of(number);
    place_planes(tile, number);
    float v[rounds][C::vectors][4];
    float peak[4] = {1e-30F, 1e-30F, 1e-30F, 1e-30F};
    float offset[4] = {0, 0, 0, 0};
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int four = min(32 * round + lane_, fours - 1);
      const float live = 32 * round + lane_ < fours ? 1.0F : 0.0F;
      const Ends ends = ends_of(tile, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float min = live * ends.min[i];
        const float max = live * ends.max[i];
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
    return {top * (scale_ / 32512.0F), zero * scale_};
  }

  // Adds products of chunk `chunk` over steps [first, end), at most 4 of them: their sums stay exact in a float's
  // mantissa, 255 * 128 * 32 each.
  __device__ __forceinline__ void add_steps(const BlockTile& tile, int number, int chunk, int first, int end,
                                            float factor, float (&s)[4][2]) const {
    const std::uint32_t* x = bytes_of(number) + owner_.g * C::x_stride + owner_.t;
    std::int32_t c[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0x4B400000;
    with_codes(tile, chunk, [&](const auto kind) {
      constexpr BlockCodes kCodes = decltype(kind)::value;
#pragma unroll(unrolled_steps(kCodes))
      for (int step = first; step < end; ++step) {
        StepCodes codes;
        load_step<kCodes, 0>(tile, planes(number), raw(), chunk, owner_.g, 8 * step + owner_.t, codes);
        const std::uint32_t b0 = x[8 * step];
        const std::uint32_t b1 = x[8 * step + 4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (has_four_tiles(kCodes) || kTile * (4 * chunk + j) < tile.rows) {
            ptx::mma_bytes<true>(c[j], codes[j], b0, b1);
          }
        }
      }
    });
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float high = __int_as_float(c[j][2 * e]) - kKeyMagic;
        const float low = __int_as_float(c[j][2 * e + 1]) - kKeyMagic;
        s[j][e] = fmaf(fmaf(high, 256.0F, low), factor, s[j][e]);
      }
    }
  }
  // A warp alone.
  __device__ __forceinline__ void score_tile(const BlockTile& tile, int number) {
    const float2 turn = prepare_keys(tile, number);
    constexpr int most = 4;
#pragma unroll 1
    for (int chunk = 0; chunk * 64 < tile.rows; ++chunk) {
      float s[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) s[j][0] = s[j][1] = turn.y;
#pragma unroll 1
      for (int first = 0; first < C::steps; first += most) {
        add_steps(tile, number, chunk, first, min(first + most, C::steps), turn.x, s);
      }
      store_scores(tile, chunk, key_unit_ != 0, s, scores(owner_.t) + tile.first);
    }
  }

  // A team: each warp prepares the vector of its rank, then takes chunks of tokens with half of the channels.
  __device__ __forceinline__ void score_together() {
#pragma unroll 1
    for (int number = 0; number < 2; ++number) {
      const BlockTile& tile = number == 0 ? f_.key : f_.rest;
      if (tile.rows > 0) prepare_vector(tile, number);
    }
    this->meet();
    const int of_key = 2 * ((f_.key.rows + 63) / 64);
    const int all = of_key + 2 * ((f_.rest.rows + 63) / 64);
#pragma unroll 1
    for (int i = rank_; i < all; i += C::team) {
      const int number = i < of_key ? 0 : 1;
      const BlockTile& tile = number == 0 ? f_.key : f_.rest;
      const int chunk = (number == 0 ? i : i - of_key) / 2;
      const int half = i % 2;
      static_assert(C::steps <= 8);
      const float2 turn = turns(number)[owner_.t];
      float s[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) s[j][0] = s[j][1] = half == 0 ? turn.y : 0.0F;
      add_steps(tile, number, chunk, half * C::steps / 2, (half + 1) * C::steps / 2, turn.x, s);
      store_scores(tile, chunk, half == 0 && key_unit_ != 0, s, scores(owner_.t, half) + tile.first);
    }
    this->meet();
  }

  // prepare_keys of one vector, for the team.
  __device__ __forceinline__ void prepare_vector(const BlockTile& tile, int number) {
    constexpr int fours = C::key.dim / kFour;
    constexpr int rounds = (fours + 31) / 32;
    static_assert(C::team == 1 || C::team == C::vectors);
    place_planes(tile, number);
    const float* queries = reinterpret_cast<const float*>(queries_) + rank_ * C::key.dim;
    float v[rounds][4];
    float peak = 1e-30F;
    float zero = 0;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int four = min(32 * round + lane_, fours - 1);
      const float live = 32 * round + lane_ < fours ? 1.0F : 0.0F;
      const Ends ends = ends_of(tile, four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = tile.order_offset < 0 ? 4 * four + i : raw()[tile.order_offset + 4 * four + i];
        const float q = live * queries[channel];
        v[round][i] = q * ((ends.max[i] - ends.min[i]) * rate(tile, number, 4 * four + i));
        peak = fmaxf(peak, fabsf(v[round][i]));
        zero = fmaf(q, ends.min[i], zero);
      }
    }
    peak = warp_max(peak);
    zero = ptx::xor_sum<16>(ptx::xor_sum<8>(ptx::xor_sum<4>(ptx::xor_sum<2>(ptx::xor_sum<1>(zero)))));
    const float factor = 32512.0F * ptx::reciprocal(peak);  // high byte within +-127
    std::uint32_t* x = bytes_of(number) + 2 * rank_ * C::x_stride;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int four = 32 * round + lane_;
      std::uint32_t high, low;
      split_bytes(v[round], factor, high, low);
      if (four >= fours) continue;
      x[four] = high;
      x[C::x_stride + four] = low;
    }
    if (lane_ == 0) turns(number)[rank_] = {peak * (scales_[rank_] / 32512.0F), zero * scales_[rank_]};
  }
  // A team's: of every vector, {integer score -> score, q . min}.
  __device__ float2* turns(int number) const {
    return reinterpret_cast<float2*>(own_ + C::turns_offset) + number * C::vectors;
  }

  // What an outlier has beyond the value that its code says, the end that it is beyond, goes to the scores first. Lists
  // belong to keys in the order of channels. Slots that are not used hold the maximum.
  __device__ __forceinline__ void add_key_outliers() {
    const BlockTile& tile = f_.key;
    const BlockOutliers& list = tile.outliers;
    key_unit_ = 0;
    if (list.slots == 0) return;
    // Ends and outliers lie side by side. An outlier's rest is at most twice the largest, its product with a query too.
    const float bound = 2 * largest_magnitude(raw() + tile.min_offset, 4 * C::key.dim + 2 * list.slots);
    if (bound == 0) return;
    if constexpr (C::team == 1) clear(fixed_scores(0), C::vectors * C::s_stride);
    const float factor = kFixedRange * ptx::reciprocal(bound);
    key_unit_ = bound * scale_ * (1.0F / kFixedRange);
    __syncwarp();
#pragma unroll 2
    for (int channel = 32 * rank_ + lane_; channel < C::key.dim; channel += C::team_threads) {
      const CodeEnds ends = code_ends(channel);
      const float4 q = query(channel);
      const float parts[4] = {q.x, q.y, q.z, q.w};
#pragma unroll 1
      for (int slot = channel * list.per_vector; slot < (channel + 1) * list.per_vector; slot += 2) {
        const std::uint32_t two = *reinterpret_cast<const std::uint32_t*>(raw() + list.value_offset + 2 * slot);
        const std::uint32_t rows = *reinterpret_cast<const std::uint16_t*>(raw() + list.row_offset + slot);
        const float2 x = ptx::widen2<C::bfloat>(two);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float value = i == 0 ? x.x : x.y;
          if (value >= ends.low && value <= ends.high) continue;
          const float rest = (value - (value > ends.high ? ends.high_code : ends.low_code)) * factor;
          int* to = fixed_scores(0) + (i == 0 ? rows & 0xFFU : rows >> 8);
#pragma unroll
          for (int k = 0; k < C::vectors; ++k) atomicAdd(to + k * C::s_stride, fixed_product(parts[k], rest));
        }
      }
    }
  }

  const float* scales_ = nullptr;  // a team's: scale_ of every vector
};

}  // namespace kvant::cuda
