#include "cli/calibrations.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cli/errors.hpp"
#include "kvant/calibration.hpp"
#include "kvant/error.hpp"
#include "kvant/layout.hpp"

namespace kvant::cli {
namespace {

void check_layer(const Recipe& recipe, const ModelShape& model, const LayerShape& layer) {
  const auto calibration = load_calibration(recipe.file, recipe.digest);
  if (calibration->model != model.name || calibration->architecture != model.architecture) {
    throw CliError(Exit::bad_input,
                   fmt::format("calibration file {} is of model '{}' ({}); this is '{}' ({})", recipe.file,
                               calibration->model, calibration->architecture, model.name, model.architecture));
  }
  static_cast<void>(make_layout(recipe, {layer.kv_heads, layer.key_dim, layer.value_dim, DType::f16}));
}

}  // namespace

bool has_calibration(const LayerRecipes& recipes) {
  return std::any_of(recipes.rules.begin(), recipes.rules.end(),
                     [](const LayerRecipes::Rule& rule) { return !rule.recipe.file.empty(); });
}

void check_calibrations(const LayerRecipes& recipes, const ModelShape& model) {
  if (!has_calibration(recipes)) return;
  try {
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      const Recipe recipe = recipes.at(model.numbers[i]);
      if (!recipe.file.empty()) check_layer(recipe, model, model.layers[i]);
    }
  } catch (const Error& error) {
    throw CliError(Exit::bad_input, error.what());
  }
}

}  // namespace kvant::cli
