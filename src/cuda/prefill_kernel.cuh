// Prefill attention: flash attention on half-precision tensor cores over tiles that the block dequantizes for all of its
// query vectors. README.md has the reasons.
#pragma once

#include <climits>

#include "cuda/decode_merge.cuh"
#include "cuda/prefill.hpp"
#include "cuda/prefill_tiles.cuh"

namespace kvant::cuda {

// The tokens that a block of vectors sees, in stages of 64: coded half pages, then sinks, then the open tail.
class StageList {
 public:
  struct Stage {
    int position = 0;   // of the first token
    int first = 0;      // positions before it are not of this stage: sinks of a coded page
    int end = INT_MAX;  // nor are those at and after it: a page of sinks that goes on after them
    bool coded = false;
    const std::uint8_t* data = nullptr;  // the head's page, or the first of four exact tiles
  };

  // Tokens [begin, end) are what any vector of the block sees.
  template <class C>
  __device__ static StageList make(const DecodeArgs& args, const ReferenceArgs& layout, int sequence, int head,
                                   int begin, int end) {
    StageList list(args, sequence);
    const int coded = layout.coded_pages[sequence];
    list.sinks_ = layout.sinks[sequence];
    list.tail_begin_ = coded * kPage;
    list.coded0_ = max(layout.first_page[sequence] * 2, begin / kStageTokens);
    list.coded_ = max(0, min(coded * 2, stages(end)) - list.coded0_);
    list.sink_ = begin < list.sinks_ ? stages(min(list.sinks_, end)) : 0;
    list.tail0_ = max(list.tail_begin_, begin / kStageTokens * kStageTokens);
    list.count_ = list.coded_ + list.sink_ + max(0, stages(end - list.tail0_));
    list.page_offset_ = static_cast<std::int64_t>(head) * (C::key.bytes() + C::value.bytes());
    list.exact_offset_ = static_cast<std::int64_t>(head) * C::exact.page_bytes();
    list.tile_bytes_ = C::exact.tile_bytes();
    return list;
  }

  __device__ int count() const { return count_; }
  __device__ Stage get(int i) const {
    Stage stage;
    if (i < coded_) {
      stage.position = (coded0_ + i) * kStageTokens;
      stage.first = sinks_;
      stage.coded = true;
      stage.data = args_.pages + table_[stage.position / kPage] * args_.page_stride + page_offset_;
      return stage;
    }
    const bool sink = i < coded_ + sink_;
    int slot = 0;
    if (sink) {
      stage.position = (i - coded_) * kStageTokens;
      stage.end = sinks_;
    } else {
      stage.position = tail0_ + (i - coded_ - sink_) * kStageTokens;
      slot = 1 + (stage.position - tail_begin_) / kPage;
    }
    stage.data = args_.exact + exact_table_[slot] * args_.exact_stride + exact_offset_ +
                 stage.position % kPage / kTile * tile_bytes_;
    return stage;
  }

 private:
  __device__ StageList(const DecodeArgs& args, int sequence)
      : args_(args),
        table_(args.table + sequence * args.table_stride),
        exact_table_(args.exact_table + sequence * args.exact_table_stride) {}
  __device__ static int stages(int tokens) { return (tokens + kStageTokens - 1) / kStageTokens; }

  const DecodeArgs& args_;
  const std::int32_t* table_;
  const std::int32_t* exact_table_;
  std::int64_t page_offset_ = 0, exact_offset_ = 0;
  int tile_bytes_ = 0;
  int sinks_ = 0, tail_begin_ = 0, coded0_ = 0, tail0_ = 0;
  int coded_ = 0, sink_ = 0, count_ = 0;  // stages
};

// What a warp carries over the stages. A lane 4g + t has rows g and g + 8 of each row tile.
template <class C>
struct PrefillState {
  float o[C::m_tiles][C::value_tiles * 2][4];  // channels 8n + 2t, + 1 of rows g, g + 8
  float maximum[C::m_tiles][2];                // in units of log2
  float sum[C::m_tiles][2];                    // this lane's tokens only
  int last[C::m_tiles][2];                     // positions at and after it are hidden

  __device__ void reset() {
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        maximum[m][e] = kMinusInfinity;
        sum[m][e] = 0;
      }
#pragma unroll
      for (int n = 0; n < C::value_tiles * 2; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    }
  }
};

template <class C>
using Scores = float[C::m_tiles][kStageTiles * 2][4];  // tokens 8n + 2t, + 1 of rows g, g + 8

// The block's vector that a lane's row e of row tile m is.
template <class C>
__device__ __forceinline__ int vector_of(int m, int e) {
  const int thread = static_cast<int>(threadIdx.x);
  return (thread / 32 * C::m_tiles + m) * 16 + e * 8 + thread % 32 / 4;
}

