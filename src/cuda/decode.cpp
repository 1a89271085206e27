#include "cuda/decode.hpp"

#include <vector>

#include "cuda/check.hpp"
#include "cuda/seal.hpp"

namespace kvant::cuda {

// One table per generated instance file (CMakeLists.txt lists them in decode_tables.inc).
#define KVANT_DECODE_TABLE(name) std::span<const DecodeKernel> name();
#include "decode_tables.inc"
#undef KVANT_DECODE_TABLE

namespace {

std::vector<DecodeKernel> collect() {
  std::vector<DecodeKernel> kernels;
#define KVANT_DECODE_TABLE(name) \
  for (const DecodeKernel& kernel : name()) kernels.push_back(kernel);
#include "decode_tables.inc"
#undef KVANT_DECODE_TABLE
  return kernels;
}

const std::vector<DecodeKernel>& all() {
  static const std::vector<DecodeKernel> kernels = collect();
  return kernels;
}

// Launch configuration with its attributes; they must outlive the launch call.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Launch(const DecodeKernel& kernel, int groups, int ranks, bool dependent, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(groups * ranks));
    config.blockDim = dim3(static_cast<unsigned>(kernel.warps * 32));
    config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    if (ranks > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
      ++config.numAttrs;
    }
    if (dependent) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
      ++config.numAttrs;
    }
  }
};

}  // namespace

std::span<const DecodeKernel> decode_kernels() {
  return all();
}

const DecodeKernel* find_decode_kernel(const DecodeVariant& variant) {
  for (const DecodeKernel& kernel : all()) {
    if (kernel.variant == variant) return &kernel;
  }
  return nullptr;
}

void prepare_decode(const DecodeKernel& kernel) {
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
        "shared memory of the decode kernel");
}

int resident_clusters(const DecodeKernel& kernel, int ranks) {
  prepare_decode(kernel);
  const Launch launch(kernel, 1, ranks, false, nullptr);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &launch.config), "co-resident clusters");
  return clusters;
}

void launch_decode(const DecodeKernel& kernel, const DecodeArgs& args, const InlinePlan& plan, int groups, int ranks,
                   bool dependent, void* stream) {
  const Launch launch(kernel, groups, ranks, dependent, as_stream(stream));
  // The runtime copies parameters during the call and writes none of them.
  void* parameters[] = {const_cast<DecodeArgs*>(&args), const_cast<InlinePlan*>(&plan), &ranks};
  check(cudaLaunchKernelExC(&launch.config, kernel.function, parameters), "launch of the decode kernel");
}

void launch_seal(const DeviceFormat& format, const SealArgs& args, int jobs, void* stream) {
  DecodeVariant variant;
  variant.key_bits = format.key.bits;
  variant.value_bits = format.value.bits;
  variant.high_steps = format.key.high_steps;
  variant.key_dim = format.key.dim;
  variant.value_dim = format.value.dim;
  variant.bfloat = format.bfloat;
  const DecodeKernel* kernel = find_decode_kernel(variant);
  if (kernel == nullptr) {
    base::fail(ErrorCode::unsupported, "this build has no kernels for the pool's recipe and shape");
  }
  check(cudaFuncSetAttribute(kernel->seal, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel->seal_shared_bytes),
        "shared memory of the seal kernel");
  void* parameters[] = {const_cast<SealArgs*>(&args)};
  check(cudaLaunchKernel(kernel->seal, dim3(static_cast<unsigned>(jobs), static_cast<unsigned>(args.kv_heads)),
                         dim3(kSealThreads), parameters, static_cast<std::size_t>(kernel->seal_shared_bytes),
                         as_stream(stream)),
        "launch of the seal kernel");
}

}  // namespace kvant::cuda
