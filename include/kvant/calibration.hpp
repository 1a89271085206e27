// What `kvant calibrate` learns of a model for the kvquant recipe: levels per layer for keys and for values, and the
// range of each key channel (KVQuant, arXiv 2401.18079, section 3.3 and appendix D).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvant {

// Levels for codes of 2, 3 and 4 bits, ascending, as steps 0..254 from the minimum to the maximum of a vector's range.
using LevelTables = std::array<std::array<std::uint8_t, 16>, 3>;

struct LayerCalibration {
  int layer = 0;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  LevelTables keys{};
  LevelTables values{};
  // [kv_heads][key_dim]: the range of each key channel without its outliers.
  std::vector<float> key_min;
  std::vector<float> key_max;

  bool operator==(const LayerCalibration&) const = default;
};

struct Calibration {
  std::string model;                     // general.name of the GGUF file
  std::string architecture;              // general.architecture
  std::string text;                      // name of the text file, for the reader
  double outliers = 0;                   // share of each vector that the ranges leave out, half of it at each end
  std::int64_t tokens = 0;               // per layer, sinks left out
  bool weighted = false;                 // with Fisher weights
  std::vector<LayerCalibration> layers;  // ascending by layer

  bool operator==(const Calibration&) const = default;
  // Throws Error(invalid_argument) when there is no such layer.
  const LayerCalibration& at(int layer) const;
};

// Rows of one layer, dense: keys [tokens][kv_heads][key_dim], values [tokens][kv_heads][value_dim], and weights of the
// same shapes (squares of the loss gradient) or null.
struct CalibrationRows {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  std::int64_t tokens = 0;
  const float* keys = nullptr;
  const float* values = nullptr;
  const float* key_weights = nullptr;
  const float* value_weights = nullptr;
};

// Ranges and levels of a layer. A vector (a key channel over all tokens, a value token over all heads) leaves out its
// ceil(outliers / 2 * n) smallest and largest values; what remains, moved to [-1, 1], is divided among the levels by
// 1-D k-means with the weight s^2 * F of paper eq. 7, s being half the vector's range and F the given weight or 1.
// Throws Error(invalid_argument) when there are fewer than two tokens.
LayerCalibration calibrate_layer(int layer, const CalibrationRows& rows, double outliers);

// The file (docs/format.md). Reading throws Error(bad_format) for anything that is not such a file.
std::vector<std::byte> to_bytes(const Calibration& calibration);
Calibration read_calibration(std::span<const std::byte> bytes);
// The file at a path; each is read once while it stays as it is. Throws Error(invalid_argument) when it cannot be read.
std::shared_ptr<const Calibration> load_calibration(const std::string& path);

}  // namespace kvant
