#include <algorithm>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/decode_merge.cuh"
#include "cuda/prefill.hpp"

namespace kvant::cuda {

// One function per generated instance file (CMakeLists.txt lists them in prefill_tables.inc).
#define KVANT_PREFILL_TABLE(name) std::span<const PrefillKernel> name();
#include "prefill_tables.inc"
#undef KVANT_PREFILL_TABLE

namespace {

constexpr int kMaxParts = 64;
constexpr int kMergeWarps = 8;

std::vector<PrefillKernel> collect() {
  std::vector<PrefillKernel> kernels;
#define KVANT_PREFILL_TABLE(name) \
  for (const PrefillKernel& kernel : name()) kernels.push_back(kernel);
#include "prefill_tables.inc"
#undef KVANT_PREFILL_TABLE
  return kernels;
}

const std::vector<PrefillKernel>& all() {
  static const std::vector<PrefillKernel> kernels = collect();
  return kernels;
}

// A grid in clusters of `ranks` blocks along x; must outlive the call that is given its configuration.
struct Launch {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};

  Launch(const PrefillKernel& kernel, dim3 blocks, int ranks, int key_bytes, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
    config.dynamicSmemBytes = kernel.shared(key_bytes);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = ranks > 1 ? 1 : 0;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

template <bool Bfloat>
struct MergeConfig {
  static constexpr bool bfloat = Bfloat;
};

// A warp per vector, two channels per lane and turn. Grid: (vectors / kMergeWarps, KV heads, sequences).
template <bool Bfloat>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_parts_kernel(const __grid_constant__ DecodeArgs args, int vectors_per_block, int blocks, int parts,
                       int value_dim) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vector = static_cast<int>(blockIdx.x) * kMergeWarps + static_cast<int>(threadIdx.x) / 32;
  if (vector >= args.rows * args.group) return;
  Segment segment;
  segment.sequence = static_cast<int>(blockIdx.z);
  segment.kv_head = static_cast<int>(blockIdx.y);
  const auto item =
      (static_cast<std::int64_t>(blockIdx.z) * args.kv_heads + segment.kv_head) * blocks + vector / vectors_per_block;
  const std::int64_t stride = static_cast<std::int64_t>(vectors_per_block) * (value_dim + 2);
  const float* first = args.partials + item * parts * stride + vector % vectors_per_block * (value_dim + 2);

  constexpr int kTurns = kMaxParts / 32;  // parts lane, lane + 32, ... are this lane's
  float2 states[kTurns];
  float maximum = kMinusInfinity;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int part = lane + 32 * i;
    states[i] = {kMinusInfinity, 0};
    if (part < parts) states[i] = *reinterpret_cast<const float2*>(first + part * stride + value_dim);
    maximum = fmaxf(maximum, states[i].x);
  }
  maximum = ptx::xor_max<16>(ptx::xor_max<8>(ptx::xor_max<4>(ptx::xor_max<2>(ptx::xor_max<1>(maximum)))));
  float weights[kTurns];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    weights[i] = ptx::exp2_fast(states[i].x - (maximum == kMinusInfinity ? 0.0F : maximum));
    sum = fmaf(states[i].y, weights[i], sum);
  }
  sum = ptx::xor_sum<16>(ptx::xor_sum<8>(ptx::xor_sum<4>(ptx::xor_sum<2>(ptx::xor_sum<1>(sum)))));
  const Target target = finish_vector<MergeConfig<Bfloat>>(args, segment, vector, maximum, sum, lane == 0);
  for (int turn = 0; turn < value_dim; turn += 64) {
    const int channel = turn + 2 * lane;
    float2 out{0, 0};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll 8
      for (int part = 32 * i; part < min(parts, 32 * i + 32); ++part) {
        const float w =
            __shfl_sync(0xFFFFFFFFU, weights[i], part % 32);  // from every lane, also those without a channel
        if (channel >= value_dim) continue;
        const float2 x = *reinterpret_cast<const float2*>(first + part * stride + channel);
        out.x = fmaf(w, x.x, out.x);
        out.y = fmaf(w, x.y, out.y);
      }
    }
    if (channel >= value_dim) continue;
    *reinterpret_cast<std::uint32_t*>(target.out + channel) =
        ptx::narrow2<Bfloat>(out.x * target.factor, out.y * target.factor);
  }
}

}  // namespace

