// Tiles with levels and ranges from a calibration file.
#include "base/checked.hpp"
#include "kvant/calibration.hpp"
#include "methods/method.hpp"

namespace kvant::catalog {
namespace {

void check_geometry(const Recipe& recipe, const CacheShape& shape, const LayerCalibration& layer) {
  if (layer.kv_heads == shape.kv_heads && layer.key_dim == shape.key_dim && layer.value_dim == shape.value_dim) return;
  const auto text = [](int heads, int key, int value) {
    return std::to_string(heads) + " KV heads of " + std::to_string(key) + " and " + std::to_string(value) +
           " channels";
  };
  base::fail(ErrorCode::invalid_argument, "calibration file '" + recipe.file + "' has " +
                                              text(layer.kv_heads, layer.key_dim, layer.value_dim) + " in layer " +
                                              std::to_string(recipe.layer) + "; the cache has " +
                                              text(shape.kv_heads, shape.key_dim, shape.value_dim));
}

template <typename Options>
void check_share(const Recipe& recipe, const char* name, const Options& options, const Calibration& calibration) {
  if (options.outliers == calibration.outliers) return;
  bad_value(name, number_text(options.outliers),
            number_text(calibration.outliers) + ", which calibration file '" + recipe.file + "' was made with");
}

std::vector<std::uint8_t> table_of(const LevelTables& tables, int bits) {
  const auto& table = tables[static_cast<std::size_t>(bits - 2)];
  return {table.begin(), table.end()};
}

}  // namespace

void calibrate(const Recipe& recipe, const CacheShape& shape, TileSpec& keys, TileSpec& values) {
  if (recipe.file.empty()) return;
  const auto calibration = load_calibration(recipe.file);
  const LayerCalibration& layer = calibration->at(recipe.layer);
  check_geometry(recipe, shape, layer);
  if (const auto* options = std::get_if<KvquantKeys>(&recipe.key)) {
    check_share(recipe, "outliers", *options, *calibration);
    keys.table = table_of(layer.keys, options->bits);
    keys.range_min = layer.key_min;
    keys.range_max = layer.key_max;
  }
  if (const auto* options = std::get_if<KvquantValues>(&recipe.value)) {
    check_share(recipe, "voutliers", *options, *calibration);
    values.table = table_of(layer.values, options->bits);
  }
}

void check_file(const Recipe& recipe) {
  if (recipe.file.empty()) {
    if (recipe.layer != 0) bad_value("layer", std::to_string(recipe.layer), "0 without file=");
    return;
  }
  if (!side_of(recipe.key).calibrated && !side_of(recipe.value).calibrated) {
    bad_value("file", recipe.file, "only with kvquant keys or values");
  }
  if (recipe.file.find_first_of(",; \t\n") != std::string::npos) {
    bad_value("file", recipe.file, "a path without commas, semicolons and blanks");
  }
  load_calibration(recipe.file);
}

std::string describe_levels(const Recipe& recipe) {
  const bool keys = side_of(recipe.key).calibrated;
  if (!keys && !side_of(recipe.value).calibrated) return {};
  if (recipe.file.empty()) return "not calibrated: fixed normal-float codebook, ranges of the page";
  const auto calibration = load_calibration(recipe.file);
  return "calibrated on " + std::to_string(calibration->tokens) + " tokens of '" + calibration->model + "'" +
         (calibration->weighted ? ", Fisher weights" : ", without Fisher weights");
}

}  // namespace kvant::catalog
