// Attention of few query vectors over block pages: one warp, one page, on integer tensor cores straight from the codes,
// with the arithmetic of decode_unit.cuh. What a page needs beyond it: steps of the grid from a table, planes that
// cover a part of the channels or tokens, orders of channels and tokens, factors, and outliers, whose residuals are
// added one by one.
#pragma once

#include "cuda/block_codes.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/decode_sorted.cuh"
#include "cuda/reference.hpp"

namespace kvant::cuda {

template <int KeyDim, int ValueDim, bool Bfloat>
struct BlockDecodeConfig {
  static constexpr KeyFormat key{2, KeyDim};  // formats: for their dimensions
  static constexpr ValueFormat value{2, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool sorted = true;  // queries are in shared memory
  static constexpr bool bfloat = Bfloat;
  static constexpr int n_tiles = 1;
  static constexpr int vectors = 4;
  static constexpr int warps = 4;
  static constexpr int threads = warps * 32;
  static constexpr int units_per_page = 1;
  static constexpr int steps = KeyDim / kStep;
  static constexpr int value_tiles = ValueDim / kTile;

  // Shared memory: queries as [channel][vector]; a part per warp; when all pages are done, results take its place.
  static constexpr int x_stride = KeyDim / kFour + 4;  // words of a row of bytes; spreads rows over the banks
  static constexpr int s_stride = kPage + 8;           // floats of a row of scores
  static constexpr int warp_offset = KeyDim * vectors * 4;
  static constexpr int merge_stride = ValueDim + 8;
  static constexpr int merge_offset = warp_offset;
  static constexpr int state_offset = merge_offset + warps * vectors * merge_stride * 4;
  static constexpr int merge_end = state_offset + warps * vectors * 8;

  // Inside a warp's part.
  static constexpr int x_offset = vectors * s_stride * 4;  // scores come first
  static constexpr int grid_bytes = kPage * 8;             // of values; takes the place of x
  static constexpr int x_bytes = 2 * vectors * x_stride * 4;
  static constexpr int planes_offset = x_offset + (x_bytes > grid_bytes ? x_bytes : grid_bytes);
  static constexpr int sums_offset = planes_offset + 3 * kBlockPlanes * 16;
  static constexpr int sums_stride = ValueDim + 8;
  static constexpr int weights_offset = sums_offset + vectors * sums_stride * 4;
  static constexpr int list_slots = 256;  // of outliers; takes the place of the weights
  static constexpr int extra_stride = (ValueDim > kPage ? ValueDim : kPage) + 8;
  static constexpr int extra_offset = weights_offset + list_slots * 4;
  static constexpr int raw_offset = extra_offset + vectors * extra_stride * 4;
  static constexpr int fixed_bytes = raw_offset;

  static constexpr int warp_bytes(int page_bytes) { return fixed_bytes + page_bytes; }
  static constexpr int shared_bytes(int page_bytes) {
    const int all = warp_offset + warps * warp_bytes(page_bytes);
    return all > merge_end ? all : merge_end;
  }
};

// A warp with one page after another.
template <class C>
class BlockWarp {
 public:
  __device__ BlockWarp(const DecodeArgs& args, const BlockFormat& format, const Segment& segment, std::uint8_t* shared)
      : args_(args),
        f_(format),
        segment_(segment),
        queries_(reinterpret_cast<const float4*>(shared)),
        own_(shared + C::warp_offset + threadIdx.x / 32 * C::warp_bytes(block_half_bytes(format))),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    const int row = (segment.vector0 + owner_.vector) / args.group;
    last_ = args.lengths[segment.sequence] - args.rows + row + 1;
    first_ = args.window > 0 ? max(0, last_ - args.window) : 0;
    for (int i = lane_; i < C::vectors * C::sums_stride; i += 32) sums(0)[i] = 0;
    for (int i = lane_; i < C::vectors * C::extra_stride; i += 32) extra(0)[i] = 0;
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
#pragma unroll
    for (int i = 0; i < kBlockPlanes; ++i) {
      if (lane_ != i) continue;
      planes(0)[i] = f_.key.planes[i];
      planes(1)[i] = f_.rest.planes[i];
      planes(2)[i] = f_.value.planes[i];
    }
    __syncwarp();
  }

