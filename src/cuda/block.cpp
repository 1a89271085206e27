#include "cuda/block.hpp"

#include <algorithm>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/decode.hpp"

namespace kvant::cuda {

// One table per generated instance file (CMakeLists.txt lists them in block_tables.inc).
#define KVANT_BLOCK_TABLE(name) std::span<const BlockKernel> name();
#include "block_tables.inc"
#undef KVANT_BLOCK_TABLE

namespace {

constexpr int kMostShared = 227 * 1024;  // bytes that any device gives a block
constexpr int kFewRows = 8;              // of the integer path
constexpr int kFewVectors = 32;          // up to here blocks of 4 vectors are faster than those of 64 and more
constexpr int kFewTurnedVectors = 16;    // the same of keys before RoPE

std::vector<BlockKernel> collect() {
  std::vector<BlockKernel> kernels;
#define KVANT_BLOCK_TABLE(name) \
  for (const BlockKernel& kernel : name()) kernels.push_back(kernel);
#include "block_tables.inc"
#undef KVANT_BLOCK_TABLE
  return kernels;
}

std::optional<DeviceFormat> tuned_format(const Recipe& recipe, const CacheShape& shape) {
  try {
    return make_device_format(recipe, shape);
  } catch (const Error&) {  // why does not matter: blocks hold nearly everything, and say what they do not
    return std::nullopt;
  }
}

// Whether the kernel knows how the format's keys are to be turned, if they are.
bool turns(const BlockKernel& kernel, const BlockFormat& format) {
  if (kernel.before_rope != (format.before_rope != 0)) return false;
  if (!kernel.before_rope || !kernel.few) return true;
  return format.turns.places != nullptr && has_table(format.key.codes) && format.tokens_offset < 0;
}

}  // namespace

std::span<const BlockKernel> block_kernels() {
  static const std::vector<BlockKernel> kernels = collect();
  return kernels;
}

std::optional<PrefillKernel> find_block_kernel(const DeviceFormat& device, const BlockFormat& format, int rows,
                                               int group, AttendPath path) {
  std::optional<PrefillKernel> best;
  if (!format.present()) return best;
  const int few_vectors = format.before_rope != 0 ? kFewTurnedVectors : kFewVectors;
  const bool want_few =
      path == AttendPath::integer || (path != AttendPath::prefill && rows <= kFewRows && rows * group <= few_vectors);
  const bool strict = path == AttendPath::integer || path == AttendPath::prefill;
  const int most = most_shared_bytes();
  for (const BlockKernel& kernel : block_kernels()) {
    if (kernel.value_dim != device.value.dim || kernel.bfloat != device.bfloat) continue;
    if (!turns(kernel, format) || kernel.team > 1) continue;
    if (kernel.key_dim != 0 && kernel.key_dim != device.key.dim) continue;
    const int bytes = kernel.shared_bytes(format, kernel.threads);
    if (bytes > most || ((best || strict) && kernel.few != want_few)) continue;
    if (best && best->wgmma && best->few == want_few) continue;
    if (kernel.wgmma && !runs_wgmma(kernel.function)) continue;
    best = PrefillKernel{device.key,      device.value,   kernel.bfloat,  kernel.wgmma,
                         kernel.function, kernel.vectors, kernel.threads, bytes};
    best->block = true;
    best->few = kernel.few;
    best->ranks = kernel.ranks;
  }
  return best;
}

std::optional<PrefillKernel> find_team_kernel(const DeviceFormat& device, const BlockFormat& format, int teams) {
  const int most = most_shared_bytes();
  if (format.before_rope != 0) return std::nullopt;
  for (const BlockKernel& kernel : block_kernels()) {
    if (kernel.team == 1 || kernel.key_dim != device.key.dim || kernel.value_dim != device.value.dim) continue;
    if (kernel.bfloat != device.bfloat) continue;
    const int team_threads = kernel.team * 32;
    int threads = std::min(kernel.threads, teams * team_threads);
    while (threads > 0 && kernel.shared_bytes(format, threads) > most) threads -= team_threads;
    if (threads == 0) continue;
    PrefillKernel found{device.key,      device.value,   kernel.bfloat, false,
                        kernel.function, kernel.vectors, threads,       kernel.shared_bytes(format, threads)};
    found.block = found.few = true;
    found.team = kernel.team;
    return found;
  }
  return std::nullopt;
}

void prepare_teams(const PrefillKernel& kernel) {
  allow_most_shared(kernel.function);
}

void launch_teams(const PrefillKernel& kernel, const DecodeArgs& args, const TeamLayout& layout,
                  const BlockFormat& block, const PrefillSplit& split, int sequences, bool overlap, void* stream) {
  int parts = split.parts;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(split.vector_blocks), static_cast<unsigned>(args.kv_heads),
                        static_cast<unsigned>(sequences * parts));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  config.stream = as_stream(stream);
  cudaLaunchAttribute attribute;
  if (overlap) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  // The runtime copies parameters during the call and writes none of them.
  void* parameters[] = {const_cast<DecodeArgs*>(&args), const_cast<TeamLayout*>(&layout), &parts,
                        const_cast<BlockFormat*>(&block)};
  check(cudaLaunchKernelExC(&config, kernel.function, parameters), "launch of the kernel with teams");
}

PoolFormat choose_format(const Recipe& recipe, const CacheShape& shape) {
  if (const std::optional<DeviceFormat> tuned = tuned_format(recipe, shape)) {
    const DecodeKernel* kernel = find_decode_kernel(variant_of(*tuned));
    if (kernel != nullptr && kernel->shared_bytes(tuned->key.bytes()) <= kMostShared) return {*tuned, {}};
  }
  PoolFormat format;
  format.block = make_block_format(recipe, shape);
  format.device.key = {0, shape.key_dim, 0};
  format.device.value = {0, shape.value_dim};
  format.device.exact = {shape.key_dim, shape.value_dim};
  format.device.rotation = format.block.value.rotation;
  format.device.bfloat = shape.dtype == DType::bf16;
  return format;
}

}  // namespace kvant::cuda
