// Recipes that differ per layer.
#include <cctype>
#include <limits>

#include "base/checked.hpp"
#include "kvant/recipe.hpp"
#include "methods/method.hpp"

namespace kvant {
namespace {

constexpr std::string_view kPrefix = "layers=";
constexpr int kLastLayer = std::numeric_limits<int>::max();

bool is_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

// True when a rule starts here: "*:" or a digit. Options of recipes start with a letter.
bool starts_rule(std::string_view text) {
  return text.starts_with("*:") || (!text.empty() && is_digit(text.front()));
}

// The text of the first rule, cut off `text`.
std::string_view next_rule(std::string_view& text) {
  std::size_t end = 0;
  do {
    end = text.find(',', end);
    if (end != std::string_view::npos) ++end;
  } while (end != std::string_view::npos && !starts_rule(text.substr(end)));
  const std::string_view rule = text.substr(0, end == std::string_view::npos ? end : end - 1);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end);
  return rule;
}

LayerRecipes::Rule parse_rule(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (!starts_rule(text) || colon == std::string_view::npos) {
    base::fail(ErrorCode::invalid_argument,
               "recipe part '" + std::string(text) + "' is not of the form N:RECIPE, N-M:RECIPE or *:RECIPE");
  }
  const std::string_view range = text.substr(0, colon);
  LayerRecipes::Rule rule{0, kLastLayer, parse_recipe(text.substr(colon + 1))};
  if (range == "*") return rule;
  const std::size_t dash = range.find('-');
  rule.first = catalog::read_int("layers", range.substr(0, dash), 0, 9999);
  rule.last = dash == std::string_view::npos ? rule.first
                                             : catalog::read_int("layers", range.substr(dash + 1), rule.first, 9999);
  return rule;
}

}  // namespace

Recipe LayerRecipes::at(int layer) const {
  for (const Rule& rule : rules) {
    if (layer < rule.first || layer > rule.last) continue;
    Recipe recipe = rule.recipe;
    if (!recipe.file.empty() && recipe.layer < 0) recipe.layer = layer;
    return recipe;
  }
  base::fail(ErrorCode::out_of_range, "layer " + std::to_string(layer) + " has no recipe");
}

LayerRecipes parse_layer_recipes(std::string_view text) {
  if (!text.starts_with(kPrefix)) return {{{0, kLastLayer, parse_recipe(text)}}};
  LayerRecipes recipes;
  for (std::string_view rest = text.substr(kPrefix.size()); !rest.empty();) {
    recipes.rules.push_back(parse_rule(next_rule(rest)));
  }
  if (recipes.rules.empty() || recipes.rules.back().last != kLastLayer) {
    base::fail(ErrorCode::invalid_argument,
               "recipe '" + std::string(text) + "' does not end with the rule for all other layers, *:RECIPE");
  }
  return recipes;
}

std::string to_text(const LayerRecipes& recipes) {
  if (recipes.rules.size() == 1 && recipes.rules[0].first == 0 && recipes.rules[0].last == kLastLayer) {
    return to_text(recipes.rules[0].recipe);
  }
  std::string text(kPrefix);
  for (const LayerRecipes::Rule& rule : recipes.rules) {
    if (&rule != recipes.rules.data()) text += ',';
    text += rule.last == kLastLayer ? "*" : std::to_string(rule.first);
    if (rule.last != kLastLayer && rule.last != rule.first) text += "-" + std::to_string(rule.last);
    text += ":" + to_text(rule.recipe);
  }
  return text;
}

}  // namespace kvant
