#include "methods/waterfill/allocate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvant::catalog {

void allocate_widths(const double* energy, int depth, int low, int high, int budget, std::uint8_t* widths) {
  std::vector<int> order(static_cast<std::size_t>(depth));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return energy[a] > energy[b]; });

  struct Four {
    double left = 0;  // energy * 4^-width: what one more bit would mostly remove
    int width = 0;
  };
  std::vector<Four> fours(order.size() / kRun);
  for (std::size_t i = 0; i < fours.size(); ++i) {
    for (std::size_t c = 0; c < kRun; ++c) fours[i].left += energy[order[kRun * i + c]];
    fours[i].width = low;
  }
  const auto wants_more = [&](const Four& a, const Four& b) {
    if ((a.width < high) != (b.width < high)) return a.width >= high;
    return a.left < b.left;
  };
  for (int bits = budget - low * static_cast<int>(fours.size()); bits > 0; --bits) {
    Four& next = *std::max_element(fours.begin(), fours.end(), wants_more);
    if (next.width == high) break;
    ++next.width;
    next.left *= 0.25;
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    widths[order[i]] = static_cast<std::uint8_t>(fours[i / kRun].width);
  }
}

}  // namespace kvant::catalog
