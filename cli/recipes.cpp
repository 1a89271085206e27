#include "cli/recipes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <utility>

#include "cli/errors.hpp"
#include "kvant/error.hpp"

namespace kvant::cli {
namespace {

constexpr std::string_view kStockPrefix = "stock:";

// Block formats of ggml: bytes per block of 32 values, times 8 / 32.
constexpr std::array<std::pair<std::string_view, double>, 9> kStockTypes = {{{"f32", 32.0},
                                                                             {"f16", 16.0},
                                                                             {"bf16", 16.0},
                                                                             {"q8_0", 8.5},
                                                                             {"q5_1", 6.0},
                                                                             {"q5_0", 5.5},
                                                                             {"q4_1", 5.0},
                                                                             {"q4_0", 4.5},
                                                                             {"iq4_nl", 4.5}}};

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

// True when `rest`, the text behind a comma, goes on with `recipe`: an option, or a rule of "layers=".
bool continues_recipe(std::string_view recipe, std::string_view rest) {
  const bool layers = recipe.starts_with("layers=");
  if (layers && (rest.starts_with("*:") || (!rest.empty() && std::isdigit(static_cast<unsigned char>(rest[0])) != 0))) {
    return true;
  }
  const bool has_options = recipe.find(':') != std::string_view::npos || recipe.find('=') != std::string_view::npos;
  if (!has_options) return false;
  std::size_t i = 0;
  while (i < rest.size() && (std::isalnum(static_cast<unsigned char>(rest[i])) != 0 || rest[i] == '_')) ++i;
  return i > 0 && i < rest.size() && rest[i] == '=';
}

std::string stock_choices() {
  std::string names;
  for (const auto& [name, bits] : kStockTypes) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

RowSpec parse_stock(const std::string& text) {
  const std::string types = text.substr(kStockPrefix.size());
  const std::size_t slash = types.find('/');
  RowSpec row;
  row.text = text;
  row.key_type = types.substr(0, slash);
  row.value_type = slash == std::string::npos ? row.key_type : types.substr(slash + 1);
  for (const std::string& type : {row.key_type, row.value_type}) {
    if (stock_bits(type) == 0) {
      throw CliError(Exit::usage,
                     fmt::format("recipe '{}': unknown cache type '{}'; choose from {}", text, type, stock_choices()));
    }
  }
  return row;
}

// The presets, then the methods that none of them stands for.
std::vector<std::string> own_recipes() {
  std::vector<std::string> texts;
  for (const PresetInfo& preset : presets()) texts.push_back(preset.name);
  for (const MethodInfo& method : methods()) {
    const auto is_its = [&](const PresetInfo& preset) { return preset.recipe.starts_with(method.name + ":"); };
    if (method.name != "f16" && std::none_of(presets().begin(), presets().end(), is_its)) texts.push_back(method.name);
  }
  return texts;
}

std::vector<std::string> default_texts() {
  std::vector<std::string> texts = own_recipes();
  texts.insert(texts.begin(), "stock:q8_0");
  texts.emplace_back("stock:q4_0");
  return texts;
}

std::vector<std::string> split_all(const std::vector<std::string>& lists) {
  std::vector<std::string> texts;
  for (const std::string& list : lists) {
    for (std::string& text : split_recipes(list)) texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace

double stock_bits(std::string_view type) {
  const auto* found =
      std::find_if(kStockTypes.begin(), kStockTypes.end(), [&](const auto& entry) { return entry.first == type; });
  return found == kStockTypes.end() ? 0.0 : found->second;
}

std::vector<std::string> split_recipes(std::string_view list) {
  std::vector<std::string> recipes(1);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const char c = list[i];
    const bool separates =
        c == ';' || is_space(c) || (c == ',' && !continues_recipe(recipes.back(), list.substr(i + 1)));
    if (separates) {
      recipes.emplace_back();
    } else {
      recipes.back() += c;
    }
  }
  std::erase_if(recipes, [](const std::string& text) { return text.empty(); });
  return recipes;
}

RowSpec parse_row(const std::string& text) {
  if (text.starts_with(kStockPrefix)) return parse_stock(text);
  try {
    RowSpec row;
    row.text = text;
    row.recipe = parse_layer_recipes(text);
    // The programs that get the recipe may run in another directory.
    for (LayerRecipes::Rule& rule : row.recipe->rules) {
      std::string& file = rule.recipe.file;
      if (!file.empty()) file = std::filesystem::absolute(file).string();
    }
    return row;
  } catch (const Error& error) {
    throw CliError(Exit::usage, error.what());
  }
}

std::vector<RowSpec> parse_rows(const std::vector<std::string>& lists) {
  std::vector<std::string> texts = {"stock:f16"};
  std::vector<std::string> given = split_all(lists);
  if (given.empty()) given = default_texts();
  for (std::string& text : given) {
    if (std::find(texts.begin(), texts.end(), text) == texts.end()) texts.push_back(std::move(text));
  }
  std::vector<RowSpec> rows;
  rows.reserve(texts.size());
  for (const std::string& text : texts) rows.push_back(parse_row(text));
  return rows;
}

std::vector<LayerRecipes> parse_recipe_lists(const std::vector<std::string>& lists) {
  std::vector<LayerRecipes> recipes;
  for (const std::string& text : split_all(lists)) {
    RowSpec row = parse_row(text);
    if (row.stock()) throw CliError(Exit::usage, fmt::format("'{}' is a type of the host; here are recipes", text));
    recipes.push_back(*std::move(row.recipe));
  }
  if (recipes.empty()) {
    recipes.push_back(parse_layer_recipes("f16"));
    for (const std::string& text : own_recipes()) recipes.push_back(parse_layer_recipes(text));
  }
  return recipes;
}

}  // namespace kvant::cli
