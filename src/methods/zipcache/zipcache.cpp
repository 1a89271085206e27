#include "methods/zipcache/zipcache.hpp"

#include "base/checked.hpp"

namespace kvant::catalog {
namespace {

constexpr int kMostLow = 4;
// Wider gaps cost precision: the weights of both classes are rounded together to 16 bits, after multiplication by steps
// that differ by 2^gap.
constexpr int kMostGap = 4;
constexpr int kMostHigh = kMostLow + kMostGap;

// Keys and values have the same options; only the widths of the values have names of their own, because `low` and
// `high` of other keys (waterfill) may stand beside them.
template <typename Part, typename Options>
void add_options(Side<Part>& side, bool (*set)(Part&, std::string_view, std::string_view), const char* high,
                 const char* low) {
  side.defaults = Options();
  side.options = {"salient", "saliency", high, low};
  side.set = set;
  side.bits = [](const Part&) { return std::string(); };
  side.classes = [](const Part& part) {
    const auto& options = std::get<Options>(part);
    return TokenClasses{options.salient, options.saliency};
  };
}

template <typename Options>
bool set_option(Options& options, std::string_view name, std::string_view value, const char* high, const char* low) {
  if (name == "salient") {
    options.salient = read_number(name, value, 0, 1);
  } else if (name == "saliency") {
    if (value != "attention" && value != "norm") bad_value(name, value, "attention or norm");
    options.saliency = value == "norm" ? Saliency::norm : Saliency::attention;
  } else if (name == high) {
    options.high = read_int(name, value, 2, kMostHigh);
  } else if (name == low) {
    options.low = read_int(name, value, 1, kMostLow);
  } else {
    return false;
  }
  return true;
}

template <typename Options>
void check(const Options& options, const char* high, const char* low) {
  if (!(options.salient > 0 && options.salient < 1)) {
    bad_value("salient", number_text(options.salient), "above 0 and below 1");
  }
  check_number(low, options.low, 1, kMostLow);
  check_number(high, options.high, options.low + 1, options.low + kMostGap);
}

template <typename Options>
std::string text(const Options& options, const char* high, const char* low) {
  return "salient=" + number_text(options.salient) +
         ",saliency=" + (options.saliency == Saliency::norm ? "norm" : "attention") + "," + high + "=" +
         std::to_string(options.high) + "," + low + "=" + std::to_string(options.low);
}

KeySide keys() {
  KeySide side;
  add_options<KeyRecipe, ZipcacheKeys>(
      side,
      [](KeyRecipe& part, std::string_view name, std::string_view value) {
        return set_option(std::get<ZipcacheKeys>(part), name, value, "high", "low");
      },
      "high", "low");
  side.options_text = [](const KeyRecipe& part) { return text(std::get<ZipcacheKeys>(part), "high", "low"); };
  side.validate = [](const KeyRecipe& part) { check(std::get<ZipcacheKeys>(part), "high", "low"); };
  side.tile = [](const KeyRecipe& part, TileSpec& spec) {
    const auto& keys = std::get<ZipcacheKeys>(part);
    spec.planes = uniform_planes(keys.high, spec.depth);
    spec.rest_planes = uniform_planes(keys.low, spec.depth);
  };
  return side;
}

ValueSide values() {
  ValueSide side;
  add_options<ValueRecipe, ZipcacheValues>(
      side,
      [](ValueRecipe& part, std::string_view name, std::string_view value) {
        return set_option(std::get<ZipcacheValues>(part), name, value, "vhigh", "vlow");
      },
      "vhigh", "vlow");
  side.options_text = [](const ValueRecipe& part) { return text(std::get<ZipcacheValues>(part), "vhigh", "vlow"); };
  side.validate = [](const ValueRecipe& part) { check(std::get<ZipcacheValues>(part), "vhigh", "vlow"); };
  side.tile = [](const ValueRecipe& part, TileSpec& spec) {
    const auto& values = std::get<ZipcacheValues>(part);
    spec.planes = uniform_planes(values.low, spec.depth);
    for (PlaneSpec plane : uniform_planes(values.high - values.low, spec.salient)) {
      plane.shift += values.low;
      spec.planes.push_back(plane);
    }
    spec.shared_grid = true;  // the paper's two parameters per token
    spec.channel_factors = true;
  };
  return side;
}

}  // namespace

Method zipcache() {
  Recipe recipe;
  recipe.key = ZipcacheKeys();
  recipe.value = ZipcacheValues();
  recipe.window = 100;
  return {"zipcache", "ZipCache: 4-bit tokens that probe queries attend to, 2-bit others, channel-separable values",
          recipe, keys(), values()};
}

}  // namespace kvant::catalog
