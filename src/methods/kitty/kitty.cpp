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

// Ranks channels by mean |k| over the page (paper Eq. 2); ties go to the lower channel. The chosen ones are listed in
// ascending order, so that the bytes do not depend on how the ranking was computed.
void choose_loudest(const float* tile, std::int64_t stride, int rows, int depth, int count, std::uint16_t* index) {
  std::vector<double> loudness(static_cast<std::size_t>(depth));
  for (int d = 0; d < depth; ++d) {
    double sum = 0;
    for (int row = 0; row < rows; ++row) sum += std::fabs(static_cast<double>(tile[d * stride + row]));
    loudness[static_cast<std::size_t>(d)] = sum;
  }
  std::vector<std::uint16_t> order(static_cast<std::size_t>(depth));
  std::iota(order.begin(), order.end(), std::uint16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint16_t a, std::uint16_t b) { return loudness[a] > loudness[b]; });
  std::copy_n(order.begin(), count, index);
  std::sort(index, index + count);
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
  side.planes = [](const KeyRecipe& part, int channels) {
    std::vector<PlaneSpec> planes = uniform_planes(2, channels);
    const int count = boosted(std::get<KittyKeys>(part).boost, channels);
    // With every channel boosted the list would say nothing: the high plane covers all of them.
    if (count > 0) planes.push_back({2, 2, count, count < channels});
    return planes;
  };
  side.choose = choose_loudest;
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
