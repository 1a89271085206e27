#include "kvant/group_quant.hpp"

#include <algorithm>
#include <vector>

#include "base/threads.hpp"
#include "exact/elements.hpp"
#include "exact/group.hpp"
#include "exact/head_rows.hpp"

namespace kvant {
namespace {

using exact::at;
using exact::ceil_divide;

// The matrices of an array [N, D] or [B, N, D].
struct Matrices {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

Matrices matrices_of(const char* name, int rank, const Extents& extent) {
  if (rank != 3) exact::require_rank(name, rank, 2);
  return rank == 3 ? Matrices{extent[0], extent[1], extent[2]} : Matrices{1, extent[0], extent[1]};
}

void check_settings(int bits, std::int64_t group_size) {
  exact::require_bits("bits", bits);
  exact::require_group_size("group_size", group_size);
}

// Where element (batch, i, j, k) of [.., I, J, K] lies; the batch axis exists when rank is 4.
template <typename T>
T& element(const Strided<T>& grid, std::int64_t batch, std::int64_t i, std::int64_t j, std::int64_t k) {
  const int first = grid.rank - 3;
  const std::int64_t lead = first == 1 ? batch * grid.stride[0] : 0;
  return grid.data[lead + i * grid.stride[at(first)] + j * grid.stride[at(first + 1)] + k * grid.stride[at(first + 2)]];
}

template <typename T>
void require_grid(const char* name, const Strided<T>& grid, int rank, const Matrices& m, std::int64_t groups,
                  std::int64_t rows) {
  exact::require_rank(name, grid.rank, rank);
  const int first = rank - 3;
  if (first == 1) exact::require_extent(name, 0, grid.extent[0], m.batch);
  exact::require_extent(name, first, grid.extent[at(first)], groups);
  exact::require_extent(name, first + 1, grid.extent[at(first + 1)], rows);
  exact::require_extent(name, first + 2, grid.extent[at(first + 2)], m.columns);
}

}  // namespace

void group_quant_codes(const ConstArray& x, int bits, std::int64_t group_size, const Strided<std::uint8_t>& codes,
                       const Strided<float>& scale, const Strided<float>& zero) {
  check_settings(bits, group_size);
  const Matrices m = matrices_of("x", x.rank, x.extent);
  const std::int64_t groups = ceil_divide(m.rows, group_size);
  require_grid("codes", codes, x.rank + 1, m, groups, group_size);
  require_grid("scale", scale, x.rank + 1, m, groups, 1);
  require_grid("zero", zero, x.rank + 1, m, groups, 1);
  base::parallel_for(m.batch, 0, [&](std::int64_t b, int) {
    const exact::HeadRows rows(x, b, 0);
    exact::GroupGrid grid(m.columns, bits);
    std::vector<std::uint8_t> row(static_cast<std::size_t>(m.columns));
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t count = std::min(group_size, m.rows - g * group_size);
      const exact::ConstRows group = rows.all().part(g * group_size, count);
      grid.fit(group);
      for (std::int64_t c = 0; c < m.columns; ++c) {
        element(scale, b, g, 0, c) = grid.scale()[c];
        element(zero, b, g, 0, c) = grid.min()[c];
      }
      for (std::int64_t r = 0; r < group_size; ++r) {
        if (r < count) grid.encode(group.part(r, 1), row.data());
        for (std::int64_t c = 0; c < m.columns; ++c) element(codes, b, g, r, c) = row[static_cast<std::size_t>(c)];
      }
    }
  });
}

void group_dequant_codes(const Strided<const std::uint8_t>& codes, const Strided<const float>& scale,
                         const Strided<const float>& zero, const Array& out) {
  const Matrices m = matrices_of("out", out.rank, out.extent);
  exact::require_rank("codes", codes.rank, out.rank + 1);
  const std::int64_t group_size = codes.extent[at(codes.rank - 2)];
  exact::require_group_size("group size (axis -2 of codes)", group_size);
  const std::int64_t groups = ceil_divide(m.rows, group_size);
  require_grid("codes", codes, out.rank + 1, m, groups, group_size);
  require_grid("scale", scale, out.rank + 1, m, groups, 1);
  require_grid("zero", zero, out.rank + 1, m, groups, 1);
  base::parallel_for(m.batch, 0, [&](std::int64_t b, int) {
    std::vector<float> row(static_cast<std::size_t>(m.columns));
    for (std::int64_t n = 0; n < m.rows; ++n) {
      const std::int64_t g = n / group_size;
      for (std::int64_t c = 0; c < m.columns; ++c) {
        const auto code = static_cast<float>(element(codes, b, g, n % group_size, c));
        row[static_cast<std::size_t>(c)] = code * element(scale, b, g, 0, c) + element(zero, b, g, 0, c);
      }
      exact::row_of(out, b, 0, n).store(row.data());
    }
  });
}

void group_quant_dequant(const ConstArray& x, int bits, std::int64_t group_size, const Array& out) {
  check_settings(bits, group_size);
  const Matrices m = matrices_of("x", x.rank, x.extent);
  exact::require_rank("out", out.rank, x.rank);
  for (int axis = 0; axis < x.rank; ++axis)
    exact::require_extent("out", axis, out.extent[at(axis)], x.extent[at(axis)]);
  base::parallel_for(m.batch, 0, [&](std::int64_t b, int) {
    const exact::HeadRows rows(x, b, 0);
    exact::GroupGrid grid(m.columns, bits);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(m.columns));
    exact::FloatRows result(1, m.columns);
    for (std::int64_t first = 0; first < m.rows; first += group_size) {
      const std::int64_t count = std::min(group_size, m.rows - first);
      const exact::ConstRows group = rows.all().part(first, count);
      grid.fit(group);
      for (std::int64_t r = 0; r < count; ++r) {
        grid.encode(group.part(r, 1), codes.data());
        grid.decode(codes.data(), result.writable(1));
        exact::row_of(out, b, 0, first + r).store(result.row(0));
      }
    }
  });
}

}  // namespace kvant
