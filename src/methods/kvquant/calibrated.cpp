// Recipes with a calibration file: what they are checked for, and what their tiles get from it.
#include "base/checked.hpp"
#include "kvant/calibration.hpp"
#include "methods/method.hpp"

namespace kvant::catalog {
namespace {

constexpr std::size_t kLongestPath = 1024;

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
void check_share(const Recipe& recipe, const char* name, const Options* options, const Calibration& calibration) {
  if (options == nullptr || options->outliers == calibration.outliers) return;
  bad_value(name, number_text(options->outliers),
            number_text(calibration.outliers) + ", which calibration file '" + recipe.file + "' was made with");
}

void check_rope(const Recipe& recipe, const Calibration& calibration) {
  const auto* keys = std::get_if<KvquantKeys>(&recipe.key);
  if (keys == nullptr || keys->before_rope == calibration.before_rope) return;
  const auto text = [](bool before) { return std::string(before ? "before" : "after"); };
  bad_value("rope", text(keys->before_rope),
            text(calibration.before_rope) + ", which calibration file '" + recipe.file + "' was made with");
}

void set_levels(const LevelTables& tables, int bits, bool qnorm, TileSpec& spec) {
  const LevelTable& table = tables[static_cast<std::size_t>(bits - 2)];
  spec.table.assign(table.levels.begin(), table.levels.end());
  if (!qnorm) return;
  spec.coding_table = spec.table;
  spec.table.assign(table.normed.begin(), table.normed.end());
}

template <typename Options>
void check_qnorm(const char* name, const Options* options) {
  if (options != nullptr && options->qnorm) bad_value(name, "1", "0 without file=");
}

}  // namespace

bool may_be_calibrated(const Recipe& recipe) {
  return side_of(recipe.key).calibrated || side_of(recipe.value).calibrated;
}

void find_digest(Recipe& recipe) {
  if (recipe.file.empty() || recipe.digest != 0) return;
  recipe.digest = calibration_digest(*load_calibration(recipe.file));
}

void check_file(const Recipe& recipe) {
  if (recipe.file.empty()) {
    if (recipe.layer != -1) bad_value("layer", std::to_string(recipe.layer), "only with file=");
    if (recipe.digest != 0) bad_value("digest", "given", "only with file=");
    check_qnorm("qnorm", std::get_if<KvquantKeys>(&recipe.key));
    check_qnorm("vqnorm", std::get_if<KvquantValues>(&recipe.value));
    return;
  }
  if (!may_be_calibrated(recipe)) bad_value("file", recipe.file, "only with kvquant keys or values");
  if (recipe.file.size() > kLongestPath || recipe.file.find_first_of(",; \t\r\n") != std::string::npos) {
    bad_value("file", recipe.file, "a path of up to 1024 characters without comma, semicolon and blank");
  }
  if (recipe.layer < -1 || recipe.layer > 9999) bad_value("layer", std::to_string(recipe.layer), "0 to 9999");
  const auto calibration = load_calibration(recipe.file, recipe.digest);
  check_share(recipe, "outliers", std::get_if<KvquantKeys>(&recipe.key), *calibration);
  check_share(recipe, "voutliers", std::get_if<KvquantValues>(&recipe.value), *calibration);
  check_rope(recipe, *calibration);
}

void calibrate(const Recipe& recipe, const CacheShape& shape, TileSpec& keys, TileSpec& values) {
  if (recipe.file.empty()) return;
  if (recipe.layer < 0) {
    base::fail(ErrorCode::invalid_argument,
               "recipe key 'layer' is not given; with file= a cache needs to know which layer of the model it is");
  }
  const auto calibration = load_calibration(recipe.file, recipe.digest);
  const LayerCalibration& layer = calibration->at(recipe.layer);
  check_geometry(recipe, shape, layer);
  if (const auto* options = std::get_if<KvquantKeys>(&recipe.key)) {
    set_levels(layer.keys, options->bits, options->qnorm, keys);
    keys.range_min = layer.key_min;
    keys.range_max = layer.key_max;
  }
  if (const auto* options = std::get_if<KvquantValues>(&recipe.value)) {
    set_levels(layer.values, options->bits, options->qnorm, values);
  }
}

// Below this the ranges of key channels are those of a few tokens: 95 ruined a model (docs/results.md), 16384 did not.
constexpr std::int64_t kFewTokens = 2048;

std::string describe_levels(const Recipe& recipe) {
  if (!may_be_calibrated(recipe)) return {};
  if (recipe.file.empty()) return "kvquant is not calibrated: fixed normal-float codebook, ranges of the page";
  const auto calibration = load_calibration(recipe.file, recipe.digest);
  return "kvquant is calibrated on " + std::to_string(calibration->tokens) + " tokens of '" + calibration->text +
         "' with model '" + calibration->model + "', " + (calibration->weighted ? "with" : "without") +
         " Fisher weights" +
         (calibration->tokens < kFewTokens
              ? "; fewer than " + std::to_string(kFewTokens) + " tokens may make the model worse than none"
              : "");
}

}  // namespace kvant::catalog
