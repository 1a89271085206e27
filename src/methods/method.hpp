// What a method is to the layers above: which planes the tiles of a page have, and which channels a gathered plane
// takes. Adding a method: its folder with one Method, and one line in src/methods/list.cpp.
#pragma once

#include <cstdint>
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

struct Method {
  MethodInfo info;
  // Reads one key=value of the text form into the recipe; false if the method has no such key.
  // Throws Error(invalid_argument) for a bad value.
  bool (*set)(Recipe& recipe, std::string_view key, std::string_view value) = nullptr;
  std::string (*text)(const Recipe& recipe) = nullptr;
  Recipe (*defaults)() = nullptr;
  void (*validate)(const Recipe& recipe) = nullptr;
  // Tiles of one head of a page; rows and depth are the caller's. Both null for a method that never seals.
  std::vector<PlaneSpec> (*key_planes)(const Recipe& recipe, int channels) = nullptr;
  std::vector<PlaneSpec> (*value_planes)(const Recipe& recipe, int tokens) = nullptr;
  // Chooses the index list of a key tile: tile is [depth][stride] float, rows tokens each. Null: no gathered planes.
  void (*choose_keys)(const float* tile, std::int64_t stride, int rows, int depth, int count,
                      std::uint16_t* index) = nullptr;
};

// Planes whose bits sum to `width` over all of `depth`: 4-bit planes first (8 = 4 + 4), then 2, then 1 (3 = 2 + 1).
std::vector<PlaneSpec> uniform_planes(int width, int depth);

// Every method, in the order of documentation.
const std::vector<Method>& list();
// Throws Error(invalid_argument) naming the choices.
const Method& find(std::string_view name);

TileSpec key_tile(const Recipe& recipe, int channels);
TileSpec value_tile(const Recipe& recipe, int channels);

// ---- shared by the methods' text forms

// Reads the keys that every quantizing method has: sink, window, page, x. False if the key is none of them.
bool set_common(Recipe& recipe, std::string_view key, std::string_view value);
std::string common_text(const Recipe& recipe);
// Throws Error(invalid_argument) naming key, value and range.
int read_int(std::string_view key, std::string_view value, int low, int high);
double read_share(std::string_view key, std::string_view value);
// Throws unless value is one of the choices.
void check_choice(const char* key, int value, std::initializer_list<int> choices);
void validate_common(const Recipe& recipe);

}  // namespace kvant::catalog
