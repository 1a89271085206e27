// The uniform grid of one row (a key channel of a page, or a value token): endpoints as the cache stores them, and
// codes.
#pragma once

#include <cstdint>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::cache {

struct Endpoints {
  float min = 0;
  float max = 0;
};

// Codes rows on the grid from their smallest to their largest value or, with least squares, on a better one: the
// straight line that fits the values to those codes best (in double), rounded to the cache's type, and the row is coded
// again on the grid as stored (the shrinkage of WaterSIC, arXiv 2603.04956, but before the last rounding; afterwards it
// would flatten the softmax). Of the two grids the one with the smaller squared error is kept.
class RowCoder {
 public:
  RowCoder(DType dtype, bool least_squares, int longest);

  // Writes codes 0..levels of x[0..n), n >= 1, and returns the endpoints, which are values of the cache's type.
  Endpoints code(const float* x, int n, int levels, std::uint8_t* codes);
  // Smallest and largest of x[0..n) as the cache stores them; a zero is plus zero.
  Endpoints range(const float* x, int n) const;
  // Codes on a grid of stored endpoints.
  void code_on(const float* x, int n, int levels, Endpoints grid, std::uint8_t* codes) const;

 private:
  float stored(double x) const;

  DType dtype_;
  bool least_squares_;
  float limit_;
  std::vector<std::uint8_t> second_;
};

}  // namespace kvant::cache
