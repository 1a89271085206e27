#include "methods/kitty/kitty.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvant::catalog {
namespace {

constexpr std::array<std::string_view, 4> kSelectors = {"magnitude", "variance", "range", "query"};

Selector read_selector(std::string_view option, std::string_view value) {
  const auto* const found = std::find(kSelectors.begin(), kSelectors.end(), value);
  if (found == kSelectors.end()) bad_value(option, value, "magnitude, variance, range or query");
  return static_cast<Selector>(found - kSelectors.begin());
}

std::string_view selector_text(Selector selector) {
  return kSelectors[static_cast<std::size_t>(selector)];
}

// Channels with 4 bits: the share rounded to the nearest count, so that D = 80 at 25 % has 20 and D = 72 at 10 % has 7.
int boosted(double boost, int channels) {
  return static_cast<int>(std::lround(boost * channels));
}

double magnitude(const float* channel, int rows) {
  double sum = 0;
  for (int row = 0; row < rows; ++row) sum += std::fabs(static_cast<double>(channel[row]));
  return sum;
}

double variance(const float* channel, int rows) {
  const double mean = std::accumulate(channel, channel + rows, 0.0) / rows;
  double sum = 0;
  for (int row = 0; row < rows; ++row) {
    const double difference = static_cast<double>(channel[row]) - mean;
    sum += difference * difference;
  }
  return sum;
}

// What decides over the boost: mean |k| over the page (paper Eq. 2), or one of the ablations. Sums stand for means,
// squares for roots: the order is the same. Queries are sums of squares up to the page; ranges alone where there are
// none.
double score(Selector selector, const KeyPage& page, int channel) {
  if (selector == Selector::magnitude) return magnitude(page.channel(channel), page.rows);
  if (selector == Selector::variance) return variance(page.channel(channel), page.rows);
  const double range = static_cast<double>(page.max[channel]) - static_cast<double>(page.min[channel]);
  const bool weighed = selector == Selector::query && page.queries != nullptr;
  return range * range * (weighed ? page.queries[channel] : 1.0);
}

// Ties go to the lower channel.
void boost_highest(const KeyRecipe& part, const KeyPage& page, std::uint8_t* widths) {
  const auto& keys = std::get<KittyKeys>(part);
  std::vector<double> scores(static_cast<std::size_t>(page.channels()));
  for (int d = 0; d < page.channels(); ++d) scores[static_cast<std::size_t>(d)] = score(keys.selector, page, d);
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  const auto count = static_cast<std::size_t>(boosted(keys.boost, page.channels()));
  for (std::size_t i = 0; i < order.size(); ++i) widths[order[i]] = i < count ? 4 : 2;
}

KeySide keys() {
  KeySide side;
  side.defaults = KittyKeys();
  side.options = {"boost", "selector"};
  side.set = [](KeyRecipe& part, std::string_view option, std::string_view value) {
    auto& keys = std::get<KittyKeys>(part);
    if (option == "boost") {
      keys.boost = read_number(option, value, 0, 1);
    } else if (option == "selector") {
      keys.selector = read_selector(option, value);
    } else {
      return false;
    }
    return true;
  };
  side.bits = [](const KeyRecipe&) { return std::string(); };
  side.options_text = [](const KeyRecipe& part) {
    const auto& keys = std::get<KittyKeys>(part);
    const std::string boost = "boost=" + number_text(keys.boost);
    // The default is not said: recipes without it have the text that images have always had.
    return keys.selector == Selector::magnitude ? boost
                                                : boost + ",selector=" + std::string(selector_text(keys.selector));
  };
  side.validate = [](const KeyRecipe& part) { check_number("boost", std::get<KittyKeys>(part).boost, 0, 1); };
  side.tile = [](const KeyRecipe& part, TileSpec& spec) {
    spec.planes = uniform_planes(2, spec.depth);
    const int count = boosted(std::get<KittyKeys>(part).boost, spec.depth);
    if (count > 0) spec.planes.push_back({2, 2, count});
    spec.sorted = count > 0 && count < spec.depth;  // else all channels are alike
  };
  side.choose_widths = boost_highest;
  side.uses_queries = [](const KeyRecipe& part) { return std::get<KittyKeys>(part).selector == Selector::query; };
  side.remark = [](const KeyRecipe& part) -> std::string {
    if (std::get<KittyKeys>(part).selector != Selector::query) return {};
    return "kitty ranks channels by range alone in pages that are sealed before any query is seen (blind_seals)";
  };
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
