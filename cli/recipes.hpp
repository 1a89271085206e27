// Lists of recipes as people type them, and the rows of a comparison that they name.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/recipe.hpp"

namespace kvant::cli {

// One row: a recipe of kvant, or a cache type of the host itself ("stock:q4_0", "stock:q8_0/q4_0" for keys/values).
struct RowSpec {
  std::string text;                    // as given
  std::optional<LayerRecipes> recipe;  // empty for stock rows
  std::string key_type;                // stock rows only
  std::string value_type;

  bool stock() const { return !recipe.has_value(); }
};

// Splits a list of recipes. ';' and white space always separate. A comma belongs to a recipe with options when `key=`
// or a rule of layers follows it and separates otherwise: "f16,kivi:k=4,v=4,stock:q8_0" has three recipes.
std::vector<std::string> split_recipes(std::string_view list);

// Throws CliError(usage) with the parser's message.
RowSpec parse_row(const std::string& text);

// The rows of all lists, "stock:f16" first, duplicates dropped. With no list: the presets and the other
// methods between stock q8_0 and q4_0.
std::vector<RowSpec> parse_rows(const std::vector<std::string>& lists);

// The recipes of all lists without stock rows; with no list: f16, the presets and the other methods.
std::vector<LayerRecipes> parse_recipe_lists(const std::vector<std::string>& lists);

// Bits per value of a stock cache type, scales included; 0 for an unknown name.
double stock_bits(std::string_view type);

}  // namespace kvant::cli
