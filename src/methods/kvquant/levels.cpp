#include "methods/kvquant/levels.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace kvant::kvquant {
namespace {

constexpr int kMostLevels = 16;
constexpr int kPoints = kSteps + 1;

double value_of(double step) {
  return step / (kSteps / 2.0) - 1;
}
double step_of(double value) {
  return (value + 1) * (kSteps / 2.0);
}

// Levels that fall together or beyond an end move apart, upwards and then back from the top.
void keep_apart(std::array<int, kMostLevels>& steps, int count) {
  for (int i = 0; i < count; ++i) {
    int& step = steps[static_cast<std::size_t>(i)];
    step = std::max(step, i == 0 ? 0 : steps[static_cast<std::size_t>(i - 1)] + 1);
  }
  for (int i = count - 1; i >= 0; --i) {
    int& step = steps[static_cast<std::size_t>(i)];
    step = std::min(step, kSteps - (count - 1 - i));
    if (i + 1 < count) step = std::min(step, steps[static_cast<std::size_t>(i + 1)] - 1);
  }
}

std::array<std::uint8_t, kMostLevels> bytes_of(const std::array<int, kMostLevels>& steps) {
  std::array<std::uint8_t, kMostLevels> bytes{};
  std::transform(steps.begin(), steps.end(), bytes.begin(), [](int step) { return static_cast<std::uint8_t>(step); });
  return bytes;
}

}  // namespace

// Neighbouring points under one level.
struct LevelFit::Run {
  int level = 0;
  double weight = 0;
  double error = 0;  // sum of weight * (value - level)^2
};

void LevelFit::add(double value, double weight) {
  const int step = std::clamp(static_cast<int>(std::lround(step_of(value))), 0, kSteps);
  Sums& sums = points_[static_cast<std::size_t>(step)];
  sums.weight += weight;
  sums.product += weight * value;
  sums.square += weight * value * value;
}

// The best level is the step next to the mean; it lies inside the run, so levels of later runs are larger.
LevelFit::Run LevelFit::run_of(const Prefix& prefix, int first, int last) {
  const Sums& from = prefix[static_cast<std::size_t>(first)];
  const Sums& to = prefix[static_cast<std::size_t>(last + 1)];
  const double weight = to.weight - from.weight;
  if (!(weight > 0)) return {(first + last) / 2, 0, 0};
  const double product = to.product - from.product;
  const int level = std::clamp(static_cast<int>(std::lround(step_of(product / weight))), first, last);
  const double value = value_of(level);
  const double error = (to.square - from.square) - 2 * value * product + value * value * weight;
  return {level, weight, std::max(error, 0.0)};
}

// scale = deviation of the values / deviation of the levels that stand for them; offset so that the means agree.
LevelTable LevelFit::normed(const Prefix& prefix, const std::array<Run, 16>& runs, int count) {
  const Sums& all = prefix.back();
  std::array<int, kMostLevels> levels{}, normed{};
  double mean = 0;
  double square = 0;
  for (int i = 0; i < count; ++i) {
    const Run& run = runs[static_cast<std::size_t>(i)];
    const double share = all.weight > 0 ? run.weight / all.weight : 1.0 / count;
    mean += share * value_of(run.level);
    square += share * value_of(run.level) * value_of(run.level);
    levels[static_cast<std::size_t>(i)] = run.level;
  }
  normed = levels;
  const double variance = square - mean * mean;
  if (all.weight > 0 && variance > 0) {
    const double true_mean = all.product / all.weight;
    const double true_variance = std::max(0.0, all.square / all.weight - true_mean * true_mean);
    const double scale = std::sqrt(true_variance / variance);
    for (int i = 0; i < count; ++i) {
      const double value = true_mean + (value_of(levels[static_cast<std::size_t>(i)]) - mean) * scale;
      normed[static_cast<std::size_t>(i)] = std::clamp(static_cast<int>(std::lround(step_of(value))), 0, kSteps);
    }
    keep_apart(normed, count);
  }
  return {bytes_of(levels), bytes_of(normed)};
}

LevelTables LevelFit::tables() const {
  Prefix prefix{};
  for (std::size_t i = 0; i < points_.size(); ++i) {
    prefix[i + 1] = {prefix[i].weight + points_[i].weight, prefix[i].product + points_[i].product,
                     prefix[i].square + points_[i].square};
  }
  // best[n][end]: the least error of n + 1 runs over the points 0..end; first[n][end]: where the last run starts.
  std::vector<std::array<double, kPoints>> best(kMostLevels);
  std::vector<std::array<int, kPoints>> first(kMostLevels);
  for (int end = 0; end < kPoints; ++end) best[0][static_cast<std::size_t>(end)] = run_of(prefix, 0, end).error;
  for (std::size_t n = 1; n < kMostLevels; ++n) {
    best[n].fill(std::numeric_limits<double>::infinity());
    for (int end = static_cast<int>(n); end < kPoints; ++end) {
      const auto at = static_cast<std::size_t>(end);
      for (int start = end; start >= static_cast<int>(n); --start) {
        const double error = best[n - 1][static_cast<std::size_t>(start - 1)] + run_of(prefix, start, end).error;
        if (!(error < best[n][at])) continue;
        best[n][at] = error;
        first[n][at] = start;
      }
    }
  }
  LevelTables tables;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const int count = 4 << t;
    std::array<Run, kMostLevels> runs{};
    int end = kSteps;
    for (int i = count - 1; i >= 0; --i) {
      const int start = i > 0 ? first[static_cast<std::size_t>(i)][static_cast<std::size_t>(end)] : 0;
      runs[static_cast<std::size_t>(i)] = run_of(prefix, start, end);
      end = start - 1;
    }
    if (!(prefix.back().weight > 0)) {
      for (int i = 0; i < count; ++i) {
        runs[static_cast<std::size_t>(i)].level = (2 * i * kSteps + count - 1) / (2 * (count - 1));
      }
    }
    tables[t] = normed(prefix, runs, count);
  }
  return tables;
}

}  // namespace kvant::kvquant
