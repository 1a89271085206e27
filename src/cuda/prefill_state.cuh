// Scores, weights and outputs of a warp in prefill: what both engines share.
#pragma once

#include "cuda/decode_merge.cuh"
#include "cuda/prefill_stages.cuh"

namespace kvant::cuda {

// What a warp carries over the stages. A lane 4g + t has rows g and g + 8 of each row tile.
template <class C>
struct PrefillState {
  float o[C::m_tiles][C::value_tiles * 2][4];  // channels 8n + 2t, + 1 of rows g, g + 8
  float reference[C::m_tiles][2];              // in units of log2: weights are relative to it
  float sum[C::m_tiles][2];                    // this lane's tokens only
  int last[C::m_tiles][2];                     // positions at and after it are hidden

  __device__ void reset() {
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        reference[m][e] = kMinusInfinity;
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

// Weights of 16 tokens as an A fragment of m16n8k16.
template <class C>
__device__ __forceinline__ uint4 weight_fragment(const float (&s)[kStageTiles * 2][4], int token_tile) {
  const float(&a)[4] = s[2 * token_tile];
  const float(&b)[4] = s[2 * token_tile + 1];
  return {ptx::narrow2<C::bfloat>(a[0], a[1]), ptx::narrow2<C::bfloat>(a[2], a[3]), ptx::narrow2<C::bfloat>(b[0], b[1]),
          ptx::narrow2<C::bfloat>(b[2], b[3])};
}

// Scores of a row tile into units of log2, capped where the call asks for it.
template <class C>
__device__ __forceinline__ void scale_tile(const DecodeArgs& args, float scale, float (&s)[kStageTiles * 2][4]) {
#pragma unroll
  for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) s[n][k] *= scale;
  }
  if (!(args.softcap > 0)) return;
#pragma unroll
  for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) s[n][k] = cap_score(s[n][k], args);
  }
}
template <class C>
__device__ __forceinline__ void scale_scores(const DecodeArgs& args, float scale, Scores<C>& s) {
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) scale_tile<C>(args, scale, s[m]);
}

// Which token of a stage the keys and values in slot 8n + i of its tiles are (prefill_cells.cuh).
template <class C>
__device__ __forceinline__ int token_in(int n, int i) {
  return C::cells ? n + 8 * i : 8 * n + i;
}

// Hides tokens from rows that must not see them. row_ends: of the two rows, VectorBlock::row_end. position(n, i): that
// of the token in slot 8n + i of the stage's tiles.
template <class Position>
__device__ __forceinline__ void hide_positions(const DecodeArgs& args, const StageRange& stage,
                                               const int (&row_ends)[2], const Position& position,
                                               float (&s)[kStageTiles * 2][4]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int last = min(row_ends[e], stage.end);
    const int first = max(stage.first, args.window > 0 ? row_ends[e] - args.window : 0);
#pragma unroll
    for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = position(n, 2 * t + i);
        if (at < first || at >= last) s[n][2 * e + i] = kMinusInfinity;
      }
    }
  }
}
template <class C>
__device__ __forceinline__ void hide_in_tile(const DecodeArgs& args, const StageRange& stage, const int (&row_ends)[2],
                                             float (&s)[kStageTiles * 2][4]) {
  const auto position = [&](int n, int i) { return stage.position + token_in<C>(n, i); };
  hide_positions(args, stage, row_ends, position, s);
}

// How far scores may exceed the reference, in units of log2, before it is raised: nearly always it is their maximum in
// the first stages that stays. Weights are below 2^8 then, which no type minds.
constexpr float kReferenceSlack = 8;

// peaks: this lane's largest scores of the two rows. What was summed before is scaled to the new reference.
template <class C>
__device__ __forceinline__ void raise_reference(PrefillState<C>& state, int m, const float (&peaks)[2]) {
  float alpha[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float next = fmaxf(state.reference[m][e], ptx::xor_max<2>(ptx::xor_max<1>(peaks[e])));
    alpha[e] = ptx::exp2_fast(state.reference[m][e] - (next == kMinusInfinity ? 0.0F : next));
    state.reference[m][e] = next;
    state.sum[m][e] *= alpha[e];
  }
#pragma unroll
  for (int n = 0; n < C::value_tiles * 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[m][n][i] *= alpha[i / 2];
  }
}

// Scores of row tile m become weights. factor > 0: of the scores, into units of log2.
template <class C>
__device__ __forceinline__ void soften_tile(PrefillState<C>& state, int m, float (&s)[kStageTiles * 2][4],
                                            float factor) {
  float peaks[2];
  bool above = false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float peak[2] = {s[0][2 * e], s[0][2 * e + 1]};
#pragma unroll
    for (int n = 1; n < kStageTiles * 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) peak[i] = fmaxf(peak[i], s[n][2 * e + i]);
    }
    peaks[e] = fmaxf(peak[0], peak[1]) * factor;
    above = above || peaks[e] > state.reference[m][e] + kReferenceSlack;
  }
  if (__any_sync(0xFFFFFFFFU, above)) raise_reference<C>(state, m, peaks);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float finite = state.reference[m][e] == kMinusInfinity ? 0.0F : state.reference[m][e];
    float sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kStageTiles * 2; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[n][2 * e + i];
        x = ptx::exp2_fast(fmaf(x, factor, -finite));
        sum[i] += x;
      }
    }
    state.sum[m][e] += sum[0] + sum[1];
  }
}
template <class C>
__device__ __forceinline__ void soften(PrefillState<C>& state, Scores<C>& s, float factor) {
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) soften_tile<C>(state, m, s[m], factor);
}

