#include "config.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "ggml_abi.hpp"
#include "kvant/runtime.hpp"

namespace kvant::llama {
namespace {

std::unique_ptr<Config> loaded;

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : otherwise;
}

// An integrated GPU is what hosts pick by themselves when no real GPU is there, and leave alone when one is.
std::int32_t parse_device_type(const std::string& text) {
  if (text == "igpu") return abi::kIgpu;
  if (text == "gpu") return abi::kGpu;
  if (text == "accel") return abi::kAccel;
  throw std::runtime_error("KVANT_DEVICE_TYPE is '" + text + "'; choices are igpu, gpu and accel");
}

bool parse_record_rope(const std::string& text) {
  if (text == "before" || text == "after") return text == "before";
  throw std::runtime_error("KVANT_RECORD_ROPE is '" + text + "'; choices are before and after");
}

LayerRecipes parse_recipe_variable(const std::string& text) {
  try {
    return parse_layer_recipes(text);
  } catch (const std::exception& error) {
    throw std::runtime_error("KVANT_RECIPE is '" + text + "': " + error.what());
  }
}

}  // namespace

bool Config::turns_keys(int layer) const {
  if (record_before_rope) return true;
  const auto rule = std::find_if(recipes.rules.begin(), recipes.rules.end(),
                                 [&](const auto& r) { return layer >= r.first && layer <= r.last; });
  const auto* keys = rule != recipes.rules.end() ? std::get_if<KvquantKeys>(&rule->recipe.key) : nullptr;
  return keys != nullptr && keys->before_rope;
}

const Config& load_config() {
  if (loaded) return *loaded;
  auto read = std::make_unique<Config>();
  read->record = environment("KVANT_RECORD", "");
  read->recipes =
      parse_recipe_variable(environment("KVANT_RECIPE", read->record.empty() ? kDefaultRecipe.data() : "f16"));
  read->recipe_text = to_text(read->recipes);
  if (!read->record.empty() && read->recipe_text != "f16") {
    throw std::runtime_error("KVANT_RECORD needs rows that nothing has changed: KVANT_RECIPE must be f16, not '" +
                             read->recipe_text + "'");
  }
  const bool before_rope = parse_record_rope(environment("KVANT_RECORD_ROPE", "after"));
  read->record_before_rope = before_rope && !read->record.empty();
  read->status = environment("KVANT_STATUS", "");
  read->device_type = parse_device_type(environment("KVANT_DEVICE_TYPE", "igpu"));
  // Also reports a bad KVANT_KERNEL here instead of in the middle of a computation.
  static_cast<void>(active_kernel());
  loaded = std::move(read);
  return *loaded;
}

const Config& config() {
  return *loaded;
}

}  // namespace kvant::llama
