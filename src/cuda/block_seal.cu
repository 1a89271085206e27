#include <algorithm>

#include "cuda/block_seal.cuh"
#include "cuda/check.hpp"

namespace kvant::cuda {
namespace {

struct Launch {
  const void* kernel;
  int y, z, shared_bytes;
};

void launch(const Launch& what, BlockSealBatch& batch, unsigned pages, cudaStream_t stream) {
  allow_most_shared(what.kernel);
  void* parameters[] = {&batch};
  const dim3 grid(pages, static_cast<unsigned>(what.y), static_cast<unsigned>(what.z));
  check(cudaLaunchKernel(what.kernel, grid, dim3(kBlockSealThreads), parameters,
                         static_cast<std::size_t>(what.shared_bytes), stream),
        "launch of a kernel that seals blocks");
}

template <bool Bfloat>
void launch_typed(const BlockSealArgs& args, std::span<const BlockSealJob> jobs, cudaStream_t stream) {
  const BlockSealGrids grids(args);
  const Launch launches[] = {
      {reinterpret_cast<const void*>(&block_seal_prepare<Bfloat>), grids.prepare_y, 1, kBlockPrepareBytes},
      {reinterpret_cast<const void*>(&block_seal_encode<Bfloat>), grids.encode_y, 1, grids.encode_bytes},
      {reinterpret_cast<const void*>(&block_seal_values<Bfloat>), grids.values_y, grids.values_z, grids.values_bytes}};
  BlockSealBatch batch;
  batch.args = args;
  while (!jobs.empty()) {
    const std::size_t count = std::min<std::size_t>(jobs.size(), BlockSealBatch::kJobs);
    std::copy_n(jobs.begin(), count, batch.jobs);
    for (const Launch& each : launches) launch(each, batch, static_cast<unsigned>(count), stream);
    jobs = jobs.subspan(count);
  }
}

}  // namespace

void launch_block_seal(const BlockSealArgs& args, bool bfloat, std::span<const BlockSealJob> jobs, void* stream) {
  if (bfloat) {
    launch_typed<true>(args, jobs, as_stream(stream));
  } else {
    launch_typed<false>(args, jobs, as_stream(stream));
  }
}

}  // namespace kvant::cuda
