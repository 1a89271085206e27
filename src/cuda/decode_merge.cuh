// From the warps of a block to the result: block, then cluster, then (where the host split vectors further) the last
// block to finish combines the parts that the others left in the workspace.
#pragma once

#include "cuda/decode_exact.cuh"

namespace kvant::cuda {

constexpr int kMaxRanks = 8;  // blocks of a cluster

// (maximum, sum) pairs and outputs of `count` partial results, merged for one vector and channel.
struct Merged {
  float maximum = kMinusInfinity;
  float sum = 0;
  float output = 0;
};

// Merges parts 0..count-1, count <= Most. All loads are on their way before the first is used.
template <int Most, class State, class Output>
__device__ __forceinline__ Merged merge_parts(int count, const State& state, const Output& output) {
  float2 states[Most];
  float outputs[Most];
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    states[i] = i < count ? state(i) : float2{kMinusInfinity, 0};
    outputs[i] = i < count ? output(i) : 0.0F;
  }
  Merged r;
#pragma unroll
  for (int i = 0; i < Most; ++i) r.maximum = fmaxf(r.maximum, states[i].x);
  const float finite = r.maximum == kMinusInfinity ? 0.0F : r.maximum;
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const float weight = ptx::exp2_fast(states[i].x - finite);
    r.sum = fmaf(weight, states[i].y, r.sum);
    r.output = fmaf(weight, outputs[i], r.output);
  }
  return r;
}

__device__ __forceinline__ Merged merge_two(const Merged& a, const Merged& b) {
  Merged r;
  r.maximum = fmaxf(a.maximum, b.maximum);
  const float finite = r.maximum == kMinusInfinity ? 0.0F : r.maximum;
  const float wa = ptx::exp2_fast(a.maximum - finite);
  const float wb = ptx::exp2_fast(b.maximum - finite);
  r.sum = wa * a.sum + wb * b.sum;
  r.output = wa * a.output + wb * b.output;
  return r;
}

// Where a vector's result goes and what its merged output is multiplied with. With `write_lse` also stores its
// log-sum-exp.
struct Target {
  std::uint16_t* out = nullptr;  // null: no such vector
  float factor = 0;
};

template <class C>
__device__ Target finish_vector(const DecodeArgs& args, const Segment& segment, int vector, float maximum, float sum,
                                bool write_lse) {
  const int v = segment.vector0 + vector;
  if (v >= args.rows * args.group) return {};
  const int row = v / args.group;
  const int head = segment.kv_head * args.group + v % args.group;
  float rescale = 1;
  if (args.sinks != nullptr && args.sinks[head] != kMinusInfinity) {
    const float sink = args.sinks[head] * kLog2e;
    const float peak = fmaxf(maximum, sink);
    rescale = exp2f(maximum - peak);
    sum = sum * rescale + exp2f(sink - peak);
    maximum = peak;
  }
  if (write_lse && args.lse != nullptr) {
    const std::int64_t heads = static_cast<std::int64_t>(args.group) * args.kv_heads;
    args.lse[(static_cast<std::int64_t>(segment.sequence) * args.rows + row) * heads + head] =
        sum > 0 ? maximum * (1.0F / kLog2e) + logf(sum) : kMinusInfinity;
  }
  return {static_cast<std::uint16_t*>(args.out) + segment.sequence * args.out_sequence + row * args.out_row +
              head * args.out_head,
          sum > 0 ? rescale / sum : 0.0F};
}

template <class C>
__device__ void store_result(const DecodeArgs& args, const Segment& segment, int vector, int channel, const Merged& r) {
  const Target target = finish_vector<C>(args, segment, vector, r.maximum, r.sum, channel == 0);
  if (target.out != nullptr) {
    target.out[channel] = static_cast<std::uint16_t>(ptx::narrow2<C::bfloat>(r.output * target.factor, 0));
  }
}

// Writes this warp's state to shared memory, ready to be summed.
template <class C>
__device__ void publish_warp(std::uint8_t* shared, int warp, const WarpState<C>& state, const Lane& lane) {
  auto* outputs = reinterpret_cast<float*>(shared + C::merge_offset) + warp * C::vectors * C::merge_stride;
  auto* states = reinterpret_cast<float2*>(shared + C::state_offset) + warp * C::vectors;
#pragma unroll
  for (int n = 0; n < C::n_tiles; ++n) {
    const float sum = ptx::xor_sum<16>(ptx::xor_sum<8>(ptx::xor_sum<4>(state.sum[n])));
    const int vector = 4 * n + lane.t;
#pragma unroll
    for (int j = 0; j < C::value_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) outputs[vector * C::merge_stride + 16 * j + 8 * e + lane.g] = state.o[n][j][e];
    }
    if (lane.g == 0) states[vector] = {state.maximum[n], sum};
  }
}