// Outputs of rotated values to those of plain ones: the Hadamard transform of each block of `rotation` channels. Pages
// hold the transform divided by the block, so this one needs no factor.
template <class C>
__device__ __forceinline__ void unrotate(PrefillState<C>& state, int rotation) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::value_tiles * 2; ++n) {  // bits 0 to 2 of a channel's number, 8n + 2t + i
      float(&o)[4] = state.o[m][n];
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float difference = o[e] - o[e + 1];
        o[e] += o[e + 1];
        o[e + 1] = difference;
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        const float sign = (t & bit) != 0 ? -1.0F : 1.0F;
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = fmaf(sign, o[e], __shfl_xor_sync(0xFFFFFFFFU, o[e], bit));
      }
    }
#pragma unroll
    for (int span = 1; span < C::value_tiles * 2; span *= 2) {
      if (span >= rotation / 8) break;
#pragma unroll
      for (int n = 0; n < C::value_tiles * 2; ++n) {
        if ((n & span) != 0 || n + span >= C::value_tiles * 2) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float difference = state.o[m][n][e] - state.o[m][n + span][e];
          state.o[m][n][e] += state.o[m][n + span][e];
          state.o[m][n + span][e] = difference;
        }
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
        if (t == 0) *reinterpret_cast<float2*>(to + C::value.dim) = {state.reference[m][e], sum};
        continue;
      }
      const Target target = finish_vector<C>(args, segment, vector, state.reference[m][e], sum, t == 0);
      if (target.out == nullptr) continue;
#pragma unroll
      for (int n = 0; n < C::value_tiles * 2; ++n) {
        *reinterpret_cast<std::uint32_t*>(target.out + 8 * n + 2 * t) =
            ptx::narrow2<C::bfloat>(state.o[m][n][2 * e] * target.factor, state.o[m][n][2 * e + 1] * target.factor);
      }
    }
  }
}

// Queries, [m tile][channel tile] as A fragments, times keys with mma.sync. keys(j, k): token tile j, channel tile k as
// B fragments, those of its first 8 tokens and those of the others.
template <class C, class Keys>
__device__ __forceinline__ void multiply_key_tiles(const std::uint8_t* queries, int key_tiles, const Keys& keys,
                                                   Scores<C>& s) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < C::m_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < kStageTiles * 2; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
  }
#pragma unroll 4
  for (int k = 0; k < key_tiles; ++k) {
    uint4 q[C::m_tiles];
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) {
      q[m] = *reinterpret_cast<const uint4*>(queries + (m * key_tiles + k) * kQuadBytes + lane * 16);
    }
#pragma unroll
    for (int j = 0; j < kStageTiles; ++j) {
      const uint4 b = keys(j, k);
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
        ptx::mma_half<C::bfloat>(s[m][2 * j], q[m], b.x, b.y);
        ptx::mma_half<C::bfloat>(s[m][2 * j + 1], q[m], b.z, b.w);
      }
    }
  }
}

// Values times the weights. values(j, n): token tile j, channel tile n, as keys are given.
template <class C, class Values>
__device__ __forceinline__ void multiply_value_tiles(const Values& values, const Scores<C>& s, PrefillState<C>& state) {
#pragma unroll
  for (int j = 0; j < kStageTiles; ++j) {
    uint4 p[C::m_tiles];
#pragma unroll
    for (int m = 0; m < C::m_tiles; ++m) p[m] = weight_fragment<C>(s[m], j);
#pragma unroll
    for (int n = 0; n < C::value_tiles; ++n) {
      const uint4 b = values(j, n);
#pragma unroll
      for (int m = 0; m < C::m_tiles; ++m) {
        ptx::mma_half<C::bfloat>(state.o[m][2 * n], p[m], b.x, b.y);
        ptx::mma_half<C::bfloat>(state.o[m][2 * n + 1], p[m], b.z, b.w);
      }
    }
  }
}

// Units [token tile][tiles of depth] as those products take them.
struct UnitTiles {
  const std::uint8_t* tiles;
  int depth_tiles;

  __device__ __forceinline__ uint4 operator()(int token_tile, int depth_tile) const {
    const uint4 unit = *reinterpret_cast<const uint4*>(tiles + (token_tile * depth_tiles + depth_tile) * kQuadBytes +
                                                       threadIdx.x % 32 * 16);
    return {unit.x, unit.z, unit.y, unit.w};
  }
};

}  // namespace kvant::cuda
