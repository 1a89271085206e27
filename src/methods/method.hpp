// What a method is to the layers above: which planes the tiles of a page have, and which channels get which width.
// Adding a method: its folder with one Method, and one line in src/methods/list.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/layout.hpp"
#include "kvant/recipe.hpp"
#include "kvant/types.hpp"

namespace kvant::catalog {

// One plane of a tile: `bits` at position `shift` of the codes of the first `depth` stored depth indices.
struct PlaneSpec {
  int bits = 0;
  int shift = 0;
  int depth = 0;
};

// What a method asks of a tile; src/cache/layout.cpp places it. Rows and depth are given.
struct TileSpec {
  int rows = 0;
  int depth = 0;
  std::vector<PlaneSpec> planes;  // those of every page; empty with a budget
  bool sorted = false;            // channels are stored by width, in an order of the page's own
  // Widths low..high that differ from page to page and sum to `budget` over the fours of channels; 0: fixed planes.
  int low = 0;
  int high = 0;
  int budget = 0;
  int rotation = 1;          // block of the Hadamard rotation of the rows
  bool shared_grid = false;  // one grid per depth index for all KV heads
  bool least_squares = false;
  bool feedback = false;            // keys: TileLayout::feedback
  std::vector<std::uint8_t> table;  // TileLayout::table
  double outliers = 0;              // share of each vector that is kept beside the codes, half of it at each end
  int salient = 0;  // given: the first places of a page, those of its salient tokens; 0 where tokens lie in cell order
  std::vector<PlaneSpec> rest_planes;      // keys: planes of the other tokens, which then are a tile of their own
  bool channel_factors = false;            // values: channels are divided by the root of their largest magnitude
  std::vector<std::uint8_t> coding_table;  // TileLayout::coding_table
  std::vector<float> range_min;            // keys with calibrated ranges: [kv_heads][channels]
  std::vector<float> range_max;
};

// How a method tells the tokens of a page apart.
struct TokenClasses {
  double salient = 0;  // share of salient tokens
  Saliency saliency = Saliency::norm;
  bool operator==(const TokenClasses&) const = default;
};

// A page's keys of one head, for the choice of widths.
struct KeyPage {
  const TileLayout& layout;
  const float* tile;  // [channels][stride]
  std::int64_t stride;
  int rows;          // tokens, sinks left out
  const float* min;  // [channels]
  const float* max;
  const double* queries;  // [channels] sums of squares of the queries so far; null where none was seen

  const float* channel(int c) const { return tile + c * stride; }
  int channels() const { return layout.depth; }
};

// How one side (keys or values) of a method is written in a recipe's text.
template <typename Part>
struct Side {
  Part defaults;                     // what "k=NAME" means
  std::vector<std::string> options;  // names that set() accepts, the bits (k or v) included
  // Reads one option; false if the side has no such option. Throws Error(invalid_argument) for a bad value.
  bool (*set)(Part& part, std::string_view option, std::string_view value) = nullptr;
  std::string (*bits)(const Part& part) = nullptr;     // "4", or "" where the method has no such option
  std::string (*options_text)(const Part&) = nullptr;  // the other options, "boost=0.25"
  void (*validate)(const Part& part) = nullptr;
  TokenClasses (*classes)(const Part& part) = nullptr;  // null: all tokens of a page are alike
  bool calibrated = false;                              // its levels may come from a calibration file
};

struct KeySide : Side<KeyRecipe> {
  // Fills the spec of the key tile of one head of a page; null for rows that are never sealed. Throws
  // Error(invalid_argument) for head sizes that the method cannot store.
  void (*tile)(const KeyRecipe& keys, TileSpec& spec) = nullptr;
  // Sorted tiles: the width of each channel of a page, whatever the tile's planes or budget allow.
  void (*choose_widths)(const KeyRecipe& keys, const KeyPage& page, std::uint8_t* widths) = nullptr;
  std::string (*remark)(const KeyRecipe& keys) = nullptr;  // for the status; null: nothing to say
  // True when choose_widths wants the statistics of the queries; null: never.
  bool (*uses_queries)(const KeyRecipe& keys) = nullptr;
  // True when pages hold the keys as they were before RoPE; null: never.
  bool (*before_rope)(const KeyRecipe& keys) = nullptr;
};

struct ValueSide : Side<ValueRecipe> {
  void (*tile)(const ValueRecipe& values, TileSpec& spec) = nullptr;
};

struct Method {
  std::string name;
  std::string summary;
  Recipe defaults;  // what the method's name alone means; its values may be those of another method
  std::optional<KeySide> keys;
  std::optional<ValueSide> values;
};

// Planes whose bits sum to `width` over all of `depth`: 4-bit planes first (8 = 4 + 4), then 2, then 1 (3 = 2 + 1).
std::vector<PlaneSpec> uniform_planes(int width, int depth);

// Every method, in the order of documentation.
const std::vector<Method>& list();
// Throws Error(invalid_argument) naming the choices.
const Method& find(std::string_view name);

TileSpec key_tile(const Recipe& recipe, int channels);
TileSpec value_tile(const Recipe& recipe, int channels);
bool uses_queries(const Recipe& recipe);
bool before_rope(const Recipe& recipe);
// The classes that either side asks for; validate() sees to it that both sides ask for the same.
std::optional<TokenClasses> token_classes(const Recipe& recipe);
// Salient tokens of a page: the rounded share, at least one and not all; 0 without classes.
int salient_tokens(const Recipe& recipe);

// ---- calibration files (src/methods/kvquant/calibrated.cpp)

// True when a side of the recipe takes its levels from a file where there is one.
bool may_be_calibrated(const Recipe& recipe);
// Fills in the digest of the recipe's file where it is not given.
void find_digest(Recipe& recipe);
// Throws Error(invalid_argument) unless the file can be read, has the digest, and belongs to a side that uses it.
void check_file(const Recipe& recipe);
// Puts the levels and ranges of the recipe's layer into the tiles. Throws Error(invalid_argument) when the file is of
// another geometry or another share of outliers, or the layer is not said.
void calibrate(const Recipe& recipe, const CacheShape& shape, TileSpec& keys, TileSpec& values);
// How the levels of a recipe with tables came about; "" for others.
std::string describe_levels(const Recipe& recipe);

// The side of the method that a part belongs to.
const KeySide& side_of(const KeyRecipe& keys);
const ValueSide& side_of(const ValueRecipe& values);

// ---- shared by the methods' text forms

// Throws Error(invalid_argument) naming key, value and range.
int read_int(std::string_view key, std::string_view value, int low, int high);
double read_number(std::string_view key, std::string_view value, double low, double high);
// Throws unless value is one of the choices.
void check_choice(const char* key, int value, std::initializer_list<int> choices);
// Throws unless low <= value <= high.
void check_number(const char* key, double value, double low, double high);
// The shortest text that reads back as the number.
std::string number_text(double value);
[[noreturn]] void bad_value(std::string_view key, std::string_view value, const std::string& allowed);

}  // namespace kvant::catalog
