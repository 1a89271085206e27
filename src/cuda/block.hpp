// The kernels over block pages as prefill kernels, and what a pool's pages are.
#pragma once

#include <optional>
#include <span>

#include "cuda/block_format.hpp"
#include "cuda/prefill.hpp"
#include "kvant/cuda.hpp"

namespace kvant::cuda {

struct BlockKernel {
  int key_dim = 0;  // 0: any
  int value_dim = 0;
  bool bfloat = false;
  const void* function = nullptr;
  int vectors = 0;  // query vectors of a thread block
  int threads = 0;  // of teams: the most
  int (*shared_bytes)(const BlockFormat& format, int threads) = nullptr;
  bool few = false;          // for few query vectors
  bool before_rope = false;  // pages whose keys are those before RoPE, and no others
  bool wgmma = false;        // for sm_90a only
  int team = 1;              // of few vectors: warps that share a page
  int ranks = 1;             // of many: PrefillKernel
};

std::span<const BlockKernel> block_kernels();

// The kernel for `rows` query rows of `group` heads per KV head; none where this build has none of the shape, or where
// the current device gives a block too little shared memory. Of those for many vectors that of sm_90a where it runs.
// path: integer is the one for few vectors, prefill that for many, else whichever is faster.
std::optional<PrefillKernel> find_block_kernel(const DeviceFormat& device, const BlockFormat& format, int rows,
                                               int group, AttendPath path);

// The same with teams of warps, as many as a block can have, up to `teams`; none where the shape has no such kernel.
std::optional<PrefillKernel> find_team_kernel(const DeviceFormat& device, const BlockFormat& format, int teams);

// Raises the kernel's shared memory limit on the current device; not while capturing.
void prepare_teams(const PrefillKernel& kernel);
// split.parts blocks of kernel.threads threads for each of the vectors, heads and sequences. args.partials has
// prefill_workspace() floats, args.counters a zero for each of them. overlap: the launch may begin while its
// predecessor in the stream ends.
void launch_teams(const PrefillKernel& kernel, const DecodeArgs& args, const TeamLayout& layout,
                  const BlockFormat& block, const PrefillSplit& split, int sequences, bool overlap, void* stream);

struct PoolFormat {
  DeviceFormat device;
  BlockFormat block;  // present(): pages are blocks, and of `device` only dimensions and types count
};

// A tuned format where the recipe has one and this build a kernel of it, else blocks. Throws Error(invalid_argument)
// naming what neither holds.
PoolFormat choose_format(const Recipe& recipe, const CacheShape& shape);

}  // namespace kvant::cuda