// Combines the parts of a segment's vectors; every thread of the block that arrived last takes part.
template <class C>
__device__ void combine_parts(const DecodeArgs& args, const Segment& segment) {
  constexpr int record = C::vectors * (C::value.dim + 2);
  const float* parts = args.partials + static_cast<std::int64_t>(segment.partial0) * record;
  for (int i = static_cast<int>(threadIdx.x); i < C::vectors * C::value.dim; i += C::threads) {
    const int vector = i / C::value.dim;
    constexpr int batch = 8;
    Merged r;
    for (int first = 0; first < segment.parts; first += batch) {
      const float* from = parts + static_cast<std::int64_t>(first) * record;
      r = merge_two(
          r, merge_parts<batch>(
                 segment.parts - first,
                 [&](int part) {
                   return __ldcg(reinterpret_cast<const float2*>(from + part * record + C::vectors * C::value.dim) +
                                 vector);
                 },
                 [&](int part) { return __ldcg(from + part * record + i); }));
    }
    store_result<C>(args, segment, vector, i % C::value.dim, r);
  }
}

template <class C>
__device__ void store_part(const DecodeArgs& args, const Segment& segment, int i, const Merged& r) {
  constexpr int record = C::vectors * (C::value.dim + 2);
  float* part = args.partials + static_cast<std::int64_t>(segment.partial0 + segment.part) * record;
  part[i] = r.output;
  if (i % C::value.dim == 0) {
    reinterpret_cast<float2*>(part + C::vectors * C::value.dim)[i / C::value.dim] = {r.maximum, r.sum};
  }
}

// Counts a finished segment; true for the last of its parts. One thread calls it, after its writers' fences.
__device__ inline bool count_part(const DecodeArgs& args, const Segment& segment) {
  __threadfence();
  const bool last = atomicAdd(args.counters + segment.counter, 1U) + 1U == static_cast<unsigned>(segment.parts);
  if (last) args.counters[segment.counter] = 0;
  __threadfence();
  return last;
}

// Counts this segment as done; true for every thread of the block that is the last of its parts.
template <class C>
__device__ bool arrive_last(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
  auto* flag = reinterpret_cast<int*>(shared + C::flag_offset);
  __syncthreads();
  if (threadIdx.x == 0) {
    *flag = count_part(args, segment) ? 1 : 0;
  }
  __syncthreads();
  return *flag != 0;
}

// All warps of all blocks of the cluster meet at the end of a segment.
template <class C>
__device__ void merge_segment(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared, int rank, int ranks,
                              const WarpState<C>& state, const Lane& lane) {
  const int thread = static_cast<int>(threadIdx.x);
  publish_warp<C>(shared, thread / 32, state, lane);
  __syncthreads();
  const auto* outputs = reinterpret_cast<const float*>(shared + C::merge_offset);
  const auto* states = reinterpret_cast<const float2*>(shared + C::state_offset);
  auto* block_outputs = reinterpret_cast<float*>(shared + C::block_offset);
  auto* block_states = reinterpret_cast<float2*>(block_outputs + C::vectors * C::value.dim);
  const auto finish = [&](int i, const Merged& r) {
    if (segment.parts > 1) {
      store_part<C>(args, segment, i, r);
    } else {
      store_result<C>(args, segment, i / C::value.dim, i % C::value.dim, r);
    }
  };
  for (int i = thread; i < C::vectors * C::value.dim; i += C::threads) {
    const int vector = i / C::value.dim;
    const Merged r = merge_parts<C::warps>(
        C::warps, [&](int w) { return states[w * C::vectors + vector]; },
        [&](int w) { return outputs[(w * C::vectors + vector) * C::merge_stride + i % C::value.dim]; });
    if (ranks == 1) {
      finish(i, r);
    } else {
      block_outputs[i] = r.output;
      if (i % C::value.dim == 0) block_states[vector] = {r.maximum, r.sum};
    }
  }
#if __CUDA_ARCH__ >= 900
  if (ranks > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
    for (int i = rank * C::threads + thread; i < C::vectors * C::value.dim; i += ranks * C::threads) {
      const auto* s = reinterpret_cast<const float*>(block_states + i / C::value.dim);
      const Merged r = merge_parts<kMaxRanks>(
          ranks,
          [&](int k) {
            return float2{ptx::load_cluster(s, k), ptx::load_cluster(s + 1, k)};
          },
          [&](int k) { return ptx::load_cluster(block_outputs + i, k); });
      finish(i, r);
    }
    if (segment.parts > 1) __threadfence();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
#endif
  if (segment.parts > 1 && rank == 0 && arrive_last<C>(args, segment, shared)) combine_parts<C>(args, segment);
  __syncthreads();  // the shared buffers are free for the next segment
}

}  // namespace kvant::cuda
