// Error feedback for keys: channels are rounded one after the other, and each makes up for the errors of those before
// it as far as the queries cannot tell the two apart.
//
// What an error e of a key does to the scores is e' M e on average, M the second moment of the queries. With
// M = A' diag(d) A, A unit lower triangular in the order of rounding, that is the sum of d_i (e_i + sum_j<i A_ij
// e_j)^2: so channel i is best rounded at its value minus sum_j<i A_ij e_j (Babai's nearest plane; GPTQ, arXiv
// 2210.17323, does this to weights, WaterSIC, arXiv 2603.04956, to keys). The grids are those fitted without it.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/grid.hpp"

namespace kvant::cache {

// Entries of the lower triangle of a second moment, row by row.
constexpr std::size_t triangle_size(int channels) {
  return static_cast<std::size_t>(channels) * static_cast<std::size_t>(channels + 1) / 2;
}

// The largest magnitude of a query in a second moment; beyond it sums over a long sequence would leave float.
constexpr float kLargestQuery = 0x1p50F;

// Adds q q' of the queries [count][channels], in this order, to the lower triangle. Float sums in a fixed order: the
// same on every kernel set.
void add_moments(const float* queries, int count, int channels, float* triangle);

// A page's factors A and the order of rounding.
class ErrorFeedback {
 public:
  // moment: a lower triangle; step: the step of each channel's grid, 0 for constant channels.
  ErrorFeedback(const float* moment, const std::vector<float>& step);

  // The channel that is rounded i-th: those first whose errors weigh most, step^2 M_cc, ties by channel.
  int channel(int i) const { return order_[static_cast<std::size_t>(i)]; }
  // Moves the values x[n] of that channel to where they are best rounded. errors: [i][stride], values minus what they
  // were rounded to of the channels before, in the order of rounding.
  void correct(int i, const float* errors, std::int64_t stride, int n, Endpoints grid, float* x) const;

 private:
  void factorize(const float* moment);

  int channels_;
  std::vector<int> order_;
  std::vector<float> factors_;  // A, [channels][channels] in the order of rounding, below the diagonal
};

}  // namespace kvant::cache
