// Prefill attention: many query rows per sequence against tiles that are dequantized once per block of query vectors.
// The compiled kernels and how one is launched; no CUDA header needed.
#pragma once

#include <span>

#include "cuda/decode_args.hpp"
#include "cuda/device_format.hpp"
#include "cuda/reference.hpp"

namespace kvant::cuda {

struct BlockFormat;  // block_format.hpp

struct PrefillKernel {
  KeyFormat key;
  ValueFormat value;
  bool bfloat = false;
  bool wgmma = false;  // for sm_90a only
  const void* function = nullptr;
  int vectors = 0;  // query vectors of a thread block; vector v is row v / group, head v % group
  int threads = 0;
  int shared_bytes = 0;
  bool block = false;  // over block pages (block.hpp); of the formats above only dimensions count then
  bool few = false;    // for few vectors
  int team = 1;        // of few vectors: warps that share a page
  int ranks = 1;       // of many: blocks of a cluster that share what they unpack, at most
  int rotation = 1;    // of the values (DeviceFormat)
  int (*sorted_keys)(int key_bytes) = nullptr;  // pages whose keys come on top of shared_bytes

  std::size_t shared(int key_bytes) const {
    const int bytes = shared_bytes + (sorted_keys != nullptr ? sorted_keys(key_bytes) * key_bytes : 0);
    return static_cast<std::size_t>(bytes);
  }
};

// How one call is cut: a thread block per (block of vectors, KV head, sequence, part of the tokens).
struct PrefillSplit {
  int vector_blocks = 1;  // per KV head and sequence, a multiple of ranks: the last may have no vectors
  int ranks = 1;          // blocks of a cluster
  int parts = 1;          // more than one: partial results meet in a second kernel; not those of few vectors
};

// The best for the current device; null where this build has no such kernel.
const PrefillKernel* find_prefill_kernel(const DeviceFormat& format);
std::span<const PrefillKernel> prefill_kernels();
// Whether the current device runs the machine code of sm_90a and not that of another architecture in the same build.
bool runs_wgmma(const void* function);

// Raises the kernel's shared memory limit on the current device; not while capturing. Returns how many of its blocks
// the device runs at once in clusters of `ranks`: 0 where it cannot run such clusters. key_bytes: of the pool's pages.
int prepare_prefill(const PrefillKernel& kernel, int key_bytes, int ranks);

// As many parts as shorten the call. items: blocks without parts; stages: tiles of 64 tokens of the longest sequence;
// slots: blocks that the device runs at once.
int choose_parts(std::int64_t items, std::int64_t stages, int slots);

// Floats that the partial results of a call take; 0 with one part.
std::size_t prefill_workspace(const PrefillKernel& kernel, const PrefillSplit& split, int kv_heads, int sequences);

// `layout` says which pages of a sequence are coded and how many sinks it has, as for the reference kernel. Segments
// of args are not read; args.partials must have prefill_workspace() floats, for few vectors args.counters a zero per
// item. block: read by kernels over block pages.
void launch_prefill(const PrefillKernel& kernel, const DecodeArgs& args, const ReferenceArgs& layout,
                    const BlockFormat& block, const PrefillSplit& split, int sequences, void* stream);

}  // namespace kvant::cuda
