// What a method is to the layers above: which planes the tiles of a page have, and which channels a gathered plane
// takes. Adding a method: its folder with one Method, and one line in src/methods/list.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/recipe.hpp"
#include "kvant/types.hpp"

namespace kvant::catalog {

// One plane of a tile: `bits` at position `shift` of the codes of `depth` depth indices; gathered planes take the first
// `depth` entries of the tile's index list instead of 0..depth-1.
struct PlaneSpec {
  int bits = 0;
  int shift = 0;
  int depth = 0;
  bool gathered = false;
};

struct TileSpec {
  int rows = 0;
  int depth = 0;
  std::vector<PlaneSpec> planes;
  int index_count = 0;  // entries of the index list, 0 without gathered planes

  // Bits of the code at a depth index that stands at `place` in the index list (or is not in it: place >= index_count).
  int width_at(int place) const {
    int width = 0;
    for (const PlaneSpec& plane : planes) width += !plane.gathered || place < plane.depth ? plane.bits : 0;
    return width;
  }
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
};

struct KeySide : Side<KeyRecipe> {
  // Planes of the key tile of one head of a page; null for rows that are never sealed.
  std::vector<PlaneSpec> (*planes)(const KeyRecipe& keys, int channels) = nullptr;
  // Chooses the index list of a key tile: tile is [depth][stride] float, rows tokens each. Null: no gathered planes.
  void (*choose)(const float* tile, std::int64_t stride, int rows, int depth, int count,
                 std::uint16_t* index) = nullptr;
};

struct ValueSide : Side<ValueRecipe> {
  std::vector<PlaneSpec> (*planes)(const ValueRecipe& values, int tokens) = nullptr;
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
