#include "methods/waterfill/waterfill.hpp"

#include <cmath>

#include "base/checked.hpp"
#include "methods/waterfill/allocate.hpp"

namespace kvant::catalog {
namespace {

constexpr int kWidest = 6;  // widths that the four planes of a sorted tile can make

Grid read_grid(std::string_view option, std::string_view value) {
  if (value == "ls") return Grid::least_squares;
  if (value != "range") bad_value(option, value, "ls or range");
  return Grid::range;
}
std::string grid_text(Grid grid) {
  return grid == Grid::least_squares ? "ls" : "range";
}

void check_keys(const WaterfillKeys& keys) {
  check_number("low", keys.low, 1, kWidest);
  check_number("high", keys.high, keys.low, kWidest);
  check_number("k", keys.bits, keys.low, keys.high);
}

// Widths belong to fours of channels: their sum is what the mean allows, rounded down.
void key_tile(const KeyRecipe& part, TileSpec& spec) {
  const auto& keys = std::get<WaterfillKeys>(part);
  if (spec.depth % kRun != 0) {
    base::fail(ErrorCode::invalid_argument, "key_dim is " + std::to_string(spec.depth) +
                                                "; keys of waterfill need a multiple of " + std::to_string(kRun));
  }
  const int fours = spec.depth / kRun;
  spec.sorted = true;
  spec.low = keys.low;
  spec.high = keys.high;
  spec.budget = std::max(keys.low * fours, static_cast<int>(std::floor(keys.bits * fours + 1e-9)));
  spec.least_squares = keys.grid == Grid::least_squares;
  spec.feedback = keys.feedback;
}

// What a channel's error does to the scores: its range, which its step is a fraction of, and how much the queries look
// at it. Ranges alone where no query was seen, or none that had anything but zeros.
void choose_widths(const KeyRecipe&, const KeyPage& page, std::uint8_t* widths) {
  std::vector<double> energy(static_cast<std::size_t>(page.channels()));
  double seen = 0;
  for (int c = 0; page.queries != nullptr && c < page.channels(); ++c) seen += page.queries[c];
  for (int c = 0; c < page.channels(); ++c) {
    const double range = static_cast<double>(page.max[c]) - static_cast<double>(page.min[c]);
    energy[static_cast<std::size_t>(c)] = range * range * (seen > 0 ? page.queries[c] : 1.0);
  }
  const TileLayout& layout = page.layout;
  allocate_widths(energy.data(), page.channels(), layout.low, layout.high, layout.budget, widths);
}

KeySide keys() {
  KeySide side;
  side.defaults = WaterfillKeys();
  side.options = {"k", "low", "high", "grid", "feedback"};
  side.set = [](KeyRecipe& part, std::string_view option, std::string_view value) {
    auto& keys = std::get<WaterfillKeys>(part);
    if (option == "k") {
      keys.bits = read_number(option, value, 1, kWidest);
    } else if (option == "low") {
      keys.low = read_int(option, value, 1, kWidest);
    } else if (option == "high") {
      keys.high = read_int(option, value, 1, kWidest);
    } else if (option == "grid") {
      keys.grid = read_grid(option, value);
    } else if (option == "feedback") {
      keys.feedback = read_int(option, value, 0, 1) != 0;
    } else {
      return false;
    }
    return true;
  };
  side.bits = [](const KeyRecipe& part) { return number_text(std::get<WaterfillKeys>(part).bits); };
  side.options_text = [](const KeyRecipe& part) {
    const auto& keys = std::get<WaterfillKeys>(part);
    // The default is not said: recipes without it have the text that images have always had.
    return "low=" + std::to_string(keys.low) + ",high=" + std::to_string(keys.high) + ",grid=" + grid_text(keys.grid) +
           (keys.feedback ? ",feedback=1" : "");
  };
  side.validate = [](const KeyRecipe& part) { check_keys(std::get<WaterfillKeys>(part)); };
  side.tile = key_tile;
  side.choose_widths = choose_widths;
  side.uses_queries = [](const KeyRecipe&) { return true; };
  side.remark = [](const KeyRecipe& part) -> std::string {
    if (!std::get<WaterfillKeys>(part).feedback) return {};
    return "waterfill feeds no errors back in pages that are sealed before any query is seen (blind_seals)";
  };
  return side;
}

void value_tile(const ValueRecipe& part, TileSpec& spec) {
  const auto& values = std::get<WaterfillValues>(part);
  spec.planes = uniform_planes(values.bits, spec.depth);
  spec.rotation = values.rotate ? spec.rows & -spec.rows : 1;  // the largest power of two in it
  spec.shared_grid = values.shared;
  spec.least_squares = values.grid == Grid::least_squares;
}

ValueSide values() {
  ValueSide side;
  side.defaults = WaterfillValues();
  side.options = {"v", "rotate", "shared", "vgrid"};
  side.set = [](ValueRecipe& part, std::string_view option, std::string_view value) {
    auto& values = std::get<WaterfillValues>(part);
    if (option == "v") {
      values.bits = read_int(option, value, 1, 8);
    } else if (option == "rotate") {
      values.rotate = read_int(option, value, 0, 1) != 0;
    } else if (option == "shared") {
      values.shared = read_int(option, value, 0, 1) != 0;
    } else if (option == "vgrid") {
      values.grid = read_grid(option, value);
    } else {
      return false;
    }
    return true;
  };
  side.bits = [](const ValueRecipe& part) { return std::to_string(std::get<WaterfillValues>(part).bits); };
  side.options_text = [](const ValueRecipe& part) {
    const auto& values = std::get<WaterfillValues>(part);
    return std::string("rotate=") + (values.rotate ? "1" : "0") + ",shared=" + (values.shared ? "1" : "0") +
           ",vgrid=" + grid_text(values.grid);
  };
  side.validate = [](const ValueRecipe& part) { check_number("v", std::get<WaterfillValues>(part).bits, 1, 8); };
  side.tile = value_tile;
  return side;
}

}  // namespace

Method waterfill() {
  Recipe recipe;
  recipe.key = WaterfillKeys();
  recipe.value = WaterfillValues();
  recipe.sink = 4;
  return {"waterfill", "widths per key channel and page by query rms x range, Hadamard-rotated values", recipe, keys(),
          values()};
}

}  // namespace kvant::catalog
