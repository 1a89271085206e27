// Rows coded with a table of levels, their outliers kept apart (KVQuant, arXiv 2401.18079, sections 3.3 and 3.4).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cache/grid.hpp"
#include "cache/tile.hpp"

namespace kvant::cache {

// Codes of one row after another. The range is that of the values that are no outliers: the smallest and the largest
// per_end of the row are left out (fewer in rows of less than 2 * per_end + 1 values), and outliers are what lies
// beyond it, so that of equal values none is.
class TableCoder {
 public:
  // `ends`: outliers get the code of the end that they are beyond, as keys do, else that of the middle level.
  TableCoder(const TileLayout& tile, bool ends);

  // Writes the codes of x[0..n), n >= 1, and returns the range. A value goes to the level next to it on the grid of
  // kTableSteps steps, the upper one of two.
  // Where `given` is not empty, it is the range: of the values beyond it only the 2 * per_end farthest are outliers
  // then (ties: the lower index), the others get the code of their end.
  Endpoints code(const float* x, int n, std::uint8_t* codes, Endpoints given = {});

  struct Outlier {
    int index = 0;
    float value = 0;
  };
  // Those of the last row, ascending.
  const std::vector<Outlier>& outliers() const { return outliers_; }

 private:
  Endpoints inner_range(const float* x, int n);
  void keep_farthest(Endpoints range);

  int per_end_;
  int middle_;  // code of outliers; negative: the end's
  std::array<std::uint8_t, kTableSteps + 1> nearest_;
  std::vector<float> largest_;   // of the row so far, descending
  std::vector<float> smallest_;  // ascending
  std::vector<Outlier> outliers_;
};

// The code whose level stands for an outlier of a value tile: the upper one of the two in the middle.
int middle_code(const TileLayout& tile);

// The code of each step of the grid: that of the nearest level, the upper one of two.
std::array<std::uint8_t, kTableSteps + 1> nearest_codes(const TileLayout& tile);

// The calibrated range of a key channel in the cache's type, as all endpoints are; empty where there is none.
Endpoints given_range(DType dtype, const TileLayout& tile, int head, int channel);

// Writes the slots of key channel `depth`: rows ascending, then unused ones.
void store_key_outliers(const TileLayout& tile, DType dtype, int depth, float max,
                        const std::vector<TableCoder::Outlier>& outliers, std::byte* head_block);

// The outliers of the value tiles of all heads, collected token by token.
class ValueOutliers {
 public:
  ValueOutliers(const TileLayout& tile, int heads) : tile_(tile), heads_(static_cast<std::size_t>(heads)) {}
  // Indices run over the channels of all heads; places[head] is where the token lies in that head's tile.
  void add(const std::vector<int>& places, const std::vector<TableCoder::Outlier>& outliers);
  void store(DType dtype, std::byte* block);

 private:
  struct Entry {
    int place;
    int channel;
    float value;
  };
  const TileLayout& tile_;
  std::vector<std::vector<Entry>> heads_;
};

// What each of a list's slots adds to its code's level: value - level, 0 for unused slots. `min`, `max` and `step` per
// depth index, `depths` of each slot; values as floats.
void subtract_levels(const TileView& view, const OutlierList& list, const std::uint16_t* depths, const float* min,
                     const float* max, const float* step, float* values);

}  // namespace kvant::cache
