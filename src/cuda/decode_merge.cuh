// From the warps of a block to the result: the block's, then those of its cluster; or, where vectors are split over
// blocks, the last one to finish combines the parts that all have left in the workspace.
#pragma once

#include "cuda/decode_exact.cuh"

namespace kvant::cuda {

constexpr int kMaxRanks = 8;  // blocks of a cluster

// Partial results of one vector and two channels, merged.
struct Merged {
  float maximum = kMinusInfinity;
  float sum = 0;
  float2 output{0, 0};
};

// Merges parts 0..count-1, count <= Most: state(i) is a part's (maximum, sum), output(i) its two outputs. All loads are
// on their way before the first is used.
template <int Most, class State, class Output>
__device__ __forceinline__ Merged merge_parts(int count, const State& state, const Output& output) {
  float2 states[Most];
  float2 outputs[Most];
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    states[i] = i < count ? state(i) : float2{kMinusInfinity, 0};
    outputs[i] = i < count ? output(i) : float2{0, 0};
  }
  Merged r;
#pragma unroll
  for (int i = 0; i < Most; ++i) r.maximum = fmaxf(r.maximum, states[i].x);
  const float finite = r.maximum == kMinusInfinity ? 0.0F : r.maximum;
#pragma unroll
  for (int i = 0; i < Most; ++i) {
    const float weight = ptx::exp2_fast(states[i].x - finite);
    r.sum = fmaf(weight, states[i].y, r.sum);
    r.output.x = fmaf(weight, outputs[i].x, r.output.x);
    r.output.y = fmaf(weight, outputs[i].y, r.output.y);
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
  r.output = {wa * a.output.x + wb * b.output.x, wa * a.output.y + wb * b.output.y};
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

// channel, channel + 1: even and odd.
template <class C>
__device__ void store_result(const DecodeArgs& args, const Segment& segment, int vector, int channel, const Merged& r) {
  const Target target = finish_vector<C>(args, segment, vector, r.maximum, r.sum, channel == 0);
  if (target.out != nullptr) {
    *reinterpret_cast<std::uint32_t*>(target.out + channel) =
        ptx::narrow2<C::bfloat>(r.output.x * target.factor, r.output.y * target.factor);
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

// What publish_warp() left of `warps` warps, for channels channel and channel + 1.
template <class C>
__device__ __forceinline__ Merged merge_warps(const std::uint8_t* shared, int warps, int vector, int channel) {
  const auto* outputs = reinterpret_cast<const float*>(shared + C::merge_offset);
  const auto* states = reinterpret_cast<const float2*>(shared + C::state_offset);
  return merge_parts<C::warps>(
      warps, [&](int w) { return states[w * C::vectors + vector]; },
      [&](int w) {
        const int row = w * C::vectors + vector;
        return *reinterpret_cast<const float2*>(outputs + row * C::merge_stride + channel);
      });
}

// What the parts of some vectors leave in the workspace: a record each, outputs [vectors][value_dim], then
// (maximum, sum) [vectors]. `at`: an even place among the outputs.
template <class C>
class PartRecords {
 public:
  static constexpr int kOutputs = C::vectors * C::value.dim;
  static constexpr int kRecord = kOutputs + 2 * C::vectors;

  __device__ explicit PartRecords(float* first) : first_(first) {}

  __device__ void store(int part, int at, const Merged& r) const {
    float* record = first_ + static_cast<std::int64_t>(part) * kRecord;
    *reinterpret_cast<float2*>(record + at) = r.output;
    if (at % C::value.dim == 0) {
      reinterpret_cast<float2*>(record + kOutputs)[at / C::value.dim] = {r.maximum, r.sum};
    }
  }
  __device__ Merged load(int parts, int at) const {
    constexpr int batch = 16;
    Merged all;
    for (int part = 0; part < parts; part += batch) {
      const float* from = first_ + static_cast<std::int64_t>(part) * kRecord;
      const Merged some = merge_parts<batch>(
          parts - part,
          [&](int k) {
            return __ldcg(reinterpret_cast<const float2*>(from + k * kRecord + kOutputs) + at / C::value.dim);
          },
          [&](int k) { return __ldcg(reinterpret_cast<const float2*>(from + k * kRecord + at)); });
      all = part == 0 ? some : merge_two(all, some);
    }
    return all;
  }

 private:
  float* first_;  // the record of part 0
};

// Counts one of `parts` as done; true for every thread of the block that is the last. What its threads stored before is
// there for the threads of that one.
template <class C>
__device__ bool arrive_last(const DecodeArgs& args, int counter, int parts, std::uint8_t* shared) {
  auto* flag = reinterpret_cast<int*>(shared + C::flag_offset);
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = ptx::add_acquire_release(args.counters + counter, 1U) + 1U == static_cast<unsigned>(parts);
    if (last) args.counters[counter] = 0;
    *flag = last ? 1 : 0;
  }
  __syncthreads();
  return *flag != 0;
}

// All warps of a block meet at the end of a segment.
template <class C>
__device__ void merge_block(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared) {
  using Records = PartRecords<C>;
  const int first = 2 * static_cast<int>(threadIdx.x);
  const Records records(args.partials + static_cast<std::int64_t>(segment.partial0) * Records::kRecord);
  const auto store = [&](int at, const Merged& r) {
    store_result<C>(args, segment, at / C::value.dim, at % C::value.dim, r);
  };
  for (int at = first; at < Records::kOutputs; at += 2 * C::threads) {
    const Merged r = merge_warps<C>(shared, C::warps, at / C::value.dim, at % C::value.dim);
    if (segment.parts > 1) {
      records.store(segment.part, at, r);
    } else {
      store(at, r);
    }
  }
  if (segment.parts > 1 && arrive_last<C>(args, segment.counter, segment.parts, shared)) {
    for (int at = first; at < Records::kOutputs; at += 2 * C::threads) store(at, records.load(segment.parts, at));
  }
}

#if __CUDA_ARCH__ >= 900
// The blocks of a cluster, whose only segment this is, bring their outputs to the first one's shared memory, where its
// slots were. The others leave before it has read.
template <class C>
__device__ void merge_cluster(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared, int rank,
                              int ranks) {
  using Records = PartRecords<C>;
  static_assert(kMaxRanks * Records::kRecord * 4 <= C::warps * C::fixed_slot_bytes,
                "records fit in place of the slots");
  constexpr int turns = (Records::kOutputs + 2 * C::threads - 1) / (2 * C::threads);
  const int first = 2 * static_cast<int>(threadIdx.x);
  ptx::cluster_arrive();  // this block's slots are free
  Merged mine[turns];
#pragma unroll
  for (int i = 0; i < turns; ++i) {
    const int at = first + 2 * C::threads * i;
    if (at < Records::kOutputs) mine[i] = merge_warps<C>(shared, C::warps, at / C::value.dim, at % C::value.dim);
  }
  ptx::cluster_wait();
  const std::uint32_t to = ptx::map_shared(ptx::shared_address(shared + C::slots_offset), 0) +
                           static_cast<std::uint32_t>(rank * Records::kRecord) * 4;
#pragma unroll
  for (int i = 0; i < turns; ++i) {
    const int at = first + 2 * C::threads * i;
    if (at >= Records::kOutputs) break;
    ptx::mapped_store(to + 4 * static_cast<std::uint32_t>(at), mine[i].output);
    if (at % C::value.dim != 0) continue;
    const auto state = static_cast<std::uint32_t>(Records::kOutputs + 2 * (at / C::value.dim));
    ptx::mapped_store(to + 4 * state, {mine[i].maximum, mine[i].sum});
  }
  ptx::cluster_arrive();
  if (rank != 0) return;
  ptx::cluster_wait();
  const auto* records = reinterpret_cast<const float*>(shared + C::slots_offset);
  for (int at = first; at < Records::kOutputs; at += 2 * C::threads) {
    const int vector = at / C::value.dim;
    const Merged r = merge_parts<kMaxRanks>(
        ranks,
        [&](int k) {
          return *reinterpret_cast<const float2*>(records + k * Records::kRecord + Records::kOutputs + 2 * vector);
        },
        [&](int k) { return *reinterpret_cast<const float2*>(records + k * Records::kRecord + at); });
    store_result<C>(args, segment, vector, at % C::value.dim, r);
  }
}
#endif

template <class C>
__device__ __forceinline__ void merge_segment(const DecodeArgs& args, const Segment& segment, std::uint8_t* shared,
                                              int rank, int ranks, const WarpState<C>& state, const Lane& lane) {
  publish_warp<C>(shared, static_cast<int>(threadIdx.x) / 32, state, lane);
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (ranks > 1) {
    merge_cluster<C>(args, segment, shared, rank, ranks);
    return;
  }
#endif
  merge_block<C>(args, segment, shared);
  __syncthreads();  // the shared buffers are free for the next segment
}

}  // namespace kvant::cuda
