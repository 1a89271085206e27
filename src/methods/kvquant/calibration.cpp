// Calibration of a layer, and the file that keeps it.
#include "kvant/calibration.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>

#include "base/byte_io.hpp"
#include "methods/kvquant/codebook.hpp"

namespace kvant {
namespace {

using kvquant::Codebook;

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'C', 'A', 'L'};
constexpr std::uint32_t kVersion = 1;
constexpr int kMostExtent = 1024;

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
                Codebook& book) {
  const double mid = (static_cast<double>(range.min) + static_cast<double>(range.max)) / 2;
  const double half = (static_cast<double>(range.max) - static_cast<double>(range.min)) / 2;
  if (!(half > 0)) return;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = x[i * stride];
    if (value < range.min || value > range.max) continue;
    const double fisher = weights != nullptr ? static_cast<double>(weights[i * stride]) : 1.0;
    book.add((static_cast<double>(value) - mid) / half, half * half * fisher);
  }
}

LevelTables tables_of(const Codebook& book) {
  return {book.levels(2), book.levels(3), book.levels(4)};
}

bool is_ascending(const LevelTables& tables) {
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto end = tables[t].begin() + (4 << t);
    if (std::adjacent_find(tables[t].begin(), end, std::greater_equal<>()) != end || *(end - 1) > 254) return false;
  }
  return true;
}

LayerCalibration read_layer(base::ByteReader& in) {
  LayerCalibration layer;
  for (int* field : {&layer.layer, &layer.kv_heads, &layer.key_dim, &layer.value_dim}) *field = in.get<std::int32_t>();
  for (const int extent : {layer.kv_heads, layer.key_dim, layer.value_dim}) {
    if (extent < 1 || extent > kMostExtent) in.bad("a layer has heads of an impossible size");
  }
  layer.keys = in.get<LevelTables>();
  layer.values = in.get<LevelTables>();
  if (!is_ascending(layer.keys) || !is_ascending(layer.values)) in.bad("levels are not ascending");
  const auto channels = static_cast<std::size_t>(layer.kv_heads) * static_cast<std::size_t>(layer.key_dim);
  for (std::vector<float>* ends : {&layer.key_min, &layer.key_max}) {
    const std::byte* data = in.take(channels * sizeof(float));
    ends->resize(channels);
    std::memcpy(ends->data(), data, channels * sizeof(float));
  }
  for (std::size_t i = 0; i < channels; ++i) {
    if (!(layer.key_min[i] <= layer.key_max[i]) || !std::isfinite(layer.key_min[i]) ||
        !std::isfinite(layer.key_max[i])) {
      in.bad("a key channel has an impossible range");
    }
  }
  return layer;
}

}  // namespace

const LayerCalibration& Calibration::at(int layer) const {
  for (const LayerCalibration& found : layers) {
    if (found.layer == layer) return found;
  }
  base::fail(ErrorCode::invalid_argument, "calibration of '" + model + "' has no layer " + std::to_string(layer) +
                                              "; it has " + std::to_string(layers.size()) + " layers");
}

LayerCalibration calibrate_layer(int layer, const CalibrationRows& rows, double outliers) {
  if (rows.tokens < 2) {
    base::fail(ErrorCode::invalid_argument,
               "calibration of layer " + std::to_string(layer) + " has " + std::to_string(rows.tokens) + " tokens");
  }
  LayerCalibration result{layer, rows.kv_heads, rows.key_dim, rows.value_dim, {}, {}, {}, {}};
  Codebook keys, values;
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
  result.keys = tables_of(keys);
  result.values = tables_of(values);
  return result;
}

std::vector<std::byte> to_bytes(const Calibration& calibration) {
  base::ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  for (const std::string* text : {&calibration.model, &calibration.architecture, &calibration.text}) {
    out.put_text(*text);
  }
  out.put(calibration.outliers);
  out.put(calibration.tokens);
  out.put(static_cast<std::uint8_t>(calibration.weighted));
  out.put(static_cast<std::uint32_t>(calibration.layers.size()));
  for (const LayerCalibration& layer : calibration.layers) {
    for (const int field : {layer.layer, layer.kv_heads, layer.key_dim, layer.value_dim}) {
      out.put(static_cast<std::int32_t>(field));
    }
    out.put(layer.keys);
    out.put(layer.values);
    for (const std::vector<float>* ends : {&layer.key_min, &layer.key_max}) {
      out.put_bytes(reinterpret_cast<const std::byte*>(ends->data()), ends->size() * sizeof(float));
    }
  }
  return out.finish();
}

Calibration read_calibration(std::span<const std::byte> bytes) {
  base::ByteReader in(bytes, "calibration file");
  if (std::memcmp(in.take(sizeof kMagic), kMagic, sizeof kMagic) != 0) in.bad("does not start with KVANTCAL");
  const auto version = in.get<std::uint32_t>();
  if (version != kVersion) in.bad("is version " + std::to_string(version) + "; this build reads version 1");
  in.check_hash(bytes);
  Calibration calibration;
  for (std::string* text : {&calibration.model, &calibration.architecture, &calibration.text}) {
    *text = in.get_text(4096);
  }
  calibration.outliers = in.get<double>();
  if (!(calibration.outliers >= 0 && calibration.outliers < 1)) in.bad("has an impossible share of outliers");
  calibration.tokens = in.get<std::int64_t>();
  calibration.weighted = in.get<std::uint8_t>() != 0;
  const auto count = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) {
    calibration.layers.push_back(read_layer(in));
    if (i > 0 && calibration.layers[i].layer <= calibration.layers[i - 1].layer) in.bad("layers are not ascending");
  }
  if (in.left() != 0) in.bad("has " + std::to_string(in.left()) + " bytes too many");
  return calibration;
}

std::shared_ptr<const Calibration> load_calibration(const std::string& path) {
  struct Known {
    timespec changed{};
    off_t size = 0;
    std::shared_ptr<const Calibration> calibration;
  };
  static std::mutex mutex;
  static std::map<std::string, Known> files;
  struct stat now {};
  if (stat(path.c_str(), &now) != 0) {
    base::fail(ErrorCode::invalid_argument, "calibration file '" + path + "' cannot be read");
  }
  const std::lock_guard lock(mutex);
  Known& known = files[path];
  const bool same = known.size == now.st_size && known.changed.tv_sec == now.st_mtim.tv_sec &&
                    known.changed.tv_nsec == now.st_mtim.tv_nsec;
  if (known.calibration && same) return known.calibration;
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.good() && !file.eof()) {
    base::fail(ErrorCode::invalid_argument, "calibration file '" + path + "' cannot be read");
  }
  try {
    known.calibration = std::make_shared<const Calibration>(read_calibration(std::as_bytes(std::span(data))));
  } catch (const Error& error) {
    base::fail(error.code(), std::string(error.what()) + " ('" + path + "')");
  }
  known.changed = now.st_mtim;
  known.size = now.st_size;
  return known.calibration;
}

}  // namespace kvant
