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
  int device = 0;
  int most = 0;
  check(cudaGetDevice(&device), "CUDA device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory of a block");
  return kernel.shared_bytes(key_bytes) <= most;
}

void prepare_decode(const DecodeKernel& kernel, int key_bytes) {
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel.shared_bytes(key_bytes)),
        "shared memory of the decode kernel");
}

int resident_clusters(const DecodeKernel& kernel, int ranks, int key_bytes) {
  prepare_decode(kernel, key_bytes);
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

namespace {

SealKernel seal_kernel_of(const DeviceFormat& format) {
  const DecodeKernel* kernel = find_decode_kernel(variant_of(format));
  return kernel == nullptr ? SealKernel() : kernel->seal;
}

}  // namespace

SealArgs make_seal_args(const DeviceFormat& format, const PageLayout& layout, int kv_heads) {
  SealArgs args;
  args.kv_heads = kv_heads;
  args.boosted = format.boosted;
  args.key_bytes = format.key.bytes();
  args.low = layout.key.low;
  args.high = layout.key.high;
  args.budget = layout.key.budget;
  args.key_least_squares = layout.key.least_squares ? 1 : 0;
  args.value_least_squares = layout.value.least_squares ? 1 : 0;
  args.shared_grids = layout.value.shared_grid ? 1 : 0;
  return args;
}

bool can_seal(const DeviceFormat& format) {
  return seal_kernel_of(format).function != nullptr;
}

void launch_seal(const DeviceFormat& format, const SealArgs& args, int jobs, void* stream) {
  const SealKernel kernel = seal_kernel_of(format);
  if (kernel.function == nullptr) {
    base::fail(ErrorCode::unsupported, "this build has no kernels that write pages of the pool's recipe and shape");
  }
  void* parameters[] = {const_cast<SealArgs*>(&args)};
  const auto launch = [&](const void* function, int shared_bytes, int grids, int parts) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "shared memory of the seal kernel");
    check(cudaLaunchKernel(
              function, dim3(static_cast<unsigned>(jobs), static_cast<unsigned>(grids), static_cast<unsigned>(parts)),
              dim3(kSealThreads), parameters, static_cast<std::size_t>(shared_bytes), as_stream(stream)),
          "launch of the seal kernel");
  };
  launch(kernel.function, kernel.shared_bytes, args.kv_heads, 1);
  if (kernel.values == nullptr) return;
  launch(kernel.values, kernel.value_shared_bytes, args.shared_grids != 0 ? 1 : args.kv_heads, 2);
}

}  // namespace kvant::cuda
