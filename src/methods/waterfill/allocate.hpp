// Reverse water-filling: a width for every key channel of a page under a fixed sum.
#pragma once

#include <cstdint>

namespace kvant::catalog {

constexpr int kRun = 4;  // channels that share a width: the depth step of a plane (tiles::kQuad)

// Orders the channels by energy (ties: the lower channel first) and gives every four neighbours of that order one
// width, so that `width - log4(energy of the four)` is as level as whole bits in low..high allow and the widths of all
// fours sum to `budget`, or to the most that `high` allows. Each bit goes where 4^-width * energy is largest, to the
// first on ties.
//
// energy [depth] >= 0 and finite, depth a multiple of four; widths [depth], out, by channel.
// low * depth / 4 <= budget. Only sums, products by powers of two and comparisons in double: the same widths
// everywhere.
void allocate_widths(const double* energy, int depth, int low, int high, int budget, std::uint8_t* widths);

}  // namespace kvant::catalog
