#include "methods/kivi/kivi.hpp"

namespace kvant::catalog {
namespace {

// Keys and values have the same single option: bits per code.
template <typename Part, typename Options>
void add_bits(Side<Part>& side, const char* name) {
  side.defaults = Options();
  side.options = {name};
  side.bits = [](const Part& part) { return std::to_string(std::get<Options>(part).bits); };
  side.options_text = [](const Part&) { return std::string(); };
}

KeySide keys() {
  KeySide side;
  add_bits<KeyRecipe, KiviKeys>(side, "k");
  side.set = [](KeyRecipe& part, std::string_view option, std::string_view value) {
    if (option != "k") return false;
    std::get<KiviKeys>(part).bits = read_int(option, value, 1, 8);
    return true;
  };
  side.validate = [](const KeyRecipe& part) { check_number("k", std::get<KiviKeys>(part).bits, 1, 8); };
  side.tile = [](const KeyRecipe& part, TileSpec& spec) {
    spec.planes = uniform_planes(std::get<KiviKeys>(part).bits, spec.depth);
  };
  return side;
}

ValueSide values() {
  ValueSide side;
  add_bits<ValueRecipe, KiviValues>(side, "v");
  side.set = [](ValueRecipe& part, std::string_view option, std::string_view value) {
    if (option != "v") return false;
    std::get<KiviValues>(part).bits = read_int(option, value, 1, 8);
    return true;
  };
  side.validate = [](const ValueRecipe& part) { check_number("v", std::get<KiviValues>(part).bits, 1, 8); };
  side.tile = [](const ValueRecipe& part, TileSpec& spec) {
    spec.planes = uniform_planes(std::get<KiviValues>(part).bits, spec.depth);
  };
  return side;
}

}  // namespace

Method kivi() {
  return {"kivi", "KIVI: keys per channel, values per token, one grid per page", Recipe(), keys(), values()};
}

}  // namespace kvant::catalog
