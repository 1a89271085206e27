#include "methods/kivi/kivi.hpp"

namespace kvant::catalog {

Method kivi() {
  Method method;
  method.info = {"kivi",
                 "KIVI: keys per channel, values per token, one grid per page",
                 "",
                 {"k", "v", "sink", "window", "page", "x"}};
  method.set = [](Recipe& recipe, std::string_view key, std::string_view value) {
    if (key == "k") {
      recipe.key_bits = read_int(key, value, 1, 8);
    } else if (key == "v") {
      recipe.value_bits = read_int(key, value, 1, 8);
    } else {
      return set_common(recipe, key, value);
    }
    return true;
  };
  method.text = [](const Recipe& recipe) {
    return "k=" + std::to_string(recipe.key_bits) + ",v=" + std::to_string(recipe.value_bits) + "," +
           common_text(recipe);
  };
  method.defaults = [] { return Recipe(); };
  method.validate = [](const Recipe& recipe) {
    check_choice("k", recipe.key_bits, {1, 2, 3, 4, 5, 6, 7, 8});
    check_choice("v", recipe.value_bits, {1, 2, 3, 4, 5, 6, 7, 8});
    validate_common(recipe);
  };
  method.key_planes = [](const Recipe& recipe, int channels) { return uniform_planes(recipe.key_bits, channels); };
  method.value_planes = [](const Recipe& recipe, int tokens) { return uniform_planes(recipe.value_bits, tokens); };
  return method;
}

}  // namespace kvant::catalog
