// Levels for values in [-1, 1]: weighted k-means in one dimension.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace kvant::kvquant {

// Sums of weights in fine bins: k-means over millions of values then takes milliseconds, and the result does not depend
// on their order. Bins are 1/60 of a step of the 255-point grid that levels are rounded to in the end.
class Codebook {
 public:
  Codebook();
  // A value in [-1, 1] and its weight >= 0.
  void add(double value, double weight);
  // 2^bits levels as steps 0..254, strictly ascending: Lloyd's iteration from the weighted quantiles until nothing
  // moves. Bins without weight attract nothing; with no weight at all levels are evenly spaced.
  std::array<std::uint8_t, 16> levels(int bits) const;

 private:
  std::vector<double> weight_;
  std::vector<double> product_;  // weight * value
};

}  // namespace kvant::kvquant
