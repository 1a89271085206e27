// Attention of few query vectors over block pages: one warp, one page, on integer tensor cores straight from the codes,
// with the arithmetic of decode_unit.cuh. What a page needs beyond it: steps of the grid from a table, planes that
// cover a part of the channels or tokens, orders of channels and tokens, factors, and outliers, whose residuals are
// added one by one.
#pragma once

#include "cuda/block_scores_turned.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/prefill_stages.cuh"

namespace kvant::cuda {

template <class C>
using ScoresOf = std::conditional_t<C::turned, BlockTurnedScores<C>, BlockScores<C>>;

// A warp with one page after another.
template <class C>
class BlockWarp : public ScoresOf<C> {
 public:
  __device__ BlockWarp(const DecodeArgs& args, const BlockFormat& format, const Segment& segment, std::uint8_t* shared)
      : ScoresOf<C>(args, format, segment, shared) {
    if constexpr (C::team == 1) see_lengths();
  }

  // Which positions are visible: once lengths may be read.
  __device__ void see_lengths() {
    const int row = (segment_.vector0 + owner_.vector) / args_.group;
    last_ = args_.lengths[segment_.sequence] - args_.rows + row + 1;
    first_ = args_.window > 0 ? max(0, last_ - args_.window) : 0;
  }

  // Softmax and outputs, of a team's warp those of its quarter of the tokens. position: of the page's first token.
  __device__ void mix(const std::uint8_t* page, int position, WarpState<C>& state) {
    const BlockTile& tile = f_.value;
    const float gain = prepare_values();
    const Mixed mixed = soften(position, gain, state);
    const auto* weights = reinterpret_cast<const std::uint32_t*>(own_ + C::weights_offset) + lane_;
    float(&o)[C::value_tiles][2] = state.o[0];
#pragma unroll(kTurns ? 1 : kChunks)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      std::int32_t c[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0x4B000000;
      with_codes(tile, chunk, [&](const auto kind) {
        constexpr BlockCodes kCodes = decltype(kind)::value;
        const auto add_step = [&](int step, std::uint32_t b0, std::uint32_t b1) {
          StepCodes codes;
          load_step<kCodes, C::value_tiles>(tile, planes(2), values(), chunk, owner_.g, 8 * step + owner_.t, codes);
#pragma unroll
          for (int j = 0; j < 4; ++j) ptx::mma_bytes<false>(c[j], codes[j], b0, b1);
        };
        if constexpr (C::team > 1) {
          static_assert(C::team == 1 || kGroups == 2);
          add_step(rank_, mixed.weights[0], mixed.weights[1]);
        } else {
#pragma unroll(unrolled_steps(kCodes))
          for (int step = 0; step < kPage / kStep; ++step) add_step(step, weights[64 * step], weights[64 * step + 32]);
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
          o[kTurns ? j : 4 * chunk + j][e] += out;
        }
      }
      if constexpr (kTurns) turn_outputs(o);
    }
    if (tile.outliers.slots > 0) add_value_outliers(page, o);
  }

  // After the last page.
  __device__ void finish(WarpState<C>& state) {
    if (f_.value.rotation > 1) state.unrotate(owner_, f_.value.rotation);
  }

 private:
  using Slot = BlockSlot<C>;
  using Slot::args_;
  using Slot::clear;
  using Slot::extra;
  using Slot::f_;
  using Slot::fixed_product;
  using Slot::grid;
  using Slot::kFixedRange;
  using Slot::lane_;
  using Slot::largest_magnitude;
  using Slot::list;
  using Slot::own_;
  using Slot::owner_;
  using Slot::place_planes;
  using Slot::planes;
  using Slot::range_;
  using Slot::rank_;
  using Slot::rate;
  using Slot::scores;
  using Slot::segment_;
  using Slot::values;
  using Slot::warp_max;
  using Slot::weights_of;
  using Slot::widen;
  static constexpr int kChunks = (C::value_tiles + 3) / 4;
  // The loop over chunks stays one: the outputs of the next chunk take the place of those of the last.
  static constexpr bool kTurns = C::value_tiles % 4 == 0;

  // This warp's tokens: of each group of 16 places, 4 are a lane's.
  static constexpr int kGroups = kPage / 16 / C::team;

