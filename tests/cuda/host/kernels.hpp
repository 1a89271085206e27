// What stands in for kernels that are launched by their address.
#pragma once

#include "cuda/decode.hpp"
#include "cuda/seal.hpp"

namespace kvant::cuda::host {

void run_decode(const void* function, const DecodeArgs& args, const InlinePlan& plan, int groups);
void run_seal(const SealBatch& batch, unsigned pages);

}  // namespace kvant::cuda::host
