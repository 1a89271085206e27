// What the functions and the cache of ZipCache share.
#pragma once

#include <cstdint>

#include "kvant/zipcache.hpp"

namespace kvant::zipcache {

// max(0, min(tokens, ceil(tokens * hi_fraction))). Error(invalid_argument) when hi_fraction is NaN.
std::int64_t hi_count(std::int64_t tokens, double hi_fraction);

// mask[t] = 1 for the `hi` largest norms, ties to the later token; NaN counts as the largest.
void mark_salient(const float* norms, std::int64_t tokens, std::int64_t hi, std::uint8_t* mask);

// The reference's price of a matrix with `hi` rows in hi_bits and `lo` rows in lo_bits, mask included.
std::int64_t mixed_bytes(std::int64_t hi, std::int64_t lo, std::int64_t dim, int hi_bits, int lo_bits,
                         std::int64_t group_size);

}  // namespace kvant::zipcache
