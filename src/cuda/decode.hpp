// The compiled decode kernels and how one is launched; no CUDA header needed.
#pragma once

#include <span>

#include "cuda/decode_args.hpp"
#include "cuda/device_format.hpp"

namespace kvant::cuda {

struct DecodeVariant {
  int key_bits = 2;  // 0: widths per channel, with any budget
  int value_bits = 2;
  int high_steps = 0;
  int key_dim = 128;
  int value_dim = 128;
  bool rotated = false;  // values
  int n_tiles = 1;
  bool half = false;
  bool bfloat = false;
  bool cluster = false;  // fewer warps, for grids of clusters

  bool operator==(const DecodeVariant&) const = default;
};
DecodeVariant variant_of(const DeviceFormat& format);  // for up to four query vectors per KV head

struct DecodeKernel {
  DecodeVariant variant;
  const void* function = nullptr;
  int warps = 0;
  int fixed_bytes = 0;  // of shared memory, but for key tiles of a size that the kernel does not know

  int shared_bytes(int key_bytes) const {
    return fixed_bytes + (variant.key_bits == 0 ? warps * shifted_bytes(key_bytes) : 0);
  }
};

// Null where this build has no such kernel.
const DecodeKernel* find_decode_kernel(const DecodeVariant& variant);
std::span<const DecodeKernel> decode_kernels();

// In all of these, key_bytes is the size of a key tile.

// Whether a block's shared memory is within what the current device gives.
bool fits(const DecodeKernel& kernel, int key_bytes);

// How many clusters of `ranks` blocks of this kernel run at once on the current device; 0 where clusters do not exist.
int resident_clusters(const DecodeKernel& kernel, int ranks, int key_bytes);

// Raises the kernel's shared memory limit on the current device; once per device, not while capturing.
void prepare_decode(const DecodeKernel& kernel);

// Launches groups * ranks blocks. `dependent`: the launch may begin before its predecessor in the stream has ended.
void launch_decode(const DecodeKernel& kernel, const DecodeArgs& args, const InlinePlan& plan, int groups, int ranks,
                   bool dependent, void* stream);

}  // namespace kvant::cuda
