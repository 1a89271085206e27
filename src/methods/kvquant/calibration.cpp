// Calibration of a layer: ranges and levels from its rows.
#include "kvant/calibration.hpp"

#include <algorithm>
#include <cmath>

#include "base/checked.hpp"
#include "methods/kvquant/levels.hpp"

namespace kvant {
namespace {

using kvquant::LevelFit;

struct Range {
  float min = 0;
  float max = 0;
};

// Of all but the ceil(share / 2 * n) smallest and largest; reorders the values.
Range inner_range(std::vector<float>& values, double share) {
  const auto n = values.size();
  auto outside = static_cast<std::size_t>(std::ceil(share / 2 * static_cast<double>(n) - 1e-9));
  outside = std::min(outside, (n - 1) / 2);
  const auto at = [&](std::size_t i) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(i), values.end());
    return values[i];
  };
  return {at(outside), at(n - 1 - outside)};
}

// The vector's inner values, moved to [-1, 1], with the weights of paper eq. 7.
void add_vector(const float* x, const float* weights, std::int64_t count, std::int64_t stride, Range range,
                LevelFit& fit) {
  const double middle = (static_cast<double>(range.min) + static_cast<double>(range.max)) / 2;
  const double half = (static_cast<double>(range.max) - static_cast<double>(range.min)) / 2;
  if (!(half > 0)) return;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = x[i * stride];
    if (value < range.min || value > range.max) continue;
    const double fisher = weights != nullptr ? static_cast<double>(weights[i * stride]) : 1.0;
    fit.add((static_cast<double>(value) - middle) / half, half * half * fisher);
  }
}

void check_numbers(const char* what, int layer, const float* values, std::int64_t count, bool weights) {
  if (values == nullptr && weights) return;
  const std::string name = std::string(what) + " of layer " + std::to_string(layer);
  if (values == nullptr) base::fail(ErrorCode::invalid_argument, name + " have no data");
  for (std::int64_t i = 0; i < count; ++i) {
    const std::string value = std::isfinite(values[i]) ? "" : std::to_string(values[i]);
    if (!value.empty()) {
      base::fail(ErrorCode::not_finite, name + " have " + value + " at value " + std::to_string(i));
    }
    if (weights && values[i] < 0) {
      base::fail(ErrorCode::invalid_argument, name + " have " + std::to_string(values[i]) + " at value " +
                                                  std::to_string(i) + "; allowed: 0 and more");
    }
  }
}

void check_rows(int layer, const CalibrationRows& rows, double outliers) {
  const auto refuse = [&](const std::string& what) {
    base::fail(ErrorCode::invalid_argument, "calibration of layer " + std::to_string(layer) + ": " + what);
  };
  if (layer < 0) refuse("allowed are layers from 0");
  if (rows.tokens < 2) refuse(std::to_string(rows.tokens) + " tokens; allowed: 2 and more");
  for (const int extent : {rows.kv_heads, rows.key_dim, rows.value_dim}) {
    if (extent < 1 || extent > 1024) refuse("an extent is " + std::to_string(extent) + "; allowed: 1 to 1024");
  }
  if (!(outliers >= 0 && outliers < 1)) refuse("outliers is " + std::to_string(outliers) + "; allowed: 0 to below 1");
  const std::int64_t keys = rows.tokens * rows.kv_heads * rows.key_dim;
  const std::int64_t values = rows.tokens * rows.kv_heads * rows.value_dim;
  check_numbers("keys", layer, rows.keys, keys, false);
  check_numbers("values", layer, rows.values, values, false);
  check_numbers("weights of the keys", layer, rows.key_weights, keys, true);
  check_numbers("weights of the values", layer, rows.value_weights, values, true);
}

}  // namespace

LayerCalibration calibrate_layer(int layer, const CalibrationRows& rows, double outliers) {
  check_rows(layer, rows, outliers);
  LayerCalibration result{layer, rows.kv_heads, rows.key_dim, rows.value_dim, {}, {}, {}, {}};
  LevelFit keys, values;
  const std::int64_t channels = std::int64_t{rows.kv_heads} * rows.key_dim;
  std::vector<float> vector(static_cast<std::size_t>(rows.tokens));
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t t = 0; t < rows.tokens; ++t) vector[static_cast<std::size_t>(t)] = rows.keys[t * channels + c];
    const Range range = inner_range(vector, outliers);
    result.key_min.push_back(range.min);
    result.key_max.push_back(range.max);
    const float* weights = rows.key_weights != nullptr ? rows.key_weights + c : nullptr;
    add_vector(rows.keys + c, weights, rows.tokens, channels, range, keys);
  }
  const std::int64_t width = std::int64_t{rows.kv_heads} * rows.value_dim;
  for (std::int64_t t = 0; t < rows.tokens; ++t) {
    const float* row = rows.values + t * width;
    vector.assign(row, row + width);
    const float* weights = rows.value_weights != nullptr ? rows.value_weights + t * width : nullptr;
    add_vector(row, weights, width, 1, inner_range(vector, outliers), values);
  }
  result.keys = keys.tables();
  result.values = values.tables();
  return result;
}

}  // namespace kvant
