// What the environment asks for: KVANT_RECIPE, KVANT_RECORD, KVANT_RECORD_ROPE, KVANT_STATUS and KVANT_DEVICE_TYPE.
#pragma once

#include <cstdint>
#include <string>

#include "kvant/recipe.hpp"

namespace kvant::llama {

struct Config {
  LayerRecipes recipes;
  std::string recipe_text;          // canonical
  std::string record;               // empty: none; or a file for the rows of keys and values, which are kept as f16
  bool record_before_rope = false;  // keys are recorded as they were before RoPE
  std::string status;               // empty: none; "stderr"; or the path of a file
  std::int32_t device_type = -1;    // an abi::DeviceType

  // True when the layer's keys are stored or recorded as they were before RoPE.
  bool turns_keys(int layer) const;
};

// Reads the environment once. Throws std::runtime_error naming the variable, its value and the choices.
const Config& load_config();

// The configuration read before. Only to be called after load_config.
const Config& config();

}  // namespace kvant::llama
