#include "methods/kitty/kitty.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvant::catalog {
namespace {

// Channels with 4 bits: the share rounded to the nearest count, so that D = 80 at 25 % has 20 and D = 72 at 10 % has 7.
int boosted(double boost, int channels) {
  return static_cast<int>(std::lround(boost * channels));
}

// Ranks channels by mean |k| over the page (paper Eq. 2); ties go to the lower channel.
void boost_loudest(const KeyRecipe& part, const KeyPage& page, std::uint8_t* widths) {
  std::vector<double> loudness(static_cast<std::size_t>(page.channels()));
  for (int d = 0; d < page.channels(); ++d) {
    double sum = 0;
    for (int row = 0; row < page.rows; ++row) sum += std::fabs(static_cast<double>(page.channel(d)[row]));
    loudness[static_cast<std::size_t>(d)] = sum;
  }
  std::vector<std::size_t> order(loudness.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return loudness[a] > loudness[b]; });
  const auto count = static_cast<std::size_t>(boosted(std::get<KittyKeys>(part).boost, page.channels()));
  for (std::size_t i = 0; i < order.size(); ++i) widths[order[i]] = i < count ? 4 : 2;
}

KeySide keys() {
  KeySide side;
  side.defaults = KittyKeys();
  side.options = {"boost"};
  side.set = [](KeyRecipe& part, std::string_view option, std::string_view value) {
    if (option != "boost") return false;
    std::get<KittyKeys>(part).boost = read_number(option, value, 0, 1);
    return true;
  };
  side.bits = [](const KeyRecipe&) { return std::string(); };
  side.options_text = [](const KeyRecipe& part) { return "boost=" + number_text(std::get<KittyKeys>(part).boost); };
  side.validate = [](const KeyRecipe& part) { check_number("boost", std::get<KittyKeys>(part).boost, 0, 1); };
  side.tile = [](const KeyRecipe& part, TileSpec& spec) {
    spec.planes = uniform_planes(2, spec.depth);
    const int count = boosted(std::get<KittyKeys>(part).boost, spec.depth);
    if (count > 0) spec.planes.push_back({2, 2, count});
    spec.sorted = count > 0 && count < spec.depth;  // else all channels are alike
  };
  side.choose_widths = boost_loudest;
  return side;
}

}  // namespace

Method kitty() {
  Recipe recipe;
  recipe.key = KittyKeys();
  recipe.value = KiviValues{2};
  recipe.sink = 32;
  return {"kitty", "Kitty: 2-bit keys, the loudest channels of each page with 4 bits", recipe, keys(), std::nullopt};
}

}  // namespace kvant::catalog
