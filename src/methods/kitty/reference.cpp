// The functions of the reference's Kitty module.
#include "methods/kitty/reference.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "base/threads.hpp"
#include "exact/columns.hpp"
#include "exact/elements.hpp"
#include "exact/group.hpp"
#include "exact/head_rows.hpp"
#include "exact/sums.hpp"

namespace kvant::kitty {
namespace {

using exact::at;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

// Channels by variance, descending; ties to the lower channel, NaN last.
std::vector<std::int64_t> ranked(const float* variance, std::int64_t columns) {
  std::vector<std::int64_t> order(size(columns));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [variance](std::int64_t a, std::int64_t b) {
    if (std::isnan(variance[b])) return !std::isnan(variance[a]);
    return variance[a] > variance[b];
  });
  return order;
}

// Quantizes and reconstructs the rows of one matrix; bits[c] = 0 leaves column c as it is.
void quantize_matrix(const ConstArray& keys, std::int64_t batch, const std::vector<std::uint8_t>& bits,
                     std::int64_t group_size, const Array& out) {
  const std::int64_t rows = keys.extent[at(keys.rank - 2)];
  const std::int64_t columns = keys.extent[at(keys.rank - 1)];
  const std::int64_t tile = std::min(group_size, rows);
  exact::GroupGrid grid(bits);
  exact::FloatRows values(tile, columns);
  exact::FloatRows results(1, columns);
  std::vector<std::uint8_t> codes(size(columns));
  for (std::int64_t first = 0; first < rows; first += group_size) {
    const std::int64_t count = std::min(tile, rows - first);
    for (std::int64_t r = 0; r < count; ++r) exact::row_of(keys, batch, 0, first + r).load(values.row(r));
    grid.fit(values.first(count));
    for (std::int64_t r = 0; r < count; ++r) {
      grid.encode(values.first(count).part(r, 1), codes.data());
      grid.decode(codes.data(), results.writable(1));
      for (std::int64_t c = 0; c < columns; ++c) {
        if (bits[size(c)] == 0) results.row(0)[c] = values.row(r)[c];
      }
      exact::row_of(out, batch, 0, first + r).store(results.row(0));
    }
  }
}

void check_settings(int hi_bit, int lo_bit, std::int64_t group_size) {
  exact::require_bits("hi_bit", hi_bit);
  exact::require_bits("lo_bit", lo_bit);
  exact::require_group_size("group_size", group_size);
}

void check_same_shape(const ConstArray& keys, const Array& out) {
  exact::require_rank("out", out.rank, keys.rank);
  for (int axis = 0; axis < keys.rank; ++axis) {
    exact::require_extent("out", axis, out.extent[at(axis)], keys.extent[at(axis)]);
  }
}

void mark(std::vector<std::uint8_t>& bits, const std::vector<std::int64_t>& indices, int width) {
  const auto columns = static_cast<std::int64_t>(bits.size());
  for (const std::int64_t index : indices) {
    if (index < -columns || index >= columns) {
      base::fail(ErrorCode::out_of_range, "channel index " + std::to_string(index) + " is outside -" +
                                              std::to_string(columns) + ".." + std::to_string(columns - 1));
    }
    bits[size(index < 0 ? index + columns : index)] = static_cast<std::uint8_t>(width);
  }
}

std::vector<float> load_vector(const char* name, const ConstArray& x, std::int64_t count) {
  exact::require_rank(name, x.rank, 1);
  exact::require_extent(name, 0, x.extent[0], count);
  std::vector<float> values(size(count));
  exact::ConstRow{x.data, x.type, 0, count, x.stride[0]}.load(values.data());
  return values;
}

}  // namespace

std::int64_t hi_count(std::int64_t columns, double hi_fraction) {
  if (!std::isfinite(hi_fraction)) {
    base::fail(ErrorCode::invalid_argument,
               "hi_fraction = " + std::to_string(hi_fraction) + " must be a finite number");
  }
  const double product = std::trunc(static_cast<double>(columns) * hi_fraction);
  return static_cast<std::int64_t>(std::clamp(product, 1.0, static_cast<double>(std::max<std::int64_t>(columns, 1))));
}

void hi_mask(const float* variance, std::int64_t columns, std::int64_t hi, std::uint8_t* mask) {
  std::fill_n(mask, columns, std::uint8_t{0});
  const std::vector<std::int64_t> order = ranked(variance, columns);
  for (std::int64_t i = 0; i < std::min(hi, columns); ++i) mask[order[size(i)]] = 1;
}

void running_variance(const float* sum, const float* sum_of_squares, std::int64_t n, std::int64_t columns,
                      float* variance) {
  const auto count = static_cast<float>(n);
  for (std::int64_t c = 0; c < columns; ++c) {
    if (n < 2) {
      variance[c] = 0;
      continue;
    }
    const float mean = sum[c] / count;
    const float spread = sum_of_squares[c] / count - mean * mean;
    variance[c] = spread < 0 ? 0.0F : spread;  // NaN stays
  }
}

