// Attention by definition, in binary64: the cross-check of the integer kernels and the path of shapes without one.
#pragma once

#include "cuda/decode_args.hpp"
#include "cuda/device_format.hpp"

namespace kvant::cuda {

struct BlockFormat;  // block_format.hpp

// `segments` of args are not read: every sequence's coded pages [first[b], coded[b]) and exact tiles come from here.
struct ReferenceArgs {
  const std::int32_t* first_page = nullptr;   // [sequence]
  const std::int32_t* coded_pages = nullptr;  // [sequence]
  const std::int32_t* sinks = nullptr;        // [sequence]
};

// block: where it is present, pages are blocks.
void launch_reference(const DeviceFormat& format, const BlockFormat& block, const DecodeArgs& args,
                      const ReferenceArgs& reference, int sequences, void* stream);

}  // namespace kvant::cuda
