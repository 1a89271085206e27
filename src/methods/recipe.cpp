// The text form of one recipe.
#include "kvant/recipe.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/checked.hpp"
#include "methods/method.hpp"

namespace kvant {
namespace {

using catalog::bad_value;
using Option = std::pair<std::string_view, std::string_view>;

constexpr std::size_t kDigestDigits = 16;
const std::vector<std::string> common_options = {"sink", "window", "page", "x"};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// "key=value,key=value" as a list; the same key twice is an error.
std::vector<Option> split_options(std::string_view text) {
  std::vector<Option> options;
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view pair = text.substr(0, comma);
    const std::size_t equals = pair.find('=');
    if (equals == std::string_view::npos) {
      base::fail(ErrorCode::invalid_argument, "recipe part '" + std::string(pair) + "' is not of the form key=value");
    }
    const std::string_view key = pair.substr(0, equals);
    for (const Option& earlier : options) {
      if (earlier.first != key) continue;
      base::fail(ErrorCode::invalid_argument, "recipe key '" + std::string(key) + "' is given twice");
    }
    options.emplace_back(key, pair.substr(equals + 1));
    if (comma == std::string_view::npos) return options;
    text = text.substr(comma + 1);
  }
}

std::vector<std::string> keys_of(const Recipe& recipe) {
  std::vector<std::string> keys = catalog::side_of(recipe.key).options;
  const std::vector<std::string>& values = catalog::side_of(recipe.value).options;
  for (const std::string& name : values) {  // both sides of zipcache have the options of a page's classes
    if (std::find(keys.begin(), keys.end(), name) == keys.end()) keys.push_back(name);
  }
  if (recipe.quantizes()) keys.insert(keys.end(), common_options.begin(), common_options.end());
  if (catalog::may_be_calibrated(recipe)) keys.insert(keys.end(), {"file", "digest", "layer"});
  return keys;
}

std::uint64_t read_digest(std::string_view value) {
  std::uint64_t digest = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), digest, 16);
  if (value.size() != kDigestDigits || error != std::errc() || end != value.data() + value.size()) {
    bad_value("digest", value, "16 hexadecimal digits");
  }
  return digest;
}

std::string digest_text(std::uint64_t digest) {
  char digits[kDigestDigits];
  const char* const end = std::to_chars(digits, digits + sizeof digits, digest, 16).ptr;
  const std::string text(static_cast<const char*>(digits), end);
  return std::string(kDigestDigits - text.size(), '0') + text;
}

bool set_calibration(Recipe& recipe, std::string_view key, std::string_view value) {
  if (key == "file") {
    recipe.file = value;
  } else if (key == "digest") {
    recipe.digest = read_digest(value);
  } else if (key == "layer") {
    recipe.layer = catalog::read_int(key, value, 0, 9999);
  } else {
    return false;
  }
  return true;
}

bool set_common(Recipe& recipe, std::string_view key, std::string_view value) {
  if (!recipe.quantizes()) return false;
  if (key == "sink") {
    recipe.sink = catalog::read_int(key, value, 0, 256);
  } else if (key == "window") {
    recipe.window = catalog::read_int(key, value, 0, 65536);
  } else if (key == "page") {
    recipe.page = catalog::read_int(key, value, 32, 256);
  } else if (key == "x") {
    recipe.x_bits = catalog::read_int(key, value, 8, 16);
  } else {
    return catalog::may_be_calibrated(recipe) && set_calibration(recipe, key, value);
  }
  return true;
}

void set_options(const std::string& name, Recipe& recipe, const std::vector<Option>& options) {
  for (const auto& [key, value] : options) {
    const bool of_keys = catalog::side_of(recipe.key).set(recipe.key, key, value);
    const bool of_values = catalog::side_of(recipe.value).set(recipe.value, key, value);
    if (of_keys || of_values) continue;
    if (set_common(recipe, key, value)) continue;
    base::fail(ErrorCode::invalid_argument, "recipe key '" + std::string(key) + "' does not exist in method '" + name +
                                                "'; choices: " + join(keys_of(recipe)));
  }
}

// Which methods may stand on a side.
template <typename AnySide>
std::string choices(std::optional<AnySide> catalog::Method::*side) {
  std::vector<std::string> names;
  for (const catalog::Method& method : catalog::list()) {
    if (method.*side) names.push_back(method.name);
  }
  return join(names);
}