  struct Mixed {
    float factor, bias;  // of the owned vector: integer sum -> output, and what every channel gets
    std::uint32_t weights[C::team == 1 ? 1 : kGroups];  // a team's; a warp alone has more, in shared memory
  };

  static __device__ __forceinline__ void turn_outputs(float (&o)[C::value_tiles][2]) {
    float first[4][2];
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j < 4) first[j][e] = o[j][e];
        o[j][e] = j + 4 < C::value_tiles ? o[(j + 4) % C::value_tiles][e] : first[j + 4 - C::value_tiles][e];
      }
    }
  }

  // {min, width} of every place of this warp; returns what makes weights times widths use 16 bits.
  __device__ __forceinline__ float prepare_values() {
    constexpr int own = 4 / C::team;  // places of a lane
    const BlockTile& tile = f_.value;
    place_planes(tile, 2);
    const std::uint8_t* ends = tile.shared_grid != 0 ? values() + f_.head_bytes - tile.min_offset : values();
    float widest = 1e-30F;
    float2 pairs[own];
#pragma unroll
    for (int b = 0; b < own; ++b) {
      const int i = own * (32 * rank_ + lane_) + b;
      const int at = 2 * block_grid_index(f_, tile, values(), i);
      const float low = widen(ends + tile.min_offset + at);
      const float high = widen(ends + tile.max_offset + at);
      const float width = (high - low) * rate(tile, 2, i);
      largest_end_ = fmaxf(b == 0 ? 0.0F : largest_end_, fmaxf(fabsf(low), fabsf(high)));
      pairs[b] = {low, width};
      widest = fmaxf(widest, width);
    }
    if constexpr (C::team == 1) {
      auto* to = reinterpret_cast<float4*>(grid() + 4 * lane_);
      to[0] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y};
      to[1] = {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
    } else {
      grid()[32 * rank_ + lane_] = pairs[0];
    }
    __syncwarp();
    return 65500.0F * ptx::reciprocal(warp_max(widest));
  }

  // Scores to weights, as bytes: lane 4g + t has the high (g even) or the low ones of vector g / 2 at places 16 i + 4t
  // to + 3, which is how they are multiplied. Weights themselves take the place of the scores where outliers need them.
  __device__ __forceinline__ Mixed soften(int position, float gain, WarpState<C>& state) {
    auto* weights = reinterpret_cast<std::uint32_t*>(own_ + C::weights_offset) + lane_;
    const int first = 16 * kGroups * rank_ + 4 * owner_.t;  // place
    float s[kGroups][4];
    take_scores(first, s);
    if (args_.softcap > 0) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) s[i / 4][i % 4] = cap_score(s[i / 4][i % 4], args_);
    }
    if (hides(position)) {
#pragma unroll
      for (int i = 0; i < 4 * kGroups; ++i) {
        const int place = first + 16 * (i / 4) + i % 4;
        const int at = position + (f_.tokens_offset < 0 ? place : values()[f_.tokens_offset + place]);
        if (at < max(first_, segment_.sinks) || at >= last_) s[i / 4][i % 4] = kMinusInfinity;
      }
    }
    float peak = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) peak = fmaxf(peak, s[i / 4][i % 4]);

    peak = ptx::xor_max<2>(ptx::xor_max<1>(peak));
    const float top = peak == kMinusInfinity ? 0.0F : peak;
    float sum = 0;
    float bias = 0;
    Mixed mixed;
    const unsigned pick = owner_.half != 0 ? 0x5140U : 0x4051U;  // the byte's pair comes out lowest
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const auto* pairs = reinterpret_cast<const float4*>(grid() + first + 16 * i);
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
      const std::uint32_t bytes = __byte_perm(__byte_perm(r[0], r[1], pick), __byte_perm(r[2], r[3], pick), 0x5410);
      (C::team == 1 ? weights[32 * i] : mixed.weights[i]) = bytes;
    }
    sum = ptx::xor_sum<2>(ptx::xor_sum<1>(sum));
    bias = ptx::xor_sum<2>(ptx::xor_sum<1>(bias));

    // To the owners of the vectors.
    const int from = 8 * owner_.t;
    const float owned_peak = __shfl_sync(0xFFFFFFFFU, peak, from);
    const float finite = state.raise(0, owned_peak);
    const float beta = ptx::exp2_fast(owned_peak - finite);
    if (f_.value.outliers.slots > 0) {
      const float own_beta = __shfl_sync(0xFFFFFFFFU, beta, owner_.vector);
      __syncwarp();  // both halves have read their scores
      float* to = weights_of(owner_.vector) + first;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (owner_.half == 0) {
          *reinterpret_cast<float4*>(to + 16 * i) = {s[i][0] * own_beta, s[i][1] * own_beta, s[i][2] * own_beta,
                                                     s[i][3] * own_beta};
        }
      }
    }
    __syncwarp();
    if constexpr (C::team > 1) this->clear_scores();
    const float owned_sum = __shfl_sync(0xFFFFFFFFU, sum, from);
    if (owner_.g == 0) state.sum[0] = fmaf(beta, owned_sum, state.sum[0]);
    mixed.factor = beta * ptx::reciprocal(gain);
    mixed.bias = beta * __shfl_sync(0xFFFFFFFFU, bias, from);
    return mixed;
  }
  // first: the lane's first place.
  __device__ __forceinline__ void take_scores(int first, float (&s)[kGroups][4]) const {
#pragma unroll
    for (int set = 0; set < C::score_sets; ++set) {
      const float* from = scores(owner_.vector, set) + first;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(from + 16 * i);
        s[i][0] = set == 0 ? four.x : s[i][0] + four.x;
        s[i][1] = set == 0 ? four.y : s[i][1] + four.y;
        s[i][2] = set == 0 ? four.z : s[i][2] + four.z;
        s[i][3] = set == 0 ? four.w : s[i][3] + four.w;
      }
    }
  }

  // Whether some vector must not see all of the page.
  __device__ __forceinline__ bool hides(int position) const {
    const int length = args_.lengths[segment_.sequence];
    return position + kPage > length - args_.rows + 1 || position < segment_.sinks ||
           (args_.window > 0 && position < length - args_.window);
  }

  // Adds what a slot's value has beyond the level of the middle code, which is the code of outliers. A team's warp
  // takes those of its own tokens, whose weights count from its own maximum.
  __device__ __forceinline__ void add_slot(std::uint16_t value, int channel, int place, float middle, float factor) {
    if (C::team > 1 && place / (kPage / C::team) != rank_) return;
    const float2 pair = grid()[place];
    const float rest = (ptx::widen2<C::bfloat>(value).x - fmaf(middle, pair.y, pair.x)) * factor;
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) atomicAdd(extra(k) + channel, fixed_product(weights_of(k)[place], rest));
  }
  __device__ __forceinline__ void add_value_outliers(const std::uint8_t* page, float (&o)[C::value_tiles][2]) {
    const BlockTile& tile = f_.value;
    const BlockOutliers& at = tile.outliers;
    const int count = range_.end - range_.begin;
    const int here = min(count, C::list_slots);
    if (count == 0) return;
    const auto* values_here = reinterpret_cast<const std::uint16_t*>(list(C::list_values, at.value_offset, 2));
    const auto* rows = list(C::list_rows, at.row_offset, 1);
    const auto* depths = list(C::list_depths, at.depth_offset, 1);
    const auto* all_values = reinterpret_cast<const std::uint16_t*>(page + at.value_offset) + range_.begin;
    const std::uint8_t* all_rows = page + at.row_offset + range_.begin;
    const std::uint8_t* all_depths = page + at.depth_offset + range_.begin;
    // What the copy has of other heads before and behind is within a bound as well.
    const int copied = ((at.value_offset + 2 * range_.begin) & 15) + 2 * here;
    float largest = largest_magnitude(own_ + C::list_values, (copied + 15) & ~15);
    for (int i = here + lane_; i < count; i += 32) {
      largest = fmaxf(largest, fabsf(ptx::widen2<C::bfloat>(all_values[i]).x));
    }
    const float bound = warp_max(largest) + warp_max(largest_end_);
    if (bound == 0) return;
    const float factor = kFixedRange * ptx::reciprocal(bound);  // weights are at most 1
    __syncwarp();                                               // the codes that `extra` takes the place of are read
    clear(extra(0), C::vectors * C::extra_stride);
    const auto middle = static_cast<float>(block_table_entry(tile, 1 << (tile.table_bits - 1)));
    __syncwarp();
#pragma unroll 2
    for (int i = lane_; i < here; i += 32) add_slot(values_here[i], rows[i], depths[i], middle, factor);
    for (int i = here + lane_; i < count; i += 32) add_slot(all_values[i], all_rows[i], all_depths[i], middle, factor);
    __syncwarp();
    const int* fixed = extra(owner_.t) + owner_.g;
    const float unit = bound * (1.0F / kFixedRange);
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        o[j][e] = fmaf(static_cast<float>(fixed[kTile * j + 8 * e]), unit, o[j][e]);
      }
    }
  }

  int first_, last_;       // visible positions of vector g / 2
  float largest_end_ = 0;  // magnitude of the ends of the page's value grids, of this lane's places
};

