// Kernels that write pages: append rows to exact pages, encode full exact pages.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/decode.hpp"

namespace kvant::cuda {

// What writes the pages of a format.
struct SealKernel {
  DecodeVariant variant;  // names the format
  const void* function = nullptr;
  int threads = 0;
  int shared_bytes = 0;  // of a block that writes keys; one that writes values may need more (SealArgs)
};

struct SealJob {
  std::int32_t exact_page = 0;
  std::int32_t page = 0;
  std::int32_t skip = 0;  // tokens 0..skip-1 of the page are sinks: left out of every statistic, codes 0
};

struct AppendArgs {
  const std::uint16_t* keys = nullptr;  // [sequence][row][head][key_dim]
  const std::uint16_t* values = nullptr;
  std::uint8_t* exact = nullptr;
  std::int64_t exact_stride = 0;
  const std::int32_t* exact_table = nullptr;
  std::int64_t exact_table_stride = 0;
  const std::int32_t* tail_begin = nullptr;  // [sequence] position of the first exact page of the tail
  std::int32_t* lengths = nullptr;
  std::int32_t rows = 0;
  std::int32_t kv_heads = 0;
  std::uint32_t largest = 0;              // bits of the largest magnitude that a cache of the type stores
  unsigned long long* invalid = nullptr;  // counts values beyond it
};

struct SealArgs {
  const std::uint8_t* exact = nullptr;
  std::int64_t exact_stride = 0;
  std::uint8_t* pages = nullptr;
  std::int64_t page_stride = 0;
  std::int32_t kv_heads = 0;
  std::int32_t boosted = 0;  // boosted key channels
  // Widths per channel and rotated values (waterfill).
  std::int32_t key_bytes = 0;  // of a key tile
  std::int32_t low = 0;        // widths
  std::int32_t high = 0;
  std::int32_t budget = 0;             // sum of the widths of all fours
  std::int32_t key_least_squares = 0;  // 0 or 1
  std::int32_t value_least_squares = 0;
  std::int32_t shared_grids = 0;  // one grid per token for all heads
  std::int32_t value_tokens = 0;  // of a block that writes values
};

// What travels with a launch: pages that become full at once are few, and reading their numbers from memory would come
// before everything else.
struct SealBatch {
  static constexpr int kJobs = 256;
  SealArgs args;
  SealJob jobs[kJobs];
};
static_assert(sizeof(SealBatch) <= 4000, "kernel parameters");

SealArgs make_seal_args(const DeviceFormat& format, const PageLayout& layout, int kv_heads);

void launch_append(const DeviceFormat& format, const AppendArgs& args, int sequences, void* stream);
// Whether this build has a kernel that writes pages of the format (with shared grids: whose shared memory holds the
// values of four tokens).
bool can_seal(const DeviceFormat& format, const PageLayout& layout, int kv_heads);
// Throws Error(unsupported) where it has none. One launch per SealBatch::kJobs pages.
void launch_seal(const DeviceFormat& format, const SealArgs& args, std::span<const SealJob> jobs, void* stream);

}  // namespace kvant::cuda