  // Keys and values of a page take turns in one slot: warps that wait cost less than the slots that more warps need.
  __device__ void fetch_keys(const std::uint8_t* page) {
    __syncwarp();
    if (page == nullptr) return;
    copy(raw(), page + head_offset(), f_.value.plane_offset);
    if (f_.value.outliers.slots > 0) range_ = block_outlier_range(f_, page, segment_.kv_head);
    ptx::async_commit();
  }
  __device__ void fetch_values(const std::uint8_t* page) {
    __syncwarp();
    copy(raw(), page + head_offset() + f_.value.plane_offset, f_.head_bytes - f_.value.plane_offset);
    if (f_.value.shared_grid != 0) copy(values() + f_.head_bytes, page + f_.value.min_offset, kPage * 4);
    ptx::async_commit();
  }

  // Scores of the page whose keys are here, in units of log2, into shared memory.
  __device__ void score(const std::uint8_t* page) {
    hold_outliers(page);
    score_tile(f_.key, 0);
    if (f_.rest.rows > 0) score_tile(f_.rest, 1);
    __syncwarp();
    add_key_outliers();
    __syncwarp();
  }

  // Softmax and outputs. position: of the page's first token.
  __device__ void mix(const std::uint8_t* page, int position, WarpState<C>& state) {
    const BlockTile& tile = f_.value;
    const float gain = prepare_values();
    const Mixed mixed = soften(position, gain, state);
    const auto* weights = reinterpret_cast<const std::uint32_t*>(own_ + C::weights_offset) + lane_;
    float* own = sums(owner_.t) + owner_.g;
#pragma unroll 1
    for (int chunk = 0; chunk < (C::value_tiles + 3) / 4; ++chunk) {
      std::int32_t c[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0x4B000000;
      with_joined(tile, chunk, [&](const auto joined) {
        constexpr int kJoined = decltype(joined)::value;
#pragma unroll(kJoined > 0 ? 4 : 1)
        for (int step = 0; step < kPage / kStep; ++step) {
          StepCodes codes;
          load_step<kJoined, C::value_tiles>(tile, planes(2), values(), chunk, owner_.g, 8 * step + owner_.t, codes);
          const std::uint32_t b0 = weights[64 * step];
          const std::uint32_t b1 = weights[64 * step + 32];
#pragma unroll
          for (int j = 0; j < 4; ++j) ptx::mma_bytes<false>(c[j], codes[j], b0, b1);
        }
      });

#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * chunk + j >= C::value_tiles) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float high = __int_as_float(c[j][2 * e]) - kValueMagic;
          const float low = __int_as_float(c[j][2 * e + 1]) - kValueMagic;
          float out = fmaf(fmaf(high, 256.0F, low), mixed.factor, mixed.bias);
          const int channel = kTile * (4 * chunk + j) + 8 * e;
          if (tile.factor_offset >= 0) out *= widen(values() + tile.factor_offset + 2 * (channel + owner_.g));
          own[channel] += out;
        }
      }
    }
    if (f_.value.outliers.slots > 0) {
      __syncwarp();
      add_value_outliers(page);
    }
  }

