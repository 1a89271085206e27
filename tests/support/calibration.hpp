// A small calibration, written to a file that recipes can name.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kvant/calibration.hpp"
#include "kvant/page_store.hpp"
#include "support/oracle.hpp"

namespace kvant::testing {

// A file that goes when the test does.
class CalibrationFile {
 public:
  explicit CalibrationFile(const Calibration& calibration, const std::string& name = "calibration")
      : path_((std::filesystem::temp_directory_path() / ("kvant-" + std::to_string(getpid()) + "-" + name)).string()) {
    write(to_bytes(calibration));
  }
  ~CalibrationFile() { std::filesystem::remove(path_); }
  CalibrationFile(const CalibrationFile&) = delete;
  CalibrationFile& operator=(const CalibrationFile&) = delete;

  void write(const std::vector<std::byte>& bytes) const {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  const std::string& path() const { return path_; }
  // ",file=...,layer=N"
  std::string options(int layer) const { return ",file=" + path_ + ",layer=" + std::to_string(layer); }

 private:
  std::string path_;
};

// Calibration of layers 0 and 2 on random rows of the shape.
inline Calibration make_calibration(const CacheShape& shape, double outliers, std::int64_t tokens = 400) {
  Calibration calibration{"test model", "llama", "text.txt", outliers, tokens, false, {}};
  for (const int layer : {0, 2}) {
    const auto seed = static_cast<std::uint32_t>(40 + layer);
    const auto keys = random_keys(tokens, shape.kv_heads, shape.key_dim, seed);
    const auto values = random_floats(static_cast<std::size_t>(tokens * shape.kv_heads * shape.value_dim), seed);
    const CalibrationRows rows{shape.kv_heads, shape.key_dim, shape.value_dim, tokens,
                               keys.data(),    values.data(), nullptr,         nullptr};
    calibration.layers.push_back(calibrate_layer(layer, rows, outliers));
  }
  return calibration;
}

}  // namespace kvant::testing