// This warp's queries as A fragments in shared memory; vectors that are not there become zeros.
template <class C>
__device__ void load_query_tiles(const DecodeArgs& args, const Segment& segment, std::uint8_t* queries) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
    const std::uint16_t* rows[2] = {query_row(args, segment, vector_of<C>(m, 0)),
                                    query_row(args, segment, vector_of<C>(m, 1))};
    for (int k = 0; k < C::key_tiles; ++k) {
      uint2 x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = {0, 0};
        if (rows[e] != nullptr) x[e] = *reinterpret_cast<const uint2*>(rows[e] + 16 * k + 4 * (lane % 4));
      }
      *reinterpret_cast<uint4*>(queries + (m * C::key_tiles + k) * kQuadBytes + lane * 16) = {x[0].x, x[1].x, x[0].y,
                                                                                            x[1].y};
    }
  }
}

template <class C>
__device__ __forceinline__ void multiply_keys(const std::uint8_t* queries, const std::uint8_t* keys, Scores<C>& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < kStageTiles * 2; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
#pragma unroll 4
  for (int k = 0; k < C::key_tiles; ++k) {
    uint4 q[C::m_tiles];
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
      q[m] = *reinterpret_cast<const uint4*>(queries + (m * C::key_tiles + k) * kQuadBytes + lane * 16);
    }
#pragma unroll
    for (int j = 0; j < kStageTiles; ++j) {
      const uint4 b = *reinterpret_cast<const uint4*>(keys + (j * C::key_tiles + k) * kQuadBytes + lane * 16);
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
        ptx::mma_half<C::bfloat>(s[m][2 * j], q[m], b.x, b.z);
        ptx::mma_half<C::bfloat>(s[m][2 * j + 1], q[m], b.y, b.w);
      }
    }
  }
}

// Hides tokens from rows that must not see them.
template <class C>
__device__ __forceinline__ void hide_tokens(const DecodeArgs& args, const StageList::Stage& stage,
                                            const PrefillState<C>& state, Scores<C>& s) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int last = min(state.last[m][e], stage.end);
      const int first = max(stage.first, args.window > 0 ? state.last[m][e] - args.window : 0);
#pragma unroll
      for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = stage.position + 8 * n + 2 * t + i;
          if (at < first || at >= last) s[m][n][2 * e + i] = kMinusInfinity;
        }
      }
    }
  }
}

// Scores become weights, relative to the running maximum; what was summed before is scaled to it. factor > 0: of the
// scores, into units of log2.
template <class C>
__device__ __forceinline__ void soften(PrefillState<C>& state, Scores<C>& s, float factor) {
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
    float finite[2], alpha[2];
    bool raised = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float peak = s[m][0][2 * e];
#pragma unroll
      for (int n = 0; n < kStageTiles * 2; ++n) peak = fmaxf(peak, fmaxf(s[m][n][2 * e], s[m][n][2 * e + 1]));
      peak = ptx::xor_max<2>(ptx::xor_max<1>(peak)) * factor;
      const float next = fmaxf(state.maximum[m][e], peak);
      finite[e] = next == kMinusInfinity ? 0.0F : next;
      alpha[e] = ptx::exp2_fast(state.maximum[m][e] - finite[e]);
      raised = raised || next > state.maximum[m][e];
      state.maximum[m][e] = next;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[m][n][2 * e + i];
          x = ptx::exp2_fast(fmaf(x, factor, -finite[e]));
          sum += x;
        }
      }
      state.sum[m][e] = fmaf(state.sum[m][e], alpha[e], sum);
    }
    if (!__any_sync(0xFFFFFFFFU, raised)) continue;
#pragma unroll
    for (int n = 0; n < C::value_tiles * 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[m][n][i] *= alpha[i / 2];
    }
  }
}

template <class C>
__device__ __forceinline__ void multiply_values(const std::uint8_t* values, const Scores<C>& s,
                                                PrefillState<C>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < kStageTiles; ++j) {
    uint4 p[C::m_tiles];
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
      const float(&a)[4] = s[m][2 * j];
      const float(&b)[4] = s[m][2 * j + 1];
      p[m] = {ptx::narrow2<C::bfloat>(a[0], a[1]), ptx::narrow2<C::bfloat>(a[2], a[3]),
              ptx::narrow2<C::bfloat>(b[0], b[1]), ptx::narrow2<C::bfloat>(b[2], b[3])};
    }
#pragma unroll
    for (int n = 0; n < C::value_tiles; ++n) {
      const uint4 b = *reinterpret_cast<const uint4*>(values + (j * C::value_tiles + n) * kQuadBytes + lane * 16);
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
        ptx::mma_half<C::bfloat>(state.o[m][2 * n], p[m], b.x, b.z);
        ptx::mma_half<C::bfloat>(state.o[m][2 * n + 1], p[m], b.y, b.w);
      }
    }
  }
}

