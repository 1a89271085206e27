#include "cuda/decode.hpp"

#include <vector>

#include "cuda/check.hpp"

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

  Launch(const DecodeKernel& kernel, int groups, int ranks, int key_bytes, bool dependent, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(groups * ranks));
    config.blockDim = dim3(static_cast<unsigned>(kernel.warps * 32));
    config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes(key_bytes));
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

bool fits(const DecodeKernel& kernel, int key_bytes) {
  return kernel.shared_bytes(key_bytes) <= most_shared_bytes();
}

void prepare_decode(const DecodeKernel& kernel) {
  allow_most_shared(kernel.function);
}

int resident_clusters(const DecodeKernel& kernel, int ranks, int key_bytes) {
  prepare_decode(kernel);
  const Launch launch(kernel, 1, ranks, key_bytes, false, nullptr);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &launch.config), "co-resident clusters");
  return clusters;
}

void launch_decode(const DecodeKernel& kernel, const DecodeArgs& args, const InlinePlan& plan, int groups, int ranks,
                   bool dependent, void* stream) {
  const Launch launch(kernel, groups, ranks, args.key_bytes, dependent, as_stream(stream));
  // The runtime copies parameters during the call and writes none of them.
  void* parameters[] = {const_cast<DecodeArgs*>(&args), const_cast<InlinePlan*>(&plan), &ranks};
  check(cudaLaunchKernelExC(&launch.config, kernel.function, parameters), "launch of the decode kernel");
}

DecodeVariant variant_of(const DeviceFormat& format) {
  DecodeVariant variant;
  variant.key_bits = format.key.bits;
  variant.value_bits = format.value.bits;
  variant.high_steps = format.key.high_steps;
  variant.key_dim = format.key.dim;
  variant.value_dim = format.value.dim;
  variant.rotated = format.rotation > 1;
  variant.bfloat = format.bfloat;
  return variant;
}

}  // namespace kvant::cuda
