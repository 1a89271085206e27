#include "cuda/seal.hpp"

#include <algorithm>

#include "cuda/check.hpp"

namespace kvant::cuda {

// One function per generated instance file (CMakeLists.txt lists them in seal_tables.inc).
#define KVANT_SEAL_TABLE(name) SealKernel name();
#include "seal_tables.inc"
#undef KVANT_SEAL_TABLE

namespace {

SealKernel find_seal_kernel(const DeviceFormat& format) {
  static const SealKernel kernels[] = {
#define KVANT_SEAL_TABLE(name) name(),
#include "seal_tables.inc"
#undef KVANT_SEAL_TABLE
  };
  const DecodeVariant wanted = variant_of(format);
  for (const SealKernel& kernel : kernels) {
    if (kernel.variant == wanted) return kernel;
  }
  return {};
}

// Of a block that writes the values of `tokens` tokens in the order of waterfill's kernel: rows, ranges and codes.
std::size_t value_bytes(const DeviceFormat& format, int heads, int tokens) {
  return static_cast<std::size_t>(heads) * static_cast<std::size_t>(tokens) *
         static_cast<std::size_t>(format.value.dim * 5 + 8);
}

// Two blocks fit a multiprocessor where few heads share a grid; the last resort is one.
constexpr std::size_t kUsualBytes = 110 << 10;

std::size_t most_bytes() {
  return static_cast<std::size_t>(most_shared_bytes());
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
  args.value_tokens = 64;
  const int heads = args.shared_grids != 0 ? kv_heads : 1;
  const std::size_t usual = std::min(kUsualBytes, most_bytes());
  while (args.value_tokens > 4 && value_bytes(format, heads, args.value_tokens) > usual) args.value_tokens /= 2;
  return args;
}

bool can_seal(const DeviceFormat& format, const PageLayout& layout, int kv_heads) {
  if (find_seal_kernel(format).function == nullptr) return false;
  return !layout.value.shared_grid || value_bytes(format, kv_heads, 4) <= most_bytes();
}

void launch_seal(const DeviceFormat& format, const SealArgs& args, std::span<const SealJob> jobs, void* stream) {
  const SealKernel kernel = find_seal_kernel(format);
  if (kernel.function == nullptr) {
    base::fail(ErrorCode::unsupported, "this build has no kernels that write pages of the pool's recipe and shape");
  }
  dim3 grid(1, static_cast<unsigned>(args.kv_heads), 2);
  auto shared_bytes = static_cast<std::size_t>(kernel.shared_bytes);
  if (format.key.sorted()) {
    const int grids = args.shared_grids != 0 ? 1 : args.kv_heads;
    grid.y += static_cast<unsigned>(grids * (kPage / args.value_tokens));
    grid.z = 1;
    shared_bytes = std::max(shared_bytes, value_bytes(format, args.kv_heads / grids, args.value_tokens));
  }
  allow_most_shared(kernel.function);
  SealBatch batch;
  batch.args = args;
  for (; !jobs.empty(); jobs = jobs.subspan(grid.x)) {
    grid.x = static_cast<unsigned>(std::min<std::size_t>(jobs.size(), SealBatch::kJobs));
    std::copy_n(jobs.begin(), grid.x, batch.jobs);
    void* parameters[] = {&batch};
    check(cudaLaunchKernel(kernel.function, grid, dim3(static_cast<unsigned>(kernel.threads)), parameters, shared_bytes,
                           as_stream(stream)),
          "launch of the seal kernel");
  }
}

}  // namespace kvant::cuda
