// The text form of recipes.
#include "kvant/recipe.hpp"

#include "base/checked.hpp"
#include "methods/method.hpp"

namespace kvant {
namespace {

[[noreturn]] void bad_key(const catalog::Method& method, std::string_view key) {
  std::string choices;
  for (const std::string& name : method.info.keys) choices += (choices.empty() ? "" : ", ") + name;
  base::fail(ErrorCode::invalid_argument, "recipe key '" + std::string(key) + "' does not exist in method '" +
                                              method.info.name + "'; choices: " + (choices.empty() ? "none" : choices));
}

void set_pair(const catalog::Method& method, Recipe& recipe, std::string_view pair, std::vector<std::string>& seen) {
  const std::size_t equals = pair.find('=');
  const std::string_view key = pair.substr(0, equals);
  if (equals == std::string_view::npos) {
    base::fail(ErrorCode::invalid_argument, "recipe part '" + std::string(pair) + "' is not of the form key=value");
  }
  for (const std::string& earlier : seen) {
    if (earlier == key) base::fail(ErrorCode::invalid_argument, "recipe key '" + earlier + "' is given twice");
  }
  seen.emplace_back(key);
  if (!method.set(recipe, key, pair.substr(equals + 1))) bad_key(method, key);
}

}  // namespace

Recipe parse_recipe(std::string_view text) {
  const std::size_t colon = text.find(':');
  const catalog::Method& method = catalog::find(text.substr(0, colon));
  Recipe recipe = method.defaults();
  if (colon == std::string_view::npos) return recipe;
  std::string_view rest = text.substr(colon + 1);
  std::vector<std::string> seen;
  while (true) {
    const std::size_t comma = rest.find(',');
    set_pair(method, recipe, rest.substr(0, comma), seen);
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
  }
  method.validate(recipe);
  return recipe;
}

std::string to_text(const Recipe& recipe) {
  validate(recipe);
  const std::string parameters = catalog::find(recipe.method).text(recipe);
  return parameters.empty() ? recipe.method : recipe.method + ":" + parameters;
}

void validate(const Recipe& recipe) {
  catalog::find(recipe.method).validate(recipe);
}

const std::vector<MethodInfo>& methods() {
  static const std::vector<MethodInfo> infos = [] {
    std::vector<MethodInfo> result;
    for (const catalog::Method& method : catalog::list()) {
      result.push_back(method.info);
      result.back().default_recipe = to_text(method.defaults());
    }
    return result;
  }();
  return infos;
}

}  // namespace kvant
