#include "bench/cases.hpp"

#include <algorithm>
#include <regex>
#include <utility>

namespace kvant::bench {
namespace {

constexpr std::int64_t kCachedBytes = 512 << 10;  // of f16: half of a usual second-level cache
constexpr std::int64_t kMemoryTokens = 8192;
constexpr std::int64_t kCodedTokens = 1024;  // sealed or written per call

using Named = std::pair<std::string, Recipe>;

// Everything is sealed (no window), so that a figure is that of one kind of page.
std::vector<Named> named_recipes(const Options& options) {
  std::vector<Named> recipes = {{"f16", parse_recipe("f16")}};
  for (const std::string& text : options.recipes) recipes.emplace_back(text, parse_recipe(text));
  if (!options.recipes.empty()) return recipes;
  for (const int bits : {2, 3, 4, 8}) {
    Recipe recipe = parse_recipe("kivi:window=0,sink=0");
    recipe.key = KiviKeys{bits};
    recipe.value = KiviValues{bits};
    recipes.emplace_back("kivi-" + std::to_string(bits), recipe);
  }
  recipes.emplace_back("kitty-25%", parse_recipe("kitty:boost=0.25,v=2,window=0,sink=0"));
  return recipes;
}

std::int64_t cached_tokens(const Options& options, int dim) {
  const std::int64_t token_bytes = std::int64_t{4} * options.heads * dim;
  return std::max<std::int64_t>(kCachedBytes / token_bytes / 256, 1) * 256;
}

void add_attend(const Options& options, const Case& base, std::vector<Case>& cases) {
  Case c = base;
  c.what = What::attend;
  for (c.group = 0; const int group : options.groups) {
    c.group = group;
    for (const int rows : options.rows) {
      c.rows = rows;
      for (const Place place : {Place::cache, Place::memory}) {
        // Many rows use what they read so often that where it comes from does not show.
        if (place == Place::memory && rows > 8) continue;
        c.place = place;
        const std::int64_t usual = place == Place::cache ? cached_tokens(options, c.dim) : kMemoryTokens;
        c.tokens = options.tokens > 0 ? options.tokens : usual;
        if (c.rows <= c.tokens) cases.push_back(c);
      }
    }
  }
}

}  // namespace

const char* name_of(What what) {
  return what == What::attend ? "attend" : (what == What::seal ? "seal" : "write");
}

const char* name_of(Place place) {
  return place == Place::cache ? "cache" : "memory";
}

std::string Case::name() const {
  std::string text = std::string(name_of(what)) + "/" + label + "/d" + std::to_string(dim);
  if (what == What::attend) {
    text += "/g" + std::to_string(group) + "/r" + std::to_string(rows) + "/" + name_of(place);
  }
  return text;
}

std::vector<Case> make_cases(const Options& options) {
  const std::regex filter(options.filter);
  const std::vector<Named> recipes = named_recipes(options);
  std::vector<Case> cases;
  for (const int dim : options.dims) {
    for (const auto& [label, recipe] : recipes) {
      Case c;
      c.label = label;
      c.recipe = recipe;
      c.dim = dim;
      add_attend(options, c, cases);
      c.tokens = kCodedTokens;
      c.what = What::write;
      cases.push_back(c);
      c.what = What::seal;
      if (recipe.quantizes()) cases.push_back(c);
    }
  }
  std::erase_if(cases, [&](const Case& c) { return !std::regex_search(c.name(), filter); });
  return cases;
}

}  // namespace kvant::bench
