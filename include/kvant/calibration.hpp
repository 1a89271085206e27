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

// Levels for codes of one width, strictly ascending, as steps 0..254 from the minimum to the maximum of a vector's
// range; entries that no code reaches are 0.
struct LevelTable {
  std::array<std::uint8_t, 16> levels{};
  // The same moved and stretched so that coded values have the mean and the standard deviation of the values
  // themselves, for decoding only (Q-Norm, in the paper's code).
  std::array<std::uint8_t, 16> normed{};

  bool operator==(const LevelTable&) const = default;
};
using LevelTables = std::array<LevelTable, 3>;  // for 2, 3 and 4 bits

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
  std::string text;                      // name of the text file, for people
  double outliers = 0;                   // share of each vector that the ranges leave out, half of it at each end
  std::int64_t tokens = 0;               // of each layer, those at position 0 left out
  bool weighted = false;                 // with Fisher weights
  std::vector<LayerCalibration> layers;  // ascending by layer
  bool before_rope = false;              // ranges and levels of the keys are those before RoPE

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
// ceil(outliers / 2 * n) smallest and largest values; what remains, moved to [-1, 1], is divided among the levels so
// that the sum of weight * error^2 is the least that levels on the grid of 254 steps can give (1-D k-means, solved
// exactly). The weight is s^2 * F of paper eq. 7: s is half the vector's range, F the given weight or 1. Throws
// Error(invalid_argument) when there are fewer than two tokens, a shape or share is impossible or a weight is negative,
// and Error(not_finite) for rows or weights that are not finite.
LayerCalibration calibrate_layer(int layer, const CalibrationRows& rows, double outliers);

// The file (docs/format.md). Reading throws Error(bad_format) for anything that is not such a file.
std::vector<std::byte> to_bytes(const Calibration& calibration);
Calibration read_calibration(std::span<const std::byte> bytes);
// XXH64 of what to_bytes writes: names the contents in a recipe's text.
std::uint64_t calibration_digest(const Calibration& calibration);

// Reads the file at a path. It stays in memory, and recipes with its digest use it whatever becomes of the file. Throws
// Error(invalid_argument) when it cannot be read or is no such file.
std::shared_ptr<const Calibration> load_calibration(const std::string& path);
// The calibration with that digest: one that was loaded before, else the file's. Throws Error(invalid_argument) when
// the file holds another one.
std::shared_ptr<const Calibration> load_calibration(const std::string& path, std::uint64_t digest);

}  // namespace kvant
