// What a call fits from its keys: level tables and the shared outlier thresholds.
#pragma once

#include <cstdint>
#include <vector>

#include "kvant/array.hpp"
#include "methods/kvquant/matrix.hpp"
#include "methods/kvquant/packed.hpp"

namespace kvant::kvquant {

// The rows that a fit sees: stored ones, then some of the incoming call.
struct FitRows {
  const ConstArray* keys = nullptr;  // [B, H, S, D]
  std::int64_t first = 0;
  std::int64_t rows = 0;
  const PackedSide* stored = nullptr;
  std::int64_t stored_first = 0;
  std::int64_t stored_rows = 0;
  const float* stored_levels = nullptr;  // of the last coded run

  std::int64_t total() const { return rows + stored_rows; }
  void load(std::int64_t batch, std::int64_t head, Matrix& out) const;
};

// Per channel the k-th largest |k| of all rows, batch elements and heads, k as in outlier_count; empty when there is
// none (fraction <= 0 or fewer than 2 values).
std::vector<float> fit_thresholds(const FitRows& rows, double fraction, int threads);

// [heads][levels][channels] from batch element 0.
std::vector<float> fit_key_levels(const FitRows& rows, int level_count, double fraction, std::int64_t sweeps,
                                  int threads);

}  // namespace kvant::kvquant
