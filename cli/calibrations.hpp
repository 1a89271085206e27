// Calibration files that recipes name, held against the model they are to be used with.
#pragma once

#include "cli/model.hpp"
#include "kvant/recipe.hpp"

namespace kvant::cli {

bool has_calibration(const LayerRecipes& recipes);

// Throws CliError(bad_input) when a calibration file is of a model with another name, architecture or geometry, or
// lacks a layer. The library itself sees shapes only.
void check_calibrations(const LayerRecipes& recipes, const ModelShape& model);

}  // namespace kvant::cli
