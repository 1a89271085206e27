#include "bench/cases.hpp"

#include <algorithm>
#include <regex>
#include <utility>

namespace kvant::bench {
namespace {

constexpr std::int64_t kCachedBytes = 512 << 10;  // of f16: half of a usual second-level cache
constexpr std::int64_t kL3Bytes = 8 << 20;        // of f16: beyond the second level, within the third
constexpr std::int64_t kMemoryTokens = 8192;
constexpr int kPageTokens = 128;
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

std::int64_t tokens_at(const Options& options, int dim, Place place) {
  if (options.tokens > 0) return options.tokens;
  if (place == Place::memory) return kMemoryTokens;
  const std::int64_t token_bytes = std::int64_t{4} * options.heads * dim;
  return std::max<std::int64_t>((place == Place::cache ? kCachedBytes : kL3Bytes) / token_bytes / 256, 1) * 256;
}

Case threads_case(Case attend) {
  attend.what = What::threads;
  return attend;
}

void add_attend(const Options& options, const Case& base, std::vector<Case>& cases) {
  Case c = base;
  c.what = What::attend;
  for (c.group = 0; const int group : options.groups) {
    c.group = group;
    for (const int rows : options.rows) {
      c.rows = rows;
      for (const Place place : {Place::cache, Place::l3, Place::memory}) {
        // Many rows use what they read so often that where it comes from does not show.
        if (place != Place::cache && rows > 8) continue;
        c.place = place;
        c.tokens = tokens_at(options, c.dim, place);
        if (c.rows > c.tokens) continue;
        cases.push_back(c);
        if (options.threads > 0 && place == Place::memory) cases.push_back(threads_case(c));
      }
    }
  }
}

// Kernels alone, one head: as many pages as the context of the place has.
void add_kernels(const Options& options, int dim, std::vector<Case>& cases) {
  for (const int group : options.groups) {
    for (const int rows : options.rows) {
      if (rows > 8) continue;  // a page is multiplied by the vectors of a block, about 96 at most
      for (const Place place : {Place::cache, Place::l3, Place::memory}) {
        Case c;
        c.dim = dim;
        c.group = group;
        c.rows = rows;
        c.place = place;
        c.tokens = tokens_at(options, dim, place) / kPageTokens * kPageTokens;
        if (place == Place::memory)
          c.tokens = std::max(c.tokens, options.ring_bytes / 2 / dim / kPageTokens * kPageTokens);
        for (c.what = What::score; c.what != What::softmax;
             c.what = c.what == What::score ? What::mix : What::softmax) {
          for (const int width : {0, 1, 2, 3, 4, 8}) {
            c.width = width;
            c.label = width == 0 ? "f16" : std::to_string(width) + "-bit";
            cases.push_back(c);
          }
        }
        c.what = What::softmax;
        c.label = "f32";
        if (place == Place::cache && dim == options.dims.front()) cases.push_back(c);
      }
    }
  }
}

}  // namespace

const char* name_of(What what) {
  constexpr const char* kNames[] = {"attend", "threads", "seal", "write", "score", "mix", "softmax"};
  return kNames[static_cast<int>(what)];
}

const char* name_of(Place place) {
  constexpr const char* kNames[] = {"cache", "l3", "memory"};
  return kNames[static_cast<int>(place)];
}

std::string Case::name() const {
  std::string text = std::string(name_of(what)) + "/" + label + "/d" + std::to_string(dim);
  if (is_attend() || is_kernel()) {
    text += "/g" + std::to_string(group) + "/r" + std::to_string(rows) + "/" + name_of(place);
  }
  return text;
}

std::vector<Case> make_cases(const Options& options) {
  const std::regex filter(options.filter);
  const std::vector<Named> recipes = named_recipes(options);
  std::vector<Case> cases;
  for (const int dim : options.dims) {
    if (options.kernels) add_kernels(options, dim, cases);
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