  // After the last page: outputs to their owners, rotated values to plain ones.
  __device__ void finish(WarpState<C>& state) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        state.o[0][j][e] = sums(owner_.t)[kTile * j + 8 * e + owner_.g];
      }
    }
    if (f_.value.rotation > 1) turn(state);
  }

 private:
  static constexpr int kHeld = C::list_slots / 32;  // slots of the values' list that a lane asks for early

  struct Mixed {
    float factor, bias;  // of the owned vector: integer sum -> output, and what every channel gets
  };

  __device__ std::uint8_t* raw() const {
    return own_ + C::raw_offset;
  }
  // What offsets of a head's block count from while its values are here.
  __device__ std::uint8_t* values() const {
    return raw() - f_.value.plane_offset;
  }
  __device__ float* scores(int vector) const {
    return reinterpret_cast<float*>(own_) + vector * C::s_stride;
  }
  // Outputs so far, relative to the running maximum of the vector. Not in registers: then a loop over channels is one.
  __device__ float* sums(int vector) const {
    return reinterpret_cast<float*>(own_ + C::sums_offset) + vector * C::sums_stride;
  }
  __device__ std::uint32_t* list() const {
    return reinterpret_cast<std::uint32_t*>(own_ + C::weights_offset);
  }
  // What outliers add, in fixed point: shared memory adds integers at once, floats only by trial. Zeros between uses.
  __device__ int* extra(int vector) const {
    return reinterpret_cast<int*>(own_ + C::extra_offset) + vector * C::extra_stride;
  }
  static __device__ __forceinline__ float warp_max(float x) {
    return ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(x)))));
  }
  // Fixed-point units per 1, so that `count` numbers up to `largest` cannot overflow.
  static __device__ __forceinline__ float units(int count, float largest) {
    return fminf(1073741824.0F / (static_cast<float>(count) * largest), 1e30F);
  }
  __device__ float2* grid() const {
    return reinterpret_cast<float2*>(own_ + C::x_offset);
  }
  __device__ BlockPlane* planes(int tile) const {
    return reinterpret_cast<BlockPlane*>(own_ + C::planes_offset) + tile * kBlockPlanes;
  }
  __device__ std::int64_t head_offset() const {
    return static_cast<std::int64_t>(segment_.kv_head) * f_.head_bytes;
  }
  static __device__ __forceinline__ float widen(const std::uint8_t* from) {
    return ptx::widen2<C::bfloat>(*reinterpret_cast<const std::uint16_t*>(from)).x;
  }
  __device__ void copy(std::uint8_t* to, const std::uint8_t* from, int bytes) const {
    const std::uint32_t address = ptx::shared_address(to);
    for (int i = lane_ * 16; i < bytes; i += 512) ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + i);
  }

  // The planes of this page, where pages have their own.
  __device__ void place_planes(const BlockTile& tile, int number) {
    if (tile.counts_offset < 0) return;  // only keys' differ
    BlockPlane p[kBlockPlanes];
    block_planes(tile, raw(), p);
#pragma unroll
    for (int i = 0; i < kBlockPlanes; ++i) {
      if (lane_ == i) planes(number)[i] = p[i];
    }
    __syncwarp();
  }
  // 1 / steps of the grid as codes are read.
  __device__ __forceinline__ float rate(const BlockTile& tile, int number, int i) const {
    if (tile.levels > 0) return tile.rate;
    int levels = 0;
#pragma unroll 1
    for (int p = 0; p < kBlockPlanes; ++p) {
      const BlockPlane plane = planes(number)[p];
      levels += plane.covers(i) ? plane.largest() : 0;
    }
    return ptx::reciprocal(static_cast<float>(levels << block_lift(tile, i)));
  }

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

  // {min, width} of every place; returns what makes weights times widths use 16 bits.
  __device__ __forceinline__ float prepare_values() {
    const BlockTile& tile = f_.value;
    place_planes(tile, 2);
    const std::uint8_t* ends = tile.shared_grid != 0 ? values() + f_.head_bytes - tile.min_offset : values();
    float widest = 1e-30F;
    float2 pairs[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int i = 4 * lane_ + b;
      const int at = 2 * block_grid_index(f_, tile, values(), i);
      const float low = widen(ends + tile.min_offset + at);
      const float width = (widen(ends + tile.max_offset + at) - low) * rate(tile, 2, i);
      pairs[b] = {low, width};
      widest = fmaxf(widest, width);
    }
    auto* to = reinterpret_cast<float4*>(grid() + 4 * lane_);
    to[0] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y};
    to[1] = {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
    __syncwarp();
    widest = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(widest)))));
    return 65500.0F * ptx::reciprocal(widest);
  }

  // Scores to weights, as bytes: lane 4g + t has the high (g even) or the low ones of vector g / 2 at places 16 i + 4t
  // to + 3, which is how they are multiplied. Weights themselves take the place of the scores where outliers need them.
  __device__ __forceinline__ Mixed soften(int position, float gain, WarpState<C>& state) {
    auto* weights = reinterpret_cast<std::uint32_t*>(own_ + C::weights_offset) + lane_;
    float* own = scores(owner_.vector) + 4 * owner_.t;
    float s[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(own + 16 * i);
      s[i][0] = four.x;
      s[i][1] = four.y;
      s[i][2] = four.z;
      s[i][3] = four.w;
    }
    if (key_unit_ != 0) {
      int* fixed = extra(owner_.vector) + 4 * owner_.t;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int4 four = *reinterpret_cast<const int4*>(fixed + 16 * i);
        s[i][0] = fmaf(static_cast<float>(four.x), key_unit_, s[i][0]);
        s[i][1] = fmaf(static_cast<float>(four.y), key_unit_, s[i][1]);
        s[i][2] = fmaf(static_cast<float>(four.z), key_unit_, s[i][2]);
        s[i][3] = fmaf(static_cast<float>(four.w), key_unit_, s[i][3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (owner_.half == 0) *reinterpret_cast<int4*>(fixed + 16 * i) = {0, 0, 0, 0};
      }
    }
    if (args_.softcap > 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i / 4][i % 4] = cap_score(s[i / 4][i % 4], args_);
    }
    if (hides(position)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int place = 16 * (i / 4) + 4 * owner_.t + i % 4;
        const int at = position + (f_.tokens_offset < 0 ? place : values()[f_.tokens_offset + place]);
        if (at < max(first_, segment_.sinks) || at >= last_) s[i / 4][i % 4] = kMinusInfinity;
      }
    }
    float peak = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < 32; ++i) peak = fmaxf(peak, s[i / 4][i % 4]);

    peak = ptx::xor_max<2>(ptx::xor_max<1>(peak));
    const float top = peak == kMinusInfinity ? 0.0F : peak;
    float sum = 0;
    float bias = 0;
    const unsigned pick = owner_.half != 0 ? 0x5140U : 0x4051U;  // the byte's pair comes out lowest
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto* pairs = reinterpret_cast<const float4*>(grid() + 16 * i + 4 * owner_.t);
      const float4 one = pairs[0];
      const float4 two = pairs[1];
      const float low[4] = {one.x, one.z, two.x, two.z};
      const float width[4] = {one.y, one.w, two.y, two.w};
      std::uint32_t r[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[i][b] = ptx::exp2_fast(s[i][b] - top);
        sum += s[i][b];
        bias = fmaf(s[i][b], low[b], bias);
        r[b] = __float_as_uint(fmaf(s[i][b] * gain, width[b], kValueMagic));
      }
      weights[32 * i] = __byte_perm(__byte_perm(r[0], r[1], pick), __byte_perm(r[2], r[3], pick), 0x5410);
    }
    sum = ptx::xor_sum<2>(ptx::xor_sum<1>(sum));
    bias = ptx::xor_sum<2>(ptx::xor_sum<1>(bias));

    // To the owners of the vectors.
    const int from = 8 * owner_.t;
    const float owned_peak = __shfl_sync(0xFFFFFFFFU, peak, from);
    const float before = state.maximum[0];
    const float finite = state.raise(0, owned_peak);
    const float beta = ptx::exp2_fast(owned_peak - finite);
    if (__any_sync(0xFFFFFFFFU, state.maximum[0] > before)) {
      const float alpha = ptx::exp2_fast(before - finite);
      for (int c = owner_.g; c < C::value.dim; c += 8) sums(owner_.t)[c] *= alpha;
    }
    if (f_.value.outliers.slots > 0) {
      const float own_beta = __shfl_sync(0xFFFFFFFFU, beta, owner_.vector);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (owner_.half == 0) {
          *reinterpret_cast<float4*>(own + 16 * i) = {s[i][0] * own_beta, s[i][1] * own_beta, s[i][2] * own_beta,
                                                      s[i][3] * own_beta};
        }
      }
    }
    __syncwarp();
    const float owned_sum = __shfl_sync(0xFFFFFFFFU, sum, from);
    if (owner_.g == 0) state.sum[0] = fmaf(beta, owned_sum, state.sum[0]);
    return {beta * ptx::reciprocal(gain), beta * __shfl_sync(0xFFFFFFFFU, bias, from)};
  }

  // Whether some vector must not see all of the page.
  __device__ __forceinline__ bool hides(int position) const {
    const int length = args_.lengths[segment_.sequence];
    return position + kPage > length - args_.rows + 1 || position < segment_.sinks ||
           (args_.window > 0 && position < length - args_.window);
  }

  __device__ __forceinline__ std::uint32_t load_slot(const std::uint8_t* page, int slot) const {
    const BlockOutliers& list = f_.value.outliers;
    return *reinterpret_cast<const std::uint16_t*>(page + list.value_offset + 2 * slot) |
           static_cast<std::uint32_t>(page[list.row_offset + slot]) << 16 |
           static_cast<std::uint32_t>(page[list.depth_offset + slot]) << 24;
  }
  // Their way from memory is long: what add_value_outliers() needs is asked for before the scores.
  __device__ __forceinline__ void hold_outliers(const std::uint8_t* page) {
    if (f_.value.outliers.slots == 0) return;

#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int slot = range_.begin + lane_ + 32 * i;
      if (slot < range_.end) held_[i] = load_slot(page, slot);
    }
  }
  // The residual of a slot: the code of an outlier is the middle one.
  __device__ __forceinline__ float value_rest(std::uint32_t slot) const {
    const BlockTile& tile = f_.value;
    const float2 pair = grid()[slot >> 24];
    const int middle = block_table_entry(tile, 1 << (tile.table_bits - 1));
    return ptx::widen2<C::bfloat>(slot & 0xFFFFU).x - fmaf(static_cast<float>(middle), pair.y, pair.x);
  }
  __device__ __forceinline__ void add_value_outliers(const std::uint8_t* page) {
    const int count = range_.end - range_.begin;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) list()[lane_ + 32 * i] = held_[i];
    const auto slot_at = [&](int i) { return i < C::list_slots ? list()[i] : load_slot(page, range_.begin + i); };
    float largest = 0;
