// What the functions and the cache of the reference form share.
#pragma once

#include <cstdint>

#include "kvant/kitty.hpp"

namespace kvant::kitty {

// max(1, trunc(columns * hi_fraction)), at most columns. Error(invalid_argument) unless hi_fraction is finite.
std::int64_t hi_count(std::int64_t columns, double hi_fraction);

// mask[c] = 1 for the `hi` channels with the largest variance, ties to the lower channel, NaN last.
void hi_mask(const float* variance, std::int64_t columns, std::int64_t hi, std::uint8_t* mask);

void running_variance(const float* sum, const float* sum_of_squares, std::int64_t n, std::int64_t columns,
                      float* variance);

}  // namespace kvant::kitty
