// The host's side of the GPU library without a GPU: a CUDA runtime over host memory, and kernels that move the numbers
// of tokens about instead of attending to them. What a page table, a plan or a reference count gets wrong shows in the
// numbers that an attention call reads, or to AddressSanitizer.
#pragma once

#include <cstdint>
#include <vector>

namespace kvant::cuda::host {

// Key channel 0 of head 0 of an appended row: the token's number.
using Tokens = std::vector<std::uint16_t>;

struct State {
  int multiprocessors = 4;
  int device = 0;
  bool capturing = false;
  int fail_after = -1;       // that many copies, fills and launches succeed, one fails; negative: none does
  std::vector<Tokens> read;  // by the last attention call, of every sequence in order of position
};
State& state();

}  // namespace kvant::cuda::host