#pragma unroll 1
    for (int i = lane_; i < count; i += 32) largest = fmaxf(largest, fabsf(value_rest(slot_at(i))));
    largest = warp_max(largest);
    if (largest == 0) return;
    const float factor = units(count, largest);  // weights are at most 1
#pragma unroll 2
    for (int i = lane_; i < count; i += 32) {
      const std::uint32_t slot = slot_at(i);
      const float rest = value_rest(slot) * factor;
      int* to = extra(0) + (slot >> 16 & 0xFFU);
#pragma unroll
      for (int k = 0; k < C::vectors; ++k) {
        atomicAdd(to + k * C::extra_stride, __float2int_rn(scores(k)[slot >> 24] * rest));
      }
    }
    __syncwarp();
    int* fixed = extra(owner_.t);
#pragma unroll 4
    for (int c = owner_.g; c < C::value.dim; c += 8) {
      sums(owner_.t)[c] = fmaf(static_cast<float>(fixed[c]), 1.0F / factor, sums(owner_.t)[c]);
      fixed[c] = 0;
    }
    __syncwarp();
  }

  // The Hadamard transform of each block of channels, whose number is 16j + 8e + g. Pages hold the transform divided by
  // the block, so this one needs no factor.
  __device__ void turn(WarpState<C>& state) const {
    float(&o)[C::value_tiles][2] = state.o[0];
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
      for (int bit = 1; bit < 8; bit *= 2) {
        const float sign = (owner_.g & bit) != 0 ? -1.0F : 1.0F;
#pragma unroll
        for (int e = 0; e < 2; ++e) o[j][e] = fmaf(sign, o[j][e], __shfl_xor_sync(0xFFFFFFFFU, o[j][e], 4 * bit));
      }
      WarpState<C>::add_and_subtract(o[j][0], o[j][1]);
    }
