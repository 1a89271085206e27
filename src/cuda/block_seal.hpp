// Sealing block pages on the device: what the kernels (block_seal.cuh) are told of a recipe. Nothing is compiled per
// recipe or shape.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/seal.hpp"
#include "cuda/seal_shared.hpp"

namespace kvant::cuda {

// What ranks the channels of a key tile. The device sees no queries: without them their weights are 1, as on the CPU.
enum class KeyRank : std::int32_t { none, magnitude, variance, range, widths };

struct BlockSealArgs {
  const std::uint8_t* exact = nullptr;
  std::int64_t exact_stride = 0;
  std::uint8_t* pages = nullptr;
  std::int64_t page_stride = 0;
  const std::uint16_t* key_ranges = nullptr;  // calibrated: [kv_heads][key_dim][min, max]; null: those of the page
  std::uint32_t* list_counts = nullptr;       // block_list_counts() of them; null where that is 0
  BlockFormat format;
  KeyRank rank = KeyRank::none;
  std::int32_t boosted = 0;  // channels of the wider one of two widths
  std::int32_t low = 0;      // own widths: as in SealArgs
  std::int32_t high = 0;
  std::int32_t budget = 0;
  std::int32_t salient = 0;  // places of the first class of tokens; 0: one class
  std::int32_t key_least_squares = 0;
  std::int32_t value_least_squares = 0;
  std::int32_t grid_tokens = 0;  // of a block that finds the grids of values; 0: they are found with the codes
  // Tables of levels: the code of each step of the grid (cache::nearest_codes).
  std::uint8_t key_nearest[kTableStepsOnDevice + 2] = {};
  std::uint8_t value_nearest[kTableStepsOnDevice + 2] = {};
};

// As SealJob.
struct BlockSealJob {
  std::int32_t exact_page = 0;
  std::int32_t page = 0;
  std::int32_t skip = 0;
  std::int32_t position = 0;  // of the page's first token
};

// As SealBatch.
struct BlockSealBatch {
  static constexpr int kJobs = 128;
  BlockSealArgs args;
  BlockSealJob jobs[kJobs];
};
static_assert(sizeof(BlockSealBatch) <= 4000, "kernel parameters");

// Pointers and strides are left to the caller.
BlockSealArgs make_block_seal(const Recipe& recipe, const PageLayout& layout, const BlockFormat& format);
// BlockSealArgs::key_ranges of a recipe; empty where it has none.
std::vector<std::uint16_t> calibrated_ranges(const PageLayout& layout, int kv_heads, DType dtype);

// Words of scratch memory: outliers of values per page of a launch, KV head and step of places, so that steps need not
// wait for each other. 0 for recipes without lists, or whose tokens are in an order of each head's own.
std::size_t block_list_counts(const BlockSealArgs& args);

// Extents of the launches, each (pages, y, z).
struct BlockSealGrids {
  int prepare_y = 0;
  int encode_y = 0;
  int encode_bytes = 0;  // shared memory
  int values_y = 0;
  int values_z = 0;
  int values_bytes = 0;

  explicit BlockSealGrids(const BlockSealArgs& args);
};
// False where the kernels need more shared memory than a block has: one token's values of all heads under a shared
// grid.
bool can_seal_blocks(const BlockSealArgs& args, int shared_bytes);

// Encodes the jobs' pages, BlockSealBatch::kJobs at a time. bfloat: the cache's type.
void launch_block_seal(const BlockSealArgs& args, bool bfloat, std::span<const BlockSealJob> jobs, void* stream);

}  // namespace kvant::cuda