std::span<const PrefillKernel> prefill_kernels() {
  return all();
}

bool runs_wgmma(const void* function) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, function), "attributes of the prefill kernel");
  return attributes.binaryVersion == 90;
}

const PrefillKernel* find_prefill_kernel(const DeviceFormat& format) {
  const PrefillKernel* best = nullptr;
  for (const PrefillKernel& kernel : all()) {
    const bool keys = kernel.key.bits == format.key.bits && kernel.key.dim == format.key.dim &&
                      kernel.key.high_steps == format.key.high_steps;
    const bool values = kernel.value.bits == format.value.bits && kernel.value.dim == format.value.dim;
    if (!keys || !values || kernel.rotation != format.rotation || kernel.bfloat != format.bfloat) continue;
    if (kernel.shared(format.key.bytes()) > static_cast<std::size_t>(most_shared_bytes())) continue;
    if (kernel.wgmma ? runs_wgmma(kernel.function) : best == nullptr) best = &kernel;
  }
  return best;
}

int prepare_prefill(const PrefillKernel& kernel, int key_bytes, int ranks) {
  allow_most_shared(kernel.function);
  if (ranks > 1) {
    const Launch launch(kernel, dim3(static_cast<unsigned>(ranks)), ranks, key_bytes, nullptr);
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &launch.config), "co-resident clusters");
    return clusters * ranks;
  }
  int blocks = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, kernel.threads, kernel.shared(key_bytes)),
      "co-resident blocks");
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "CUDA device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "CUDA device properties");
  return std::max(1, blocks * multiprocessors);
}

int choose_parts(std::int64_t items, std::int64_t stages, int slots) {
  // What a part costs beyond its stages, in stages: its start, and its share of the merge.
  constexpr double kPartCost = 3;
  int best = 1;
  double best_cost = 0;
  for (int parts = 1; parts <= kMaxParts && parts <= std::max<std::int64_t>(stages, 1); ++parts) {
    const auto rounds = static_cast<double>((items * parts + slots - 1) / slots);
    const double cost = rounds * (static_cast<double>(stages) / parts + (parts > 1 ? kPartCost : 0));
    if (parts == 1 || cost < best_cost) {
      best = parts;
      best_cost = cost;
    }
  }
  return best;
}

std::size_t prefill_workspace(const PrefillKernel& kernel, const PrefillSplit& split, int kv_heads, int sequences) {
  if (split.parts == 1) return 0;
  const std::size_t blocks = base::checked_multiply(
      static_cast<std::size_t>(split.vector_blocks * split.parts),
      base::checked_multiply(static_cast<std::size_t>(kv_heads), static_cast<std::size_t>(sequences)));
  return base::checked_multiply(blocks, static_cast<std::size_t>(kernel.vectors * (kernel.value.dim + 2)));
}

void launch_prefill(const PrefillKernel& kernel, const DecodeArgs& args, const ReferenceArgs& layout,
                    const BlockFormat& block, const PrefillSplit& split, int sequences, void* stream) {
  const auto heads = static_cast<unsigned>(args.kv_heads);
  int parts = split.parts;
  // The runtime copies parameters during the call, as many as the kernel has, and writes none of them.
  void* parameters[] = {const_cast<DecodeArgs*>(&args), const_cast<ReferenceArgs*>(&layout), &parts,
                        const_cast<BlockFormat*>(&block)};
  const dim3 blocks(static_cast<unsigned>(split.vector_blocks), heads, static_cast<unsigned>(sequences * parts));
  const Launch launch(kernel, blocks, split.ranks, args.key_bytes, as_stream(stream));
  check(cudaLaunchKernelExC(&launch.config, kernel.function, parameters), "launch of the prefill kernel");
  if (parts == 1 || kernel.few) return;
  const auto merge = kernel.bfloat ? &merge_parts_kernel<true> : &merge_parts_kernel<false>;
  const int vectors = args.rows * args.group;
  const dim3 grid(static_cast<unsigned>((vectors + kMergeWarps - 1) / kMergeWarps), heads,
                  static_cast<unsigned>(sequences));
  merge<<<grid, kMergeWarps * 32, 0, as_stream(stream)>>>(args, kernel.vectors, split.vector_blocks, parts,
                                                          kernel.value.dim);
  check(cudaGetLastError(), "launch of the merge kernel");
}

}  // namespace kvant::cuda