#pragma unroll
    for (int span = 1; span < C::value_tiles; span *= 2) {
      if (span >= f_.value.rotation / kTile) break;
#pragma unroll
      for (int j = 0; j < C::value_tiles; ++j) {
        if ((j & span) != 0 || j + span >= C::value_tiles) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) WarpState<C>::add_and_subtract(o[j][e], o[j + span][e]);
      }
    }
  }

  const DecodeArgs& args_;
  const BlockFormat& f_;
  const Segment& segment_;
  const float4* queries_;
  std::uint8_t* own_;
  int lane_;
  Lane owner_;
  int first_, last_;  // visible positions of vector g / 2
  BlockRange range_;
  float query_peak_[C::vectors];  // largest magnitude of each query
  float key_unit_ = 0;            // of `extra` in scores of vector g / 2; 0: nothing there
  std::uint32_t held_[kHeld] = {};
};

// This part's share [begin, end) of `count` things.
struct Share {
  int begin, end;
  __device__ Share(int count, int part, int parts)
      : begin(static_cast<int>(static_cast<std::int64_t>(count) * part / parts)),
        end(static_cast<int>(static_cast<std::int64_t>(count) * (part + 1) / parts)) {}
};

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::value.dim <= 128 ? 3 : 2)
    block_decode_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ ReferenceArgs layout,
                        int parts, const __grid_constant__ BlockFormat format) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int part = static_cast<int>(blockIdx.z) % parts;
  const Lane lane;
  Segment segment;
  segment.sequence = static_cast<int>(blockIdx.z) / parts;
  segment.kv_head = static_cast<int>(blockIdx.y);
  segment.vector0 = static_cast<int>(blockIdx.x) * C::vectors;
  segment.coded_end = layout.coded_pages[segment.sequence];
  segment.sinks = layout.sinks[segment.sequence];

  for (int i = static_cast<int>(threadIdx.x); i < C::vectors * C::key.dim; i += C::threads) {
    const std::uint16_t* q = query_row(args, segment, i / C::key.dim);
    reinterpret_cast<float*>(shared)[i % C::key.dim * C::vectors + i / C::key.dim] =
        q != nullptr ? ptx::widen2<C::bfloat>(q[i % C::key.dim]).x : 0.0F;
  }
  __syncthreads();

  WarpState<C> state;
  state.reset();
  const int before = args.lengths[segment.sequence] - args.rows + 1;
  state.last[0] = before + (segment.vector0 + lane.t) / args.group;
  state.first[0] = args.window > 0 ? max(0, state.last[0] - args.window) : 0;
  // What any of the vectors sees.
  const int most = before + min(args.rows - 1, (segment.vector0 + C::vectors - 1) / args.group);
  const int begin = args.window > 0 ? max(0, before + segment.vector0 / args.group - args.window) : 0;
  const int first_page = max(layout.first_page[segment.sequence], begin / kPage);
  const int page_count = max(0, min(segment.coded_end, (most + kPage - 1) / kPage) - first_page);
  const Share pages(page_count, part, parts);

  BlockWarp<C> worker(args, format, segment, shared);
  const std::int32_t* table = args.table + segment.sequence * args.table_stride + first_page;
  const auto page_of = [&](int i) { return i < pages.end ? args.pages + table[i] * args.page_stride : nullptr; };
  const std::uint8_t* page = page_of(pages.begin + warp);
  worker.fetch_keys(page);
  for (int i = pages.begin + warp; i < pages.end; i += C::warps) {
    ptx::async_wait<0>();
    __syncwarp();
    worker.score(page);
    worker.fetch_values(page);
    ptx::async_wait<0>();
    __syncwarp();
    worker.mix(page, (first_page + i) * kPage, state);
    page = page_of(i + C::warps);
    worker.fetch_keys(page);
  }

  worker.finish(state);

  const int sink_tiles = (segment.sinks + kTile - 1) / kTile;
  const int tail_tiles = max(0, (most - segment.coded_end * kPage + kTile - 1) / kTile);
  const Share tiles(sink_tiles + tail_tiles, part, parts);
  for (int i = tiles.begin + warp; i < tiles.end; i += C::warps) {
    const ExactTile tile = exact_tile<C>(args, segment, segment.coded_end + i);
    if (tile.data != nullptr) add_exact_tile<C>(args, segment, tile, state, lane);
  }

  __syncthreads();  // results take the place of the warps' parts
  publish_warp<C>(shared, warp, state, lane);
  __syncthreads();
  const auto* outputs = reinterpret_cast<const float*>(shared + C::merge_offset);
  const auto* states = reinterpret_cast<const float2*>(shared + C::state_offset);
  const auto item =
      (static_cast<std::int64_t>(segment.sequence) * gridDim.y + segment.kv_head) * gridDim.x + blockIdx.x;
  float* partial = args.partials + (item * parts + part) * C::vectors * (C::value.dim + 2);
  const int live = min(C::vectors, args.rows * args.group - segment.vector0);
  for (int i = static_cast<int>(threadIdx.x); i < live * C::value.dim; i += C::threads) {
    const int vector = i / C::value.dim;
    const int channel = i % C::value.dim;
    const Merged r = merge_parts<C::warps>(
        C::warps, [&](int w) { return states[w * C::vectors + vector]; },
        [&](int w) { return outputs[(w * C::vectors + vector) * C::merge_stride + channel]; });
    if (parts == 1) {
      store_result<C>(args, segment, vector, channel, r);
      continue;
    }
    float* to = partial + vector * (C::value.dim + 2);
    to[channel] = r.output;
    if (channel == 0) *reinterpret_cast<float2*>(to + C::value.dim) = {r.maximum, r.sum};
  }
}

}  // namespace kvant::cuda