ChannelRanks rank_channels_by_sensitivity(const ConstArray& keys, double hi_fraction) {
  exact::require_rank("keys", keys.rank, 2);
  const std::int64_t columns = keys.extent[1];
  const std::int64_t hi = hi_count(columns, hi_fraction);
  std::vector<float> means(size(columns));
  std::vector<float> variances(size(columns));
  exact::column_variances(exact::HeadRows(keys, 0, 0).all(), columns, means.data(), variances.data());
  if (keys.extent[0] > 0 && std::any_of(variances.begin(), variances.end(), [](float v) { return std::isnan(v); })) {
    base::fail(ErrorCode::not_finite, "keys: the variance of a channel is not a number (NaN or infinity in it)");
  }
  std::vector<std::uint8_t> mask(size(columns));
  hi_mask(variances.data(), columns, hi, mask.data());
  ChannelRanks ranks;
  for (std::int64_t c = 0; c < columns; ++c) (mask[size(c)] != 0 ? ranks.hi : ranks.lo).push_back(c);
  return ranks;
}

void quantize_mixed_channels(const ConstArray& keys, const std::vector<std::int64_t>& hi_indices,
                             const std::vector<std::int64_t>& lo_indices, const Array& out, int hi_bit, int lo_bit,
                             std::int64_t group_size) {
  check_settings(hi_bit, lo_bit, group_size);
  exact::require_rank("keys", keys.rank, 2);
  check_same_shape(keys, out);
  std::vector<std::uint8_t> bits(size(keys.extent[1]));
  mark(bits, hi_indices, hi_bit);
  mark(bits, lo_indices, lo_bit);
  quantize_matrix(keys, 0, bits, group_size, out);
}

void compute_running_variance(const ConstArray& key_sum, const ConstArray& key_sq_sum, std::int64_t n,
                              const Array& variance) {
  exact::require_rank("variance", variance.rank, 1);
  const std::int64_t columns = variance.extent[0];
  const std::vector<float> sum = load_vector("key_sum", key_sum, columns);
  const std::vector<float> squares = load_vector("key_sq_sum", key_sq_sum, columns);
  std::vector<float> result(size(columns));
  running_variance(sum.data(), squares.data(), n, columns, result.data());
  exact::Row{variance.data, variance.type, 0, columns, variance.stride[0]}.store(result.data());
}

void hi_mask_from_variance_batched(const ConstArray& variance, double hi_fraction, const Strided<std::uint8_t>& mask) {
  exact::require_rank("variance", variance.rank, 2);
  exact::require_rank("mask", mask.rank, 2);
  const std::int64_t columns = variance.extent[1];
  for (int axis = 0; axis < 2; ++axis) {
    exact::require_extent("mask", axis, mask.extent[at(axis)], variance.extent[at(axis)]);
  }
  const std::int64_t hi = hi_count(columns, hi_fraction);
  std::vector<float> row(size(columns));
  std::vector<std::uint8_t> flags(size(columns));
  for (std::int64_t n = 0; n < variance.extent[0]; ++n) {
    exact::row_of(variance, 0, 0, n).load(row.data());
    hi_mask(row.data(), columns, hi, flags.data());
    for (std::int64_t c = 0; c < columns; ++c) mask.data[n * mask.stride[0] + c * mask.stride[1]] = flags[size(c)];
  }
}

void quantize_mixed_channels_batched(const ConstArray& keys, const Strided<const std::uint8_t>& hi_mask,
                                     const Array& out, int hi_bit, int lo_bit, std::int64_t group_size) {
  check_settings(hi_bit, lo_bit, group_size);
  exact::require_rank("keys", keys.rank, 3);
  exact::require_rank("hi_mask", hi_mask.rank, 2);
  exact::require_extent("hi_mask", 0, hi_mask.extent[0], keys.extent[0]);
  exact::require_extent("hi_mask", 1, hi_mask.extent[1], keys.extent[2]);
  check_same_shape(keys, out);
  base::parallel_for(keys.extent[0], 0, [&](std::int64_t n, int) {
    std::vector<std::uint8_t> bits(size(keys.extent[2]));
    for (std::int64_t c = 0; c < keys.extent[2]; ++c) {
      const std::uint8_t hi = hi_mask.data[n * hi_mask.stride[0] + c * hi_mask.stride[1]];
      bits[size(c)] = static_cast<std::uint8_t>(hi != 0 ? hi_bit : lo_bit);
    }
    quantize_matrix(keys, n, bits, group_size, out);
  });
}

}  // namespace kvant::kitty
