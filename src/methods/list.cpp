// The list of methods and what their text forms share.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/checked.hpp"
#include "methods/f16/f16.hpp"
#include "methods/kitty/kitty.hpp"
#include "methods/kivi/kivi.hpp"
#include "methods/kvquant/kvquant.hpp"
#include "methods/method.hpp"
#include "methods/waterfill/waterfill.hpp"
#include "methods/zipcache/zipcache.hpp"

namespace kvant::catalog {
const std::vector<Method>& list() {
  static const std::vector<Method> methods = {f16(), kivi(), kitty(), waterfill(), kvquant(), zipcache()};
  return methods;
}

const Method& find(std::string_view name) {
  std::string choices;
  for (const Method& method : list()) {
    if (method.name == name) return method;
    choices += (choices.empty() ? "" : ", ") + method.name;
  }
  base::fail(ErrorCode::invalid_argument, "recipe method '" + std::string(name) + "' is unknown; choices: " + choices);
}

std::vector<PlaneSpec> uniform_planes(int width, int depth) {
  std::vector<PlaneSpec> planes;
  for (int shift = 0; shift < width;) {
    const int left = width - shift;
    const int bits = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
    planes.push_back({bits, shift, depth});
    shift += bits;
  }
  return planes;
}

TileSpec key_tile(const Recipe& recipe, int channels) {
  const KeySide& side = side_of(recipe.key);
  TileSpec spec;
  if (side.tile == nullptr) return spec;
  spec.rows = recipe.page;
  spec.depth = channels;
  spec.salient = salient_tokens(recipe);
  side.tile(recipe.key, spec);
  return spec;
}

TileSpec value_tile(const Recipe& recipe, int channels) {
  const ValueSide& side = side_of(recipe.value);
  TileSpec spec;
  if (side.tile == nullptr) return spec;
  spec.rows = channels;
  spec.depth = recipe.page;
  spec.salient = salient_tokens(recipe);
  side.tile(recipe.value, spec);
  return spec;
}

bool uses_queries(const Recipe& recipe) {
  const KeySide& side = side_of(recipe.key);
  return side.uses_queries != nullptr && side.uses_queries(recipe.key);
}

bool before_rope(const Recipe& recipe) {
  const KeySide& side = side_of(recipe.key);
  return side.before_rope != nullptr && side.before_rope(recipe.key);
}

std::optional<TokenClasses> token_classes(const Recipe& recipe) {
  const KeySide& keys = side_of(recipe.key);
  if (keys.classes != nullptr) return keys.classes(recipe.key);
  const ValueSide& values = side_of(recipe.value);
  if (values.classes != nullptr) return values.classes(recipe.value);
  return std::nullopt;
}

int salient_tokens(const Recipe& recipe) {
  const std::optional<TokenClasses> classes = token_classes(recipe);
  if (!classes) return 0;
  const auto count = static_cast<int>(std::lround(classes->salient * recipe.page));
  return std::clamp(count, 1, recipe.page - 1);
}

const KeySide& side_of(const KeyRecipe& keys) {
  return *find(std::visit([](const auto& options) { return options.kMethod; }, keys)).keys;
}
const ValueSide& side_of(const ValueRecipe& values) {
  return *find(std::visit([](const auto& options) { return options.kMethod; }, values)).values;
}

void bad_value(std::string_view key, std::string_view value, const std::string& allowed) {
  base::fail(ErrorCode::invalid_argument,
             "recipe key '" + std::string(key) + "' is '" + std::string(value) + "'; allowed: " + allowed);
}

int read_int(std::string_view key, std::string_view value, int low, int high) {
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < low || number > high) {
    bad_value(key, value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return number;
}

double read_number(std::string_view key, std::string_view value, double low, double high) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= low && number <= high)) {
    bad_value(key, value, "a number from " + number_text(low) + " to " + number_text(high));
  }
  return number;
}

void check_choice(const char* key, int value, std::initializer_list<int> choices) {
  std::string text;
  for (const int choice : choices) {
    if (choice == value) return;
    text += (text.empty() ? "" : ", ") + std::to_string(choice);
  }
  bad_value(key, std::to_string(value), text);
}

void check_number(const char* key, double value, double low, double high) {
  if (!(value >= low && value <= high)) {
    bad_value(key, number_text(value), number_text(low) + " to " + number_text(high));
  }
}

std::string number_text(double value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return error == std::errc() ? std::string(text, end) : std::string();
}

}  // namespace kvant::catalog
