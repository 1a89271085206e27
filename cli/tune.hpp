// The arithmetic of `kvant tune`: which rung of a ladder of recipes each layer gets under a budget.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cli/compare.hpp"

namespace kvant::cli {

constexpr int kAllLayers = std::numeric_limits<int>::max();
// Steps of waterfill, the presets among them: from 3 bits on with one grid for the values of all heads, as those have.
constexpr std::string_view kTuneLadder =
    "waterfill:k=2.25,v=2; waterfill:k=2.5,v=2; waterfill:k=3,high=6,v=2; waterfill:k=3,high=6,v=3,shared=1; "
    "waterfill:k=3.5,high=6,v=3,shared=1; waterfill:k=4,low=2,high=6,v=4,shared=1; "
    "waterfill:k=5,low=2,high=6,v=5,shared=1";

// Bits that a token takes in each layer on each rung.
struct RungCosts {
  std::vector<std::vector<double>> layer_bits;  // [layer][rung]
  double values = 0;                            // of a token, over all layers
};

// Measured KL divergences.
struct Sensitivity {
  double floor = 0;           // nothing quantized
  std::vector<double> layer;  // this layer alone on the lowest rung
  std::vector<double> rung;   // every layer on this rung
};

struct TunedRow {
  std::string text;
  double bits = 0;
  double kld = 0;
};

// Sorts the ladder by its cost in this model.
RungCosts rung_costs(const ModelShape& model, std::vector<Recipe>& ladder);
double mean_bits(const RungCosts& costs, const std::vector<int>& rungs);
// The highest rung that all layers can have; throws CliError(usage) when the lowest does not fit.
std::vector<int> best_uniform(const RungCosts& costs, double budget);
// Greedy by divergence saved per bit.
std::vector<int> allocate(const RungCosts& costs, const Sensitivity& sensitivity, double budget);

}  // namespace kvant::cli
