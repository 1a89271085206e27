// The list of methods and what their recipes have in common.
#include <charconv>
#include <cstdio>

#include "base/checked.hpp"
#include "methods/f16/f16.hpp"
#include "methods/kitty/kitty.hpp"
#include "methods/kivi/kivi.hpp"
#include "methods/method.hpp"

namespace kvant::catalog {
namespace {

[[noreturn]] void bad_value(std::string_view key, std::string_view value, const std::string& allowed) {
  base::fail(ErrorCode::invalid_argument,
             "recipe key '" + std::string(key) + "' is '" + std::string(value) + "'; allowed: " + allowed);
}

}  // namespace

const std::vector<Method>& list() {
  static const std::vector<Method> methods = {f16(), kivi(), kitty()};
  return methods;
}

const Method& find(std::string_view name) {
  std::string choices;
  for (const Method& method : list()) {
    if (method.info.name == name) return method;
    choices += (choices.empty() ? "" : ", ") + method.info.name;
  }
  base::fail(ErrorCode::invalid_argument, "recipe method '" + std::string(name) + "' is unknown; choices: " + choices);
}

std::vector<PlaneSpec> uniform_planes(int width, int depth) {
  std::vector<PlaneSpec> planes;
  for (int shift = 0; shift < width;) {
    const int left = width - shift;
    const int bits = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
    planes.push_back({bits, shift, depth, false});
    shift += bits;
  }
  return planes;
}

namespace {

TileSpec make_tile(std::vector<PlaneSpec> planes, int rows, int depth) {
  TileSpec tile{rows, depth, std::move(planes), 0};
  for (const PlaneSpec& plane : tile.planes) {
    if (plane.gathered) tile.index_count = std::max(tile.index_count, plane.depth);
  }
  return tile;
}

}  // namespace

TileSpec key_tile(const Recipe& recipe, int channels) {
  const Method& method = find(recipe.method);
  if (method.key_planes == nullptr) return {};
  return make_tile(method.key_planes(recipe, channels), recipe.page, channels);
}

TileSpec value_tile(const Recipe& recipe, int channels) {
  const Method& method = find(recipe.method);
  if (method.value_planes == nullptr) return {};
  return make_tile(method.value_planes(recipe, recipe.page), channels, recipe.page);
}

int read_int(std::string_view key, std::string_view value, int low, int high) {
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < low || number > high) {
    bad_value(key, value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return number;
}

double read_share(std::string_view key, std::string_view value) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || !(number >= 0 && number <= 1)) {
    bad_value(key, value, "a number from 0 to 1");
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

bool set_common(Recipe& recipe, std::string_view key, std::string_view value) {
  if (key == "sink") {
    recipe.sink = read_int(key, value, 0, 256);
  } else if (key == "window") {
    recipe.window = read_int(key, value, 0, 65536);
  } else if (key == "page") {
    recipe.page = read_int(key, value, 32, 256);
  } else if (key == "x") {
    recipe.x_bits = read_int(key, value, 8, 16);
  } else {
    return false;
  }
  return true;
}

std::string common_text(const Recipe& recipe) {
  return "sink=" + std::to_string(recipe.sink) + ",window=" + std::to_string(recipe.window) +
         ",page=" + std::to_string(recipe.page) + ",x=" + std::to_string(recipe.x_bits);
}

void validate_common(const Recipe& recipe) {
  check_choice("page", recipe.page, {32, 64, 128, 256});
  check_choice("x", recipe.x_bits, {8, 16});
  if (recipe.sink < 0 || recipe.sink > recipe.page) {
    bad_value("sink", std::to_string(recipe.sink), "0 to page (" + std::to_string(recipe.page) + ")");
  }
  if (recipe.window < 0 || recipe.window > 65536) {
    bad_value("window", std::to_string(recipe.window), "0 to 65536");
  }
}

}  // namespace kvant::catalog