// "METHOD" or "METHOD:BITS" behind k= or v=.
template <typename AnySide, typename Part>
void read_side(std::string_view key, std::string_view text, std::optional<AnySide> catalog::Method::*member,
               Part& part) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const std::vector<catalog::Method>& list = catalog::list();
  const auto method = std::find_if(list.begin(), list.end(), [&](const auto& m) { return m.name == name; });
  if (method == list.end() || !((*method).*member)) bad_value(key, text, "METHOD or METHOD:BITS of " + choices(member));
  const AnySide& side = *((*method).*member);
  part = side.defaults;
  if (colon == std::string_view::npos) return;
  if (!side.set(part, key, text.substr(colon + 1))) bad_value(key, text, method->name + " without bits");
}

// "k=METHOD:BITS,v=METHOD:BITS,option=value,...", in any order.
Recipe parse_sides(std::string_view text) {
  std::vector<Option> options = split_options(text);
  const auto take = [&](std::string_view key) {
    const auto found = std::find_if(options.begin(), options.end(), [&](const Option& o) { return o.first == key; });
    if (found == options.end()) {
      base::fail(ErrorCode::invalid_argument,
                 "recipe '" + std::string(text) + "' has no " + std::string(key) + "=METHOD; give k= and v=");
    }
    const std::string_view value = found->second;
    options.erase(found);
    return value;
  };
  Recipe recipe;
  read_side("k", take("k"), &catalog::Method::keys, recipe.key);
  read_side("v", take("v"), &catalog::Method::values, recipe.value);
  if (!recipe.quantizes()) recipe.window = 0;
  set_options(std::string(text), recipe, options);
  return recipe;
}

// The method whose name alone stands for these keys and values; null where only k=,v= says it.
const catalog::Method* method_of(const Recipe& recipe) {
  for (const catalog::Method& method : catalog::list()) {
    if (method.defaults.key.index() == recipe.key.index() && method.defaults.value.index() == recipe.value.index()) {
      return &method;
    }
  }
  return nullptr;
}

// ",name=value" for every option but the bits.
template <typename Part>
std::string options_text(const Part& part) {
  const std::string text = catalog::side_of(part).options_text(part);
  return text.empty() ? text : "," + text;
}

// Those of the values without what the keys say already: both sides of zipcache have the options of a page's classes.
std::string value_options_text(const Recipe& recipe) {
  const std::string keys = options_text(recipe.key) + ",";
  std::string values = options_text(recipe.value);
  for (std::size_t at = 0; at < values.size();) {
    const std::size_t end = std::min(values.find(',', at + 1), values.size());
    const std::string option = values.substr(at, end - at) + ",";
    if (keys.find(option) != std::string::npos) {
      values.erase(at, end - at);
    } else {
      at = end;
    }
  }
  return values;
}

std::string calibration_text(const Recipe& recipe) {
  if (recipe.file.empty()) return {};
  return ",file=" + recipe.file + ",digest=" + digest_text(recipe.digest) +
         (recipe.layer < 0 ? "" : ",layer=" + std::to_string(recipe.layer));
}

std::string common_text(const Recipe& recipe) {
  if (!recipe.quantizes()) return {};
  return ",sink=" + std::to_string(recipe.sink) + ",window=" + std::to_string(recipe.window) +
         ",page=" + std::to_string(recipe.page) + ",x=" + std::to_string(recipe.x_bits) + calibration_text(recipe);
}

template <typename Part>
std::string bits_text(const char* prefix, const Part& part) {
  const std::string bits = catalog::side_of(part).bits(part);
  return bits.empty() ? bits : prefix + bits;
}

template <typename Part>
std::string side_text(const char* key, const Part& part) {
  return key + std::string(std::visit([](const auto& p) { return p.kMethod; }, part)) + bits_text(":", part);
}

// The recipes that led the comparison at their bits (docs/results.md; design: quality-prior-art.md section 7).
struct Preset {
  std::string_view name;
  std::string_view summary;
  std::string_view recipe;
};
constexpr Preset kPresets[] = {
    {"small", "about 2.6 bits, for memory", "waterfill:k=2.5,low=1,high=5,v=2,sink=4"},
    {"balanced", "about 3.2 bits, the default", "waterfill:k=3,low=1,high=6,v=3,shared=1,sink=4"},
    {"near-lossless", "about 4.2 bits, next to f16", "waterfill:k=4,low=2,high=6,v=4,shared=1,sink=4"},
};

