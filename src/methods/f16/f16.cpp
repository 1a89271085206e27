#include "methods/f16/f16.hpp"

namespace kvant::catalog {
namespace {

template <typename Part, typename AnySide>
AnySide rows() {
  AnySide side;
  side.defaults = Part();
  side.set = [](auto&, std::string_view, std::string_view) { return false; };
  side.bits = side.options_text = [](const auto&) { return std::string(); };
  side.validate = [](const auto&) {};
  return side;
}

}  // namespace

Method f16() {
  Recipe recipe;
  recipe.key = F16Keys();
  recipe.value = F16Values();
  recipe.window = 0;
  return {"f16", "the control: rows stay in the cache's own type, nothing is quantized", recipe,
          rows<F16Keys, KeySide>(), rows<F16Values, ValueSide>()};
}

}  // namespace kvant::catalog
