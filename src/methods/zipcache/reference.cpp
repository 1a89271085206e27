// The functions of the reference's ZipCache module.
#include "methods/zipcache/reference.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "exact/elements.hpp"
#include "exact/group.hpp"
#include "exact/head_rows.hpp"
#include "exact/sums.hpp"

namespace kvant::zipcache {
namespace {

using exact::at;
using exact::ceil_divide;

std::size_t size(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

ChannelCodes quantize_rows(const exact::ConstRows& rows, std::int64_t columns, int bits, std::int64_t group_size) {
  ChannelCodes result;
  result.codes.resize(size(rows.count * columns));
  exact::GroupGrid grid(columns, bits);
  for (std::int64_t first = 0; first < rows.count; first += group_size) {
    const exact::ConstRows group = rows.part(first, std::min(group_size, rows.count - first));
    grid.fit(group);
    result.scales.insert(result.scales.end(), grid.scale(), grid.scale() + columns);
    result.zeros.insert(result.zeros.end(), grid.min(), grid.min() + columns);
    grid.encode(group, result.codes.data() + first * columns);
  }
  return result;
}

void require_size(const char* name, std::size_t actual, std::int64_t expected) {
  exact::require_extent(name, 0, static_cast<std::int64_t>(actual), expected);
}

void check(const ZipCacheState& s, std::int64_t hi, std::int64_t lo) {
  exact::require_group_size("group_size", s.group_size);
  require_size("hi_mask", s.hi_mask.size(), s.seq_len);
  require_size("hi_codes", s.hi_codes.size(), hi * s.head_dim);
  require_size("lo_codes", s.lo_codes.size(), lo * s.head_dim);
  for (const auto& [grid, rows] : {std::pair{&s.hi_scales, hi}, std::pair{&s.hi_zeros, hi}, std::pair{&s.lo_scales, lo},
                                   std::pair{&s.lo_zeros, lo}}) {
    require_size("scales and zeros", grid->size(), ceil_divide(rows, s.group_size) * s.head_dim);
  }
}

std::int64_t count_hi(const ZipCacheState& state) {
  return std::count_if(state.hi_mask.begin(), state.hi_mask.end(), [](std::uint8_t flag) { return flag != 0; });
}

}  // namespace

std::int64_t hi_count(std::int64_t tokens, double hi_fraction) {
  if (std::isnan(hi_fraction)) base::fail(ErrorCode::invalid_argument, "hi_fraction = nan must be a number");
  const double product = std::ceil(static_cast<double>(tokens) * hi_fraction);
  if (std::isnan(product)) return 0;  // no tokens times infinity
  return static_cast<std::int64_t>(std::clamp(product, 0.0, static_cast<double>(tokens)));
}

void mark_salient(const float* norms, std::int64_t tokens, std::int64_t hi, std::uint8_t* mask) {
  std::fill_n(mask, tokens, static_cast<std::uint8_t>(hi >= tokens ? 1 : 0));
  if (hi <= 0 || hi >= tokens) return;
  std::vector<std::int64_t> order(size(tokens));
  std::iota(order.begin(), order.end(), 0);
  // The end of the reference's stable ascending order: among equals the later token comes last.
  const auto before = [norms](std::int64_t a, std::int64_t b) {
    const bool a_unknown = std::isnan(norms[a]);
    const bool b_unknown = std::isnan(norms[b]);
    if (a_unknown || b_unknown) return a_unknown == b_unknown ? a < b : b_unknown;
    return norms[a] != norms[b] ? norms[a] < norms[b] : a < b;
  };
  std::nth_element(order.begin(), order.end() - hi, order.end(), before);
  for (auto place = order.end() - hi; place != order.end(); ++place) mask[*place] = 1;
}

std::int64_t mixed_bytes(std::int64_t hi, std::int64_t lo, std::int64_t dim, int hi_bits, int lo_bits,
                         std::int64_t group_size) {
  const std::int64_t groups = ceil_divide(hi, group_size) + ceil_divide(lo, group_size);
  return ceil_divide(hi * dim * hi_bits, 8) + ceil_divide(lo * dim * lo_bits, 8) + groups * dim * 4 + hi + lo;
}

std::vector<float> token_key_norms(const ConstArray& keys) {
  exact::require_rank("keys", keys.rank, 2);
  std::vector<float> norms(size(keys.extent[0]));
  exact::row_norms(exact::HeadRows(keys, 0, 0).all(), keys.extent[1], norms.data());
  return norms;
}

std::vector<std::uint8_t> saliency_mask(const ConstArray& norms, double hi_fraction) {
  exact::require_rank("norms", norms.rank, 1);
  const std::int64_t tokens = norms.extent[0];
  const std::int64_t hi = hi_count(tokens, hi_fraction);
  std::vector<float> values(size(tokens));
  exact::ConstRow{norms.data, norms.type, 0, tokens, norms.stride[0]}.load(values.data());
  std::vector<std::uint8_t> mask(size(tokens));
  mark_salient(values.data(), tokens, hi, mask.data());
  return mask;
}

ChannelCodes channel_quant(const ConstArray& x, int bits, std::int64_t group_size) {
  exact::require_bits("bits", bits);
  exact::require_group_size("group_size", group_size);
  exact::require_rank("x", x.rank, 2);
  return quantize_rows(exact::HeadRows(x, 0, 0).all(), x.extent[1], bits, group_size);
}

void channel_dequant(const Strided<const std::uint8_t>& codes, const Strided<const float>& scales,
                     const Strided<const float>& zeros, const Array& out, std::int64_t group_size) {
  exact::require_group_size("group_size", group_size);
  for (const int rank : {codes.rank, scales.rank, zeros.rank, out.rank}) exact::require_rank("every argument", rank, 2);
  const std::int64_t rows = codes.extent[0];
  const std::int64_t columns = codes.extent[1];
  exact::require_extent("out", 0, out.extent[0], rows);
  exact::require_extent("out", 1, out.extent[1], columns);
  for (const auto* grid : {&scales, &zeros}) {
    exact::require_extent("scales and zeros", 0, grid->extent[0], ceil_divide(rows, group_size));
    exact::require_extent("scales and zeros", 1, grid->extent[1], columns);
  }
  std::vector<float> row(size(columns));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t g = r / group_size;
    for (std::int64_t c = 0; c < columns; ++c) {
      const auto code = static_cast<float>(codes.data[r * codes.stride[0] + c * codes.stride[1]]);
      row[size(c)] = code * scales.data[g * scales.stride[0] + c * scales.stride[1]] +
                     zeros.data[g * zeros.stride[0] + c * zeros.stride[1]];
    }
    exact::row_of(out, 0, 0, r).store(row.data());
  }
}

ZipCacheState zipcache_compress(const ConstArray& x, int hi_bits, int lo_bits, double hi_fraction,
                                std::int64_t group_size) {
  exact::require_bits("hi_bits", hi_bits);
  exact::require_bits("lo_bits", lo_bits);
  exact::require_group_size("group_size", group_size);
  exact::require_rank("x", x.rank, 2);
  const exact::HeadRows rows(x, 0, 0);
  ZipCacheState state;
  state.hi_bits = hi_bits;
  state.lo_bits = lo_bits;
  state.seq_len = x.extent[0];
  state.head_dim = x.extent[1];
  state.group_size = group_size;
  std::vector<float> norms(size(state.seq_len));
  exact::row_norms(rows.all(), state.head_dim, norms.data());
  state.hi_mask.resize(size(state.seq_len));
  mark_salient(norms.data(), state.seq_len, hi_count(state.seq_len, hi_fraction), state.hi_mask.data());
  std::vector<const void*> hi;
  std::vector<const void*> lo;
  for (std::int64_t t = 0; t < state.seq_len; ++t) (state.hi_mask[size(t)] != 0 ? hi : lo).push_back(rows.row(t));
  const auto quantize = [&](const std::vector<const void*>& part, int bits) {
    const exact::ConstRows part_rows{part.data(), static_cast<std::int64_t>(part.size()), rows.type()};
    return quantize_rows(part_rows, state.head_dim, bits, group_size);
  };
  ChannelCodes high = quantize(hi, hi_bits);
  ChannelCodes low = quantize(lo, lo_bits);
  state.hi_codes = std::move(high.codes);
  state.hi_scales = std::move(high.scales);
  state.hi_zeros = std::move(high.zeros);
  state.lo_codes = std::move(low.codes);
  state.lo_scales = std::move(low.scales);
  state.lo_zeros = std::move(low.zeros);
  return state;
}

void zipcache_reconstruct(const ZipCacheState& state, const Array& out) {
  exact::require_rank("out", out.rank, 2);
  exact::require_extent("out", 0, out.extent[0], state.seq_len);
  exact::require_extent("out", 1, out.extent[1], state.head_dim);
  const std::int64_t hi = count_hi(state);
  check(state, hi, state.seq_len - hi);
  std::vector<float> row(size(state.head_dim));
  std::int64_t next[2] = {0, 0};  // of lo and of hi
  for (std::int64_t t = 0; t < state.seq_len; ++t) {
    const bool salient = state.hi_mask[size(t)] != 0;
    const std::int64_t place = next[salient ? 1 : 0]++;
    const std::uint8_t* codes = (salient ? state.hi_codes : state.lo_codes).data() + place * state.head_dim;
    const std::int64_t group = place / state.group_size * state.head_dim;
    const float* scales = (salient ? state.hi_scales : state.lo_scales).data() + group;
    const float* zeros = (salient ? state.hi_zeros : state.lo_zeros).data() + group;
    for (std::int64_t c = 0; c < state.head_dim; ++c)
      row[size(c)] = static_cast<float>(codes[c]) * scales[c] + zeros[c];
    exact::row_of(out, 0, 0, t).store(row.data());
  }
}

void zipcache_quant_dequant(const ConstArray& x, const Array& out, int hi_bits, int lo_bits, double hi_fraction,
                            std::int64_t group_size) {
  zipcache_reconstruct(zipcache_compress(x, hi_bits, lo_bits, hi_fraction, group_size), out);
}

std::int64_t zipcache_bytes(const ZipCacheState& state, std::optional<std::int64_t> group_size) {
  const std::int64_t group = group_size.value_or(state.group_size);
  exact::require_group_size("group_size", group);
  const std::int64_t hi = count_hi(state);
  return mixed_bytes(hi, state.seq_len - hi, state.head_dim, state.hi_bits, state.lo_bits, group);
}

std::int64_t base_only_bytes(std::int64_t S, std::int64_t D, int bits, std::int64_t group_size) {
  exact::require_between("S", S, 0, 1LL << 40);
  exact::require_between("D", D, 0, 1LL << 20);
  exact::require_bits("bits", bits);
  exact::require_group_size("group_size", group_size);
  return ceil_divide(S * D * bits, 8) + ceil_divide(S, group_size) * D * 4;
}

}  // namespace kvant::zipcache