// What a name alone means: that of a preset or of a method.
std::pair<std::string, Recipe> named_recipe(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (preset.name == name) return {"waterfill", parse_recipe(preset.recipe)};
  }
  std::string choices;
  for (const catalog::Method& method : catalog::list()) {
    if (method.name == name) return {method.name, method.defaults};
    choices += method.name + ", ";
  }
  for (const Preset& preset : kPresets) choices += std::string(preset.name) + ", ";
  base::fail(ErrorCode::invalid_argument,
             "recipe '" + std::string(name) + "' is unknown; choices: " + choices + "k=METHOD:BITS,v=METHOD:BITS");
}

}  // namespace

Recipe parse_recipe(std::string_view text) {
  if (text.starts_with("k=") || text.starts_with("v=")) {
    Recipe recipe = parse_sides(text);
    catalog::find_digest(recipe);
    validate(recipe);
    return recipe;
  }
  const std::size_t colon = text.find(':');
  auto [name, recipe] = named_recipe(text.substr(0, colon));
  if (colon == std::string_view::npos) return recipe;
  set_options(name, recipe, split_options(text.substr(colon + 1)));
  catalog::find_digest(recipe);
  validate(recipe);
  return recipe;
}

std::string to_text(const Recipe& recipe) {
  validate(recipe);
  const catalog::Method* method = method_of(recipe);
  if (method == nullptr) {
    return side_text("k=", recipe.key) + side_text(",v=", recipe.value) + options_text(recipe.key) +
           value_options_text(recipe) + common_text(recipe);
  }
  const std::string options = bits_text(",k=", recipe.key) + options_text(recipe.key) + bits_text(",v=", recipe.value) +
                              value_options_text(recipe) + common_text(recipe);
  return options.empty() ? method->name : method->name + ":" + options.substr(1);
}

void validate(const Recipe& recipe) {
  catalog::side_of(recipe.key).validate(recipe.key);
  catalog::side_of(recipe.value).validate(recipe.value);
  if (std::holds_alternative<F16Keys>(recipe.key) != std::holds_alternative<F16Values>(recipe.value)) {
    base::fail(ErrorCode::invalid_argument, "recipe has f16 on one side only; allowed: keys and values, or neither");
  }
  if (!recipe.quantizes() && recipe != Recipe{F16Keys(), F16Values(), 0, 0, 128, 16, "", 0, -1}) {
    base::fail(ErrorCode::invalid_argument,
               "recipe f16 has other fields; it never seals a page: leave sink 0, window 0, page 128, x 16, no file");
  }
  const auto& classes_of_keys = catalog::side_of(recipe.key).classes;
  const auto& classes_of_values = catalog::side_of(recipe.value).classes;
  if (classes_of_keys != nullptr && classes_of_values != nullptr &&
      classes_of_keys(recipe.key) != classes_of_values(recipe.value)) {
    base::fail(ErrorCode::invalid_argument,
               "recipe has keys and values with different salient or saliency; a page has one set of salient tokens");
  }
  catalog::check_choice("page", recipe.page, {32, 64, 128, 256});
  catalog::check_choice("x", recipe.x_bits, {8, 16});
  if (recipe.sink < 0 || recipe.sink > recipe.page) {
    bad_value("sink", std::to_string(recipe.sink), "0 to page (" + std::to_string(recipe.page) + ")");
  }
  catalog::check_file(recipe);
  if (recipe.window < 0 || recipe.window > 65536) bad_value("window", std::to_string(recipe.window), "0 to 65536");
}

std::string remark(const Recipe& recipe) {
  const auto& of_keys = catalog::side_of(recipe.key).remark;
  const std::string keys = of_keys != nullptr ? of_keys(recipe.key) : std::string();
  const std::string levels = catalog::describe_levels(recipe);
  return keys + (keys.empty() || levels.empty() ? "" : "; ") + levels;
}

const std::vector<MethodInfo>& methods() {
  static const std::vector<MethodInfo> infos = [] {
    std::vector<MethodInfo> result;
    for (const catalog::Method& method : catalog::list()) {
      result.push_back({method.name, method.summary, to_text(method.defaults), keys_of(method.defaults),
                        method.keys.has_value(), method.values.has_value()});
    }
    return result;
  }();
  return infos;
}

const std::vector<PresetInfo>& presets() {
  static const std::vector<PresetInfo> infos = [] {
    std::vector<PresetInfo> result;
    for (const Preset& preset : kPresets) {
      result.push_back({std::string(preset.name), std::string(preset.summary), to_text(parse_recipe(preset.recipe))});
    }
    return result;
  }();
  return infos;
}

}  // namespace kvant
