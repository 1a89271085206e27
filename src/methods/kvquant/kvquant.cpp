#include "methods/kvquant/kvquant.hpp"

#include "base/checked.hpp"

namespace kvant::catalog {
namespace {

constexpr double kMostOutliers = 0.1;
constexpr int kLargest = 127;  // the end level; a table holds level + 127

// The upper halves of the Lloyd-Max levels of a normal distribution with 4, 8 and 16 levels (Max 1960, table I),
// scaled to end at 127: 1.510, 2.152 and 2.733 standard deviations.
std::vector<int> normal_levels(int bits) {
  if (bits == 2) return {38, 127};
  if (bits == 3) return {14, 45, 79, 127};
  return {6, 18, 31, 44, 58, 75, 96, 127};
}

// Both halves as steps of the grid from 0 to 254; entries that no code reaches are 0.
std::vector<std::uint8_t> normal_table(int bits) {
  const std::vector<int> upper = normal_levels(bits);
  std::vector<std::uint8_t> table(16);
  for (std::size_t i = 0; i < upper.size(); ++i) {
    table[upper.size() + i] = static_cast<std::uint8_t>(kLargest + upper[i]);
    table[upper.size() - 1 - i] = static_cast<std::uint8_t>(kLargest - upper[i]);
  }
  return table;
}

template <typename Options, typename Part>
void add_options(Side<Part>& side, const char* bits, const char* outliers, const char* qnorm) {
  side.defaults = Options();
  side.options = {bits, outliers, qnorm};
  side.bits = [](const Part& part) { return std::to_string(std::get<Options>(part).bits); };
  side.calibrated = true;
}

template <typename Options>
bool set_option(Options& options, std::string_view bits, std::string_view outliers, std::string_view qnorm,
                std::string_view option, std::string_view value) {
  if (option == bits) {
    options.bits = read_int(option, value, 2, 4);
  } else if (option == outliers) {
    options.outliers = read_number(option, value, 0, kMostOutliers);
  } else if (option == qnorm) {
    options.qnorm = read_int(option, value, 0, 1) != 0;
  } else {
    return false;
  }
  return true;
}

template <typename Options>
void check_options(const Options& options, const char* bits, const char* outliers) {
  check_number(bits, options.bits, 2, 4);
  check_number(outliers, options.outliers, 0, kMostOutliers);
}

template <typename Options>
std::string options_text(const Options& options, const std::string& outliers, const std::string& qnorm) {
  return outliers + "=" + number_text(options.outliers) + (options.qnorm ? "," + qnorm + "=1" : "");
}

template <typename Options>
void fill_tile(const Options& options, TileSpec& spec) {
  spec.planes = uniform_planes(options.bits, spec.depth);
  spec.table = normal_table(options.bits);
  spec.outliers = options.outliers;
}

KeySide keys() {
  KeySide side;
  add_options<KvquantKeys>(side, "k", "outliers", "qnorm");
  side.options.emplace_back("rope");
  side.set = [](KeyRecipe& part, std::string_view option, std::string_view value) {
    auto& options = std::get<KvquantKeys>(part);
    if (option != "rope") return set_option(options, "k", "outliers", "qnorm", option, value);
    if (value != "before" && value != "after") bad_value(option, value, "before or after");
    options.before_rope = value == "before";
    return true;
  };
  side.options_text = [](const KeyRecipe& part) {
    const auto& options = std::get<KvquantKeys>(part);
    return options_text(options, "outliers", "qnorm") + (options.before_rope ? ",rope=before" : "");
  };
  side.before_rope = [](const KeyRecipe& part) { return std::get<KvquantKeys>(part).before_rope; };
  side.remark = [](const KeyRecipe& part) {
    return std::string(std::get<KvquantKeys>(part).before_rope
                           ? "keys are stored before RoPE: scores are float32, of pages decoded and rotated"
                           : "");
  };
  side.validate = [](const KeyRecipe& part) { check_options(std::get<KvquantKeys>(part), "k", "outliers"); };
  side.tile = [](const KeyRecipe& part, TileSpec& spec) { fill_tile(std::get<KvquantKeys>(part), spec); };
  return side;
}

ValueSide values() {
  ValueSide side;
  add_options<KvquantValues>(side, "v", "voutliers", "vqnorm");
  side.set = [](ValueRecipe& part, std::string_view option, std::string_view value) {
    return set_option(std::get<KvquantValues>(part), "v", "voutliers", "vqnorm", option, value);
  };
  side.options_text = [](const ValueRecipe& part) {
    return options_text(std::get<KvquantValues>(part), "voutliers", "vqnorm");
  };
  side.validate = [](const ValueRecipe& part) { check_options(std::get<KvquantValues>(part), "v", "voutliers"); };
  side.tile = [](const ValueRecipe& part, TileSpec& spec) {
    fill_tile(std::get<KvquantValues>(part), spec);
    spec.shared_grid = true;
  };
  return side;
}

}  // namespace

Method kvquant() {
  Recipe recipe;
  recipe.key = KvquantKeys();
  recipe.value = KvquantValues();
  recipe.sink = 1;
  return {"kvquant",
          "KVQuant: non-uniform levels, two-sided outliers kept apart; calibrated with file= (kvant calibrate)", recipe,
          keys(), values()};
}

}  // namespace kvant::catalog
