// Levels for values in [-1, 1]: weighted k-means in one dimension, solved exactly on the grid that levels lie on.
#pragma once

#include <array>

#include "kvant/calibration.hpp"

namespace kvant::kvquant {

constexpr int kSteps = 254;  // of the grid from -1 to 1

// Sums per grid point, so that millions of values take no memory and their order does not matter.
class LevelFit {
 public:
  // A value in [-1, 1] and its weight >= 0; both finite.
  void add(double value, double weight);
  // For 2, 3 and 4 bits. An encoder rounds values to the grid before it looks for the nearest level: the levels are the
  // best ones for that, found by dynamic programming over runs of grid points. Without any weight they are evenly
  // spaced.
  LevelTables tables() const;

 private:
  struct Sums {
    double weight = 0;
    double product = 0;  // weight * value
    double square = 0;   // weight * value^2
  };
  // Points 0..i-1.
  using Prefix = std::array<Sums, kSteps + 2>;
  struct Run;

  static Run run_of(const Prefix& prefix, int first, int last);
  static LevelTable normed(const Prefix& prefix, const std::array<Run, 16>& runs, int count);

  std::array<Sums, kSteps + 1> points_{};
};

}  // namespace kvant::kvquant
