// Bytes that a KV cache takes, computed without running the model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cli/model.hpp"
#include "kvant/recipe.hpp"

namespace kvant::cli {

struct Estimate {
  std::uint64_t sealed = 0;  // pages in codes, endpoints included
  std::uint64_t open = 0;    // the recent window, the page being filled, and page buffers kept for reuse
  std::uint64_t exact = 0;   // sinks
  std::uint64_t tables = 0;
  std::uint64_t values = 0;  // keys and values of the context
  double bits_asymptotic = 0;
  std::uint64_t decoding = 0;  // what more can be open while tokens are generated one by one

  std::uint64_t total() const { return sealed + open + exact + tables; }
  double bits() const { return values == 0 ? 0 : 8.0 * static_cast<double>(total()) / static_cast<double>(values); }
};

// One sequence of `context` tokens, read in micro-batches of `ubatch`, under a recipe of kvant.
Estimate estimate_recipe(const ModelShape& model, const LayerRecipes& recipes, std::int64_t context,
                         std::int64_t ubatch);

// The host's own cache, which is allocated in full at start.
Estimate estimate_stock(const ModelShape& model, std::string_view key_type, std::string_view value_type,
                        std::int64_t context, std::int64_t ubatch);

// MemAvailable of this machine in bytes, 0 when unknown.
std::uint64_t available_memory();

}  // namespace kvant::cli
