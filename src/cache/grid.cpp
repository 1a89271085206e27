#include "cache/grid.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "base/half.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {

using tiles::kernels;

RowCoder::RowCoder(DType dtype, bool least_squares, int longest)
    : dtype_(dtype),
      least_squares_(least_squares),
      limit_(base::largest_stored(dtype)),
      second_(least_squares ? static_cast<std::size_t>(longest) : 0) {}

// Endpoints stay within what images accept: a line that leaves the range of the type is cut at its end.
float RowCoder::stored(double x) const {
  std::array<std::byte, sizeof(float)> bytes{};
  base::store_float(bytes.data(), dtype_, 0, static_cast<float>(std::clamp<double>(x, -limit_, limit_)));
  return base::load_float(bytes.data(), dtype_, 0);
}

void RowCoder::code_on(const float* x, int n, int levels, Endpoints grid, std::uint8_t* codes) const {
  kernels().quantize(x, n, grid.min, tiles::grid_step(grid.min, grid.max, levels), levels, codes);
}

Endpoints RowCoder::range(const float* x, int n) const {
  Endpoints range;
  kernels().min_max(x, n, &range.min, &range.max);
  return {stored(range.min) + 0.0F, stored(range.max) + 0.0F};  // which zero min_max finds depends on the registers
}

Endpoints RowCoder::code(const float* x, int n, int levels, std::uint8_t* codes) {
  const Endpoints range = this->range(x, n);
  code_on(x, n, levels, range, codes);
  if (!least_squares_) return range;

  const tiles::LineSums sums = kernels().line_sums(codes, x, n);
  const auto count = static_cast<double>(n);
  const auto code_sum = static_cast<double>(sums.code);
  const double variance = count * static_cast<double>(sums.code_square) - code_sum * code_sum;  // exact: whole numbers
  if (variance == 0) return range;
  const double step = (count * sums.product - code_sum * sums.value) / variance;
  const double base = (sums.value - step * code_sum) / count;
  const Endpoints line{stored(base), stored(base + levels * step)};
  if (!(line.max > line.min)) return range;
  code_on(x, n, levels, line, second_.data());
  const auto error = [&](const std::uint8_t* with, Endpoints grid) {
    return kernels().grid_error(with, x, n, grid.min, tiles::grid_step(grid.min, grid.max, levels));
  };
  if (!(error(second_.data(), line) < error(codes, range))) return range;
  std::memcpy(codes, second_.data(), static_cast<std::size_t>(n));
  return line;
}

}  // namespace kvant::cache