// From the warps of a block, and then from those of all parts, to the result.
template <class C>
__device__ void merge_warps_and_parts(const DecodeArgs& args, const VectorBlock& block, std::uint8_t* shared,
                                      const WarpState<C>& state, const Lane& lane) {
  using Records = PartRecords<C>;
  __syncthreads();  // results take the place of the parts of warps or teams
  publish_warp<C>(shared, static_cast<int>(threadIdx.x) / 32, state, lane);
  __syncthreads();
  const int first = 2 * static_cast<int>(threadIdx.x);
  const int step = 2 * static_cast<int>(blockDim.x);
  const int outputs = C::value.dim * min(C::vectors, args.rows * args.group - block.segment.vector0);
  const auto store = [&](int at, const Merged& r) {
    store_result<C>(args, block.segment, at / C::value.dim, at % C::value.dim, r);
  };
  const auto merged = [&](int at) {
    return merge_warps<C>(shared, static_cast<int>(blockDim.x) / 32, at / C::value.dim, at % C::value.dim);
  };
  if (block.parts == 1) {
    for (int at = first; at < outputs; at += step) store(at, merged(at));
    return;
  }
  const Records records(block.partial(args, Records::kRecord) - block.part * Records::kRecord);
  for (int at = first; at < outputs; at += step) records.store(block.part, at, merged(at));
  if (!arrive_last<C>(args, block.item(), block.parts, shared)) return;
  for (int at = first; at < outputs; at += step) store(at, records.load(block.parts, at));
}

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, C::value.dim > 128              ? 2
                                              : C::key.dim > 128 || C::turned ? 3
                                                                              : 4)
    block_decode_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ ReferenceArgs layout,
                        int parts, const __grid_constant__ BlockFormat format) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Lane lane;
  const VectorBlock block(args, C::vectors, parts);
  Segment segment = block.segment;
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
  state.last[0] = block.row_end(args, lane.t);
  state.first[0] = args.window > 0 ? max(0, state.last[0] - args.window) : 0;
  const int first_page = max(layout.first_page[segment.sequence], block.begin / kPage);
  const int page_count = max(0, min(segment.coded_end, (block.most + kPage - 1) / kPage) - first_page);
  const Share pages(page_count, block.part, parts);

  BlockWarp<C> worker(args, format, segment, shared);
  const std::int32_t* table = args.table + segment.sequence * args.table_stride + first_page;
  const auto page_of = [&](int i) { return i < pages.end ? args.pages + table[i] * args.page_stride : nullptr; };
  const std::uint8_t* page = page_of(pages.begin + warp);
  worker.fetch_keys(page);
  for (int i = pages.begin + warp; i < pages.end; i += C::warps) {
    worker.wait_keys();
    const int position = (first_page + i) * kPage;
    if constexpr (C::turned) {
      worker.score(position);
    } else {
      worker.score();
    }
    worker.fetch_values(page);
    worker.wait_values();
    worker.mix(page, position, state);
    page = page_of(i + C::warps);
    worker.fetch_keys(page);
  }

  worker.finish(state);

  const int sink_tiles = (segment.sinks + kTile - 1) / kTile;
  const int tail_tiles = max(0, (block.most - segment.coded_end * kPage + kTile - 1) / kTile);
  const Share tiles(sink_tiles + tail_tiles, block.part, parts);
  for (int i = tiles.begin + warp; i < tiles.end; i += C::warps) {
    const ExactTile tile = exact_tile<C>(args, segment, segment.coded_end + i);
    if (tile.data != nullptr) add_exact_tile<C>(args, segment, tile, state, lane);
  }

  merge_warps_and_parts<C>(args, block, shared, state, lane);
}

}  // namespace kvant::cuda
