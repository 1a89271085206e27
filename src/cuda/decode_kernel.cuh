// Decode attention from the codes: the kernel.
#pragma once

#include "cuda/decode_merge.cuh"
#include "cuda/decode_pipeline.cuh"
#include "cuda/decode_sorted.cuh"

namespace kvant::cuda {

template <class C>
__device__ void load_queries(const DecodeArgs& args, const Segment& segment, WarpState<C>& state, const Lane& lane) {
  const int length = args.lengths[segment.sequence];
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    const std::uint16_t* q = query_row(args, segment, 4 * n + lane.vector);
    if constexpr (C::key.high_steps > 0) state.query[n] = q;
#pragma unroll
    for (int s = 0; s < (C::sorted ? 0 : C::steps); ++s) {
      uint2 raw{0, 0};
      if (q != nullptr) raw = *reinterpret_cast<const uint2*>(q + 32 * s + 16 * lane.half + 4 * lane.t);
      const float2 a = ptx::widen2<C::bfloat>(raw.x);
      const float2 b = ptx::widen2<C::bfloat>(raw.y);
      state.q[n][4 * s] = a.x;
      state.q[n][4 * s + 1] = a.y;
      state.q[n][4 * s + 2] = b.x;
      state.q[n][4 * s + 3] = b.y;
    }
    const int row = (segment.vector0 + 4 * n + lane.t) / args.group;
    state.last[n] = length - args.rows + row + 1;
    state.first[n] = args.window > 0 ? max(0, state.last[n] - args.window) : 0;
  }
}

// Hides what the owned vectors must not see. Pages that all of them see as a whole skip this.
template <class C>
__device__ __forceinline__ void hide(const DecodeArgs& args, const Segment& segment, int position, int length,
                                     const WarpState<C>& state, const Lane& lane,
                                     float (&s)[C::n_tiles][C::token_tiles][2]) {
  const bool causal = position + C::unit_tokens > length - args.rows + 1;
  const bool window = args.window > 0 && position < length - args.window;
  if (!causal && !window && position >= segment.sinks) return;
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    const int first = max(state.first[n], segment.sinks);
#pragma unroll
    for (int j = 0; j < C::token_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = position + 16 * j + 8 * e + lane.g;
        if (at < first || at >= state.last[n]) s[n][j][e] = kMinusInfinity;
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    decode_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ InlinePlan plan, int ranks) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const Lane lane;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = static_cast<int>(blockIdx.x) / ranks;
  const int rank = static_cast<int>(blockIdx.x) % ranks;
  const int worker = rank * C::warps + warp;
  const int workers = ranks * C::warps;

  Pipeline<C> pipeline(args, shared, warp);
  ptx::release_dependents();
  if (args.pages_settled == 0) ptx::wait_for_predecessor();
  const SegmentList segments(args, plan, group);
  UnitCursor<C> next(args, segments, worker, workers);
  pipeline.fetch_keys(next);
  pipeline.fetch_values(next);
  if (args.pages_settled != 0) ptx::wait_for_predecessor();

  WarpState<C> state;
  [[maybe_unused]] SharedQueries<C> queries;
  if constexpr (C::sorted) {
    if (segments.count() > 0) queries.fetch(args, segments.get(0));
  }
  for (int i = 0; i < segments.count(); ++i) {
    const Segment segment = segments.get(i);
    const int length = args.lengths[segment.sequence];
    load_queries<C>(args, segment, state, lane);
    if constexpr (C::sorted) queries.store(shared);
    state.reset();
    int unit = segment.begin + worker;
    for (; unit < min(segment.end, segment.coded_end); unit += workers) {
      float s[C::n_tiles][C::token_tiles][2];
      next.advance();
      pipeline.wait_keys();
      if constexpr (C::sorted) {
        score_sorted<C>(args.scale, pipeline.keys(), shared, unit % C::units_per_page, lane, s);
      } else {
        KeyOperand<C> key;
        key.prepare(state, lane, pipeline.keys(), args.boosted);
        score_unit<C>(key, pipeline.keys(), pipeline.keys() + C::key.codes_offset(), args.scale, s);
      }
      pipeline.fetch_keys(next);
      if (args.softcap > 0) {
#pragma unroll
        for (int n = 0; n < C::n_tiles; ++n) {
#pragma unroll
          for (int j = 0; j < C::token_tiles; ++j) {
            s[n][j][0] = cap_score(s[n][j][0], args);
            s[n][j][1] = cap_score(s[n][j][1], args);
          }
        }
      }
      hide<C>(args, segment, unit * C::unit_tokens, length, state, lane, s);
      pipeline.wait_values();
      mix_unit<C>(state, lane, pipeline.values(), s);
      pipeline.fetch_values(next);
    }
    state.settle();
    if constexpr (C::rotation > 1) state.unrotate(lane, C::rotation);  // exact values are not rotated
    for (; unit < segment.end; unit += workers) {
      const ExactTile tile = exact_tile<C>(args, segment, unit);
      if (tile.data == nullptr) break;  // room for tokens to come, and so are all behind it
      add_exact_tile<C>(args, segment, tile, state, lane);
    }
    if constexpr (C::sorted) {
      if (i + 1 < segments.count()) queries.fetch(args, segments.get(i + 1));
    }
    merge_segment<C>(args, segment, shared, rank, ranks, state, lane);
  }
}

}  // namespace kvant::cuda
