#include "methods/f16/f16.hpp"

namespace kvant::catalog {

Method f16() {
  Method method;
  method.info = {"f16", "the control: rows stay in the cache's own type, nothing is quantized", "", {}};
  method.set = [](Recipe&, std::string_view, std::string_view) { return false; };
  method.text = [](const Recipe&) { return std::string(); };
  method.defaults = [] {
    Recipe recipe;
    recipe.method = "f16";
    recipe.key_bits = recipe.value_bits = 16;
    recipe.window = 0;
    return recipe;
  };
  method.validate = validate_common;
  return method;
}

}  // namespace kvant::catalog
