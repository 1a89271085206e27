#include "methods/kitty/kitty.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/checked.hpp"

namespace kvant::catalog {
namespace {

// Channels with 4 bits: the share rounded to the nearest count, so that D = 80 at 25 % has 20 and D = 72 at 10 % has 7.
int boosted(const Recipe& recipe, int channels) {
  return static_cast<int>(std::lround(recipe.boost * channels));
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

std::string share_text(double share) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, share);
  return error == std::errc() ? std::string(text, end) : std::string();
}

}  // namespace

Method kitty() {
  Method method;
  method.info = {"kitty",
                 "Kitty: 2-bit keys, the loudest channels of each page with 4 bits",
                 "",
                 {"boost", "v", "sink", "window", "page", "x"}};
  method.set = [](Recipe& recipe, std::string_view key, std::string_view value) {
    if (key == "boost") {
      recipe.boost = read_share(key, value);
    } else if (key == "v") {
      recipe.value_bits = read_int(key, value, 1, 8);
    } else {
      return set_common(recipe, key, value);
    }
    return true;
  };
  method.text = [](const Recipe& recipe) {
    return "boost=" + share_text(recipe.boost) + ",v=" + std::to_string(recipe.value_bits) + "," + common_text(recipe);
  };
  method.defaults = [] {
    Recipe recipe;
    recipe.method = "kitty";
    recipe.key_bits = 2;
    recipe.value_bits = 2;
    recipe.boost = 0.25;
    recipe.sink = 32;
    return recipe;
  };
  method.validate = [](const Recipe& recipe) {
    if (!(recipe.boost >= 0 && recipe.boost <= 1)) {
      base::fail(ErrorCode::invalid_argument,
                 "recipe key 'boost' is " + std::to_string(recipe.boost) + "; allowed: a number from 0 to 1");
    }
    check_choice("k", recipe.key_bits, {2});
    check_choice("v", recipe.value_bits, {1, 2, 3, 4, 5, 6, 7, 8});
    validate_common(recipe);
  };
  method.key_planes = [](const Recipe& recipe, int channels) {
    std::vector<PlaneSpec> planes = uniform_planes(2, channels);
    const int count = boosted(recipe, channels);
    // With every channel boosted the list would say nothing: the high plane covers all of them.
    if (count > 0) planes.push_back({2, 2, count, count < channels});
    return planes;
  };
  method.value_planes = [](const Recipe& recipe, int tokens) { return uniform_planes(recipe.value_bits, tokens); };
  method.choose_keys = choose_loudest;
  return method;
}

}  // namespace kvant::catalog
