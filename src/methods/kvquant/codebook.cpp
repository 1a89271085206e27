#include "methods/kvquant/codebook.hpp"

#include <algorithm>
#include <cmath>

namespace kvant::kvquant {
namespace {

constexpr int kBins = 254 * 60;
constexpr int kMostRounds = 1000;

// Prefix sums, so that the weight of a run of bins is one difference.
std::vector<double> prefix(const std::vector<double>& values) {
  std::vector<double> sums(values.size() + 1);
  for (std::size_t i = 0; i < values.size(); ++i) sums[i + 1] = sums[i] + values[i];
  return sums;
}

double center(std::size_t bin) {
  return (static_cast<double>(bin) + 0.5) / kBins * 2 - 1;
}

// The first bin whose center is nearer to the upper level.
std::size_t boundary(double lower, double upper) {
  const double bin = ((lower + upper) / 2 + 1) / 2 * kBins - 0.5;
  return static_cast<std::size_t>(std::clamp(std::ceil(bin), 0.0, static_cast<double>(kBins)));
}

// Rounded to the grid; levels that fall together move apart, upwards and then back from the top.
std::array<std::uint8_t, 16> rounded(const std::vector<double>& levels) {
  std::vector<int> steps;
  for (const double level : levels) {
    const int step = static_cast<int>(std::lround((level + 1) * 127));
    steps.push_back(std::max(std::clamp(step, 0, 254), steps.empty() ? 0 : steps.back() + 1));
  }
  int limit = 254;
  for (std::size_t i = steps.size(); i-- > 0; --limit) limit = steps[i] = std::min(steps[i], limit);
  std::array<std::uint8_t, 16> table{};
  std::copy(steps.begin(), steps.end(), table.begin());
  return table;
}

}  // namespace

Codebook::Codebook() : weight_(kBins), product_(kBins) {}

void Codebook::add(double value, double weight) {
  const auto bin = static_cast<std::size_t>(std::clamp(static_cast<int>((value + 1) / 2 * kBins), 0, kBins - 1));
  weight_[bin] += weight;
  product_[bin] += weight * value;
}

std::array<std::uint8_t, 16> Codebook::levels(int bits) const {
  const auto count = static_cast<std::size_t>(1) << bits;
  const std::vector<double> weight = prefix(weight_);
  const std::vector<double> product = prefix(product_);
  std::vector<double> levels(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(count);
    const auto at = std::upper_bound(weight.begin() + 1, weight.end(), share * weight.back());
    levels[i] = weight.back() > 0
                    ? center(static_cast<std::size_t>(std::min(at, weight.end() - 1) - weight.begin() - 1))
                    : 2 * share - 1;
  }
  for (int round = 0; round < kMostRounds; ++round) {
    double moved = 0;
    std::size_t first = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t end = i + 1 < count ? std::max(first, boundary(levels[i], levels[i + 1])) : kBins;
      const double mass = weight[end] - weight[first];
      const double mean = mass > 0 ? (product[end] - product[first]) / mass : levels[i];
      moved = std::max(moved, std::fabs(mean - levels[i]));
      levels[i] = mean;
      first = end;
    }
    if (moved < 1e-6) break;
  }
  return rounded(levels);
}

}  // namespace kvant::kvquant