// partial: where this block's results go unfinished, [vector][value_dim + 2]; null: they are final.
template <class C>
__device__ void store_vectors(const DecodeArgs& args, const Segment& segment, PrefillState<C>& state, float* partial) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = ptx::xor_sum<2>(ptx::xor_sum<1>(state.sum[m][e]));
      const int vector = vector_of<C>(m, e);
      if (partial != nullptr) {
        float* to = partial + vector * (C::value.dim + 2);
#pragma unroll
        for (int n = 0; n < C::value_tiles * 2; ++n) {
          *reinterpret_cast<float2*>(to + 8 * n + 2 * t) = {state.o[m][n][2 * e], state.o[m][n][2 * e + 1]};
        }
        if (t == 0) *reinterpret_cast<float2*>(to + C::value.dim) = {state.maximum[m][e], sum};
        continue;
      }
      const Target target = finish_vector<C>(args, segment, vector, state.maximum[m][e], sum, t == 0);
      if (target.out == nullptr) continue;
#pragma unroll
      for (int n = 0; n < C::value_tiles * 2; ++n) {
        *reinterpret_cast<std::uint32_t*>(target.out + 8 * n + 2 * t) =
            ptx::narrow2<C::bfloat>(state.o[m][n][2 * e] * target.factor, state.o[m][n][2 * e + 1] * target.factor);
      }
    }
  }
}

// Grid: (blocks of vectors, KV heads, sequences * parts).
template <class C>
__global__ void __launch_bounds__(C::threads, 2)
    prefill_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ ReferenceArgs layout, int parts) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  std::uint8_t* queries = shared + warp * C::m_tiles * C::key_tiles * kQuadBytes;
  std::uint8_t* keys = shared + C::keys_offset;
  std::uint8_t* values = shared + C::values_offset;
  std::uint8_t* raw = shared + C::raw_offset;

  // Later rows see more: they start first.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int part = static_cast<int>(blockIdx.z) % parts;
  Segment segment;
  segment.sequence = static_cast<int>(blockIdx.z) / parts;
  segment.kv_head = static_cast<int>(blockIdx.y);
  segment.vector0 = block * C::vectors;

  // Row r sees positions before length - rows + r + 1.
  const int before = args.lengths[segment.sequence] - args.rows + 1;
  const int fewest = before + segment.vector0 / args.group;
  const int most = before + min(args.rows - 1, (segment.vector0 + C::vectors - 1) / args.group);
  const int begin = args.window > 0 ? max(0, fewest - args.window) : 0;
  const StageList stages = StageList::make<C>(args, layout, segment.sequence, segment.kv_head, begin, max(0, most));
  const int from = static_cast<int>(static_cast<std::int64_t>(stages.count()) * part / parts);
  const int to = static_cast<int>(static_cast<std::int64_t>(stages.count()) * (part + 1) / parts);

  PrefillState<C> state;
  state.reset();
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) state.last[m][e] = before + (segment.vector0 + vector_of<C>(m, e)) / args.group;
  }
  load_query_tiles<C>(args, segment, queries);

  // Weights need a positive factor, which the maximum passes through.
  const float scale = args.scale * kLog2e;
  const bool rescale = args.softcap > 0 || !(scale > 0);
  StageList::Stage next;
  if (from < to) next = stages.get(from);
  const auto fetch = [&] {
    if (next.coded) PageTiles<C>::fetch(raw, next.data, next.position / kStageTokens % 2);
    ptx::async_commit();
  };
  fetch();
  for (int i = from; i < to; ++i) {
    const StageList::Stage stage = next;
    ptx::async_wait<0>();
    __syncthreads();  // the page is here, and nobody reads the tiles any more
    if (stage.coded) {
      PageTiles<C>::unpack(raw, stage.position / kStageTokens % 2, args.boosted, keys, values,
                           shared + C::rank_offset + warp * C::key.dim);
    } else {
      copy_exact_tiles<C>(stage.data, keys, values);
    }
    __syncthreads();
    if (i + 1 < to) {
      next = stages.get(i + 1);
      fetch();
    }

    Scores<C> s;
    multiply_keys<C>(queries, keys, s);
    if (rescale) {
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
        for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            s[m][n][k] *= scale;
            if (args.softcap > 0) s[m][n][k] = cap_score(s[m][n][k], args);
          }
        }
      }
    }
    const bool whole = stage.position + kStageTokens <= min(fewest, stage.end) && stage.position >= stage.first &&
                       (args.window == 0 || stage.position >= most - args.window);
    if (!whole) hide_tokens<C>(args, stage, state, s);
    soften<C>(state, s, rescale ? 1.0F : scale);
    multiply_values<C>(values, s, state);
  }

  float* partial = nullptr;
  if (parts > 1) {
    const auto item = (static_cast<std::int64_t>(segment.sequence) * gridDim.y + segment.kv_head) * gridDim.x + block;
    partial = args.partials + (item * parts + part) * C::vectors * (C::value.dim + 2);
  }
  store_vectors<C>(args, segment, state, partial);
}

}  // namespace kvant::cuda
