// What a model keeps per token, from its GGUF metadata.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/gguf.hpp"

namespace kvant::cli {

struct LayerShape {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  std::int64_t window = 0;  // tokens that a sliding-window layer sees; 0: all

  bool operator==(const LayerShape&) const = default;
};

struct ModelShape {
  std::string name;
  std::string architecture;
  std::int64_t training_context = 0;
  std::uint64_t vocabulary = 0;
  std::uint64_t file_bytes = 0;
  std::vector<LayerShape> layers;  // those that have a KV cache of their own
  std::vector<int> numbers;        // of these layers in the model, which rules of recipes and calibrations go by
  bool recurrent = false;          // layers among these may keep a state instead, which some files do not tell
  std::vector<std::string> notes;  // what had to be assumed
};

// Throws CliError(bad_input) when a needed key is missing or out of range, CliError(unsupported) for models whose cache
// is not plain keys and values.
ModelShape model_shape(const GgufMetadata& metadata);
ModelShape read_model(const std::string& path);

// Cells that llama.cpp gives a layer for a context of `context` tokens and micro-batches of `ubatch`.
std::int64_t layer_cells(const LayerShape& layer, std::int64_t context, std::int64_t ubatch);

}  // namespace kvant::cli
