// A KVQuant cache as a plain list of rows, written from numerics.md 4.4 to 4.6 on top of the public functions: the
// oracle of the random call sequences. Nothing is packed and nothing is fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/half.hpp"
#include "kvant/kvquant.hpp"
#include "methods/kvquant/nuq.hpp"

namespace kvant::kvquant {

using Floats = std::vector<float>;

// [rows][columns] of one head.
struct Block {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Floats x;

  Block() = default;
  Block(std::int64_t r, std::int64_t c) : rows(r), columns(c), x(static_cast<std::size_t>(r * c)) {}
  float& at(std::int64_t r, std::int64_t c) { return x[static_cast<std::size_t>(r * columns + c)]; }
  float at(std::int64_t r, std::int64_t c) const { return x[static_cast<std::size_t>(r * columns + c)]; }
  Block transposed() const {
    Block result(columns, rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) result.at(c, r) = at(r, c);
    }
    return result;
  }
};

class PlainCache {
 public:
  PlainCache(const KVCacheConfig& config, std::int64_t batch, std::int64_t heads, std::int64_t dim, DType type)
      : config_(config), batch_(batch), heads_(heads), dim_(dim), type_(type), levels_(1 << config.kvquant_bits) {
    reset();
  }

  // One block per (batch, head), batch first.
  void update(const std::vector<Block>& keys, const std::vector<Block>& values) {
    const std::int64_t n = keys[0].rows;
    const bool first = key_levels.empty();
    const std::int64_t interval = config_.kvquant_refit_interval;
    const bool refit = first || (interval > 0 && tokens > 0 && tokens % interval == 0);
    const std::int64_t sinks = tokens == 0 ? std::min(config_.kvquant_n_sink, n) : 0;
    const std::int64_t skip = sinks > 0 && sinks < n ? sinks : 0;
    const std::int64_t fresh = n - skip;
    const std::int64_t enough = fresh >= levels_ ? levels_ : 16 * levels_;
    const std::int64_t want = first ? enough : std::max(interval, enough);
    std::int64_t from = tokens;
    if (refit && tokens > 0 && fresh < want) from = std::max(sink_kept, tokens - (want - fresh));
    const bool pending = first && fresh + tokens - from < enough;
    if (refit && !pending) fit(keys, from, skip);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      append(key_rows[i], pending ? keys[i] : coded_keys(keys[i], i), keys[i], sinks);
      append(value_rows[i], coded_values(values[i], i == 0), values[i], sinks);
    }
    if (sinks > 0) sink_kept = sinks;
    tokens += n;
  }

  void trim(std::int64_t n) {
    n = std::min(n, tokens);
    if (n == 0) return;
    tokens -= n;
    if (tokens == 0) return reset();
    sink_kept = std::min(sink_kept, tokens);
    for (auto* side : {&key_rows, &value_rows}) {
      for (Block& rows : *side) {
        rows.rows = tokens;
        rows.x.resize(static_cast<std::size_t>(tokens * dim_));
      }
    }
  }

  std::vector<Block> key_rows;  // what update_and_fetch returns
  std::vector<Block> value_rows;
  std::vector<Block> key_levels;  // per head
  Block value_levels;             // [L][S]
  Floats threshold;
  std::int64_t outliers = 0;
  std::int64_t sink_kept = 0;
  std::int64_t tokens = 0;

 private:
  void reset() {
    key_rows.assign(static_cast<std::size_t>(batch_ * heads_), Block(0, dim_));
    value_rows = key_rows;
    key_levels.clear();
    threshold.clear();
    value_levels = {};
    outliers = sink_kept = tokens = 0;
  }

  static ConstArray array(const Block& block) {
    return dense_array(block.x.data(), DType::f32, {1, block.rows, block.columns});
  }

  struct Split {
    Block inliers;
    std::vector<char> mask;
  };
  static Split split(const Block& block, double fraction) {
    Split result{Block(block.rows, block.columns), std::vector<char>(block.x.size())};
    Floats values(block.x.size());
    const auto shape = {std::int64_t{1}, block.rows, block.columns};
    split_dense_sparse_batched(array(block), fraction, dense_grid(result.inliers.x.data(), shape),
                               dense_grid(reinterpret_cast<bool*>(result.mask.data()), shape),
                               dense_grid(values.data(), shape));
    return result;
  }

  Block fit_levels(const Block& samples) const {
    Block levels(levels_, samples.columns);
    fit_nuq_levels_batched(array(samples), config_.kvquant_bits, config_.kvquant_lloyd_iters,
                           dense_grid(levels.x.data(), {1, levels_, samples.columns}));
    return levels;
  }

  // Codes and looks up the unmarked cells; marked cells stay exact. Counts the marked ones.
  Block code(const Block& block, const Block& levels, const std::vector<char>& mask) {
    std::vector<std::int32_t> codes(block.x.size());
    quantize_nuq_batched(array(block), array(levels), dense_grid(codes.data(), {1, block.rows, block.columns}));
    Block result = block;
    for (std::int64_t r = 0; r < block.rows; ++r) {
      for (std::int64_t c = 0; c < block.columns; ++c) {
        const auto i = static_cast<std::size_t>(r * block.columns + c);
        outliers += mask[i];
        if (mask[i] == 0) result.at(r, c) = rounded(levels.at(codes[i], c));
      }
    }
    return result;
  }

  float rounded(float level) const {
    const float half = base::half_to_float(base::float_to_half(level));
    return type_ == DType::bf16 ? base::bfloat_to_float(base::float_to_bfloat(half)) : half;
  }

  void fit(const std::vector<Block>& keys, std::int64_t from, std::int64_t skip) {
    std::vector<Block> samples;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      Block rows(0, dim_);
      for (std::int64_t r = from; r < tokens; ++r) add_row(rows, key_rows[i], r);
      for (std::int64_t r = skip; r < keys[i].rows; ++r) add_row(rows, keys[i], r);
      samples.push_back(rows);
    }
    key_levels.clear();
    for (std::int64_t h = 0; h < heads_; ++h) {
      key_levels.push_back(
          fit_levels(split(samples[static_cast<std::size_t>(h)], config_.kvquant_outlier_fraction).inliers));
    }
    threshold.clear();
    const std::int64_t n = batch_ * heads_ * samples[0].rows;
    const std::int64_t k = kvquant::outlier_count(n, config_.kvquant_outlier_fraction);
    for (std::int64_t c = 0; k > 0 && c < dim_; ++c) {
      Floats pool;
      for (const Block& block : samples) {
        for (std::int64_t r = 0; r < block.rows; ++r) pool.push_back(std::abs(block.at(r, c)));
      }
      std::sort(pool.begin(), pool.end(), std::greater<>());
      threshold.push_back(pool[static_cast<std::size_t>(k - 1)]);
    }
  }

  Block coded_keys(const Block& keys, std::size_t i) {
    std::vector<char> mask = split(keys, config_.kvquant_outlier_fraction).mask;
    if (keys.rows < 2 && config_.kvquant_outlier_fraction > 0 && !threshold.empty()) {
      for (std::size_t c = 0; c < mask.size(); ++c) mask[c] = std::abs(keys.x[c]) >= threshold[c] ? 1 : 0;
    }
    return code(keys, key_levels[i % static_cast<std::size_t>(heads_)], mask);
  }

  Block coded_values(const Block& values, bool keep_levels) {
    const Block columns = values.transposed();
    const Split parts = split(columns, config_.kvquant_outlier_fraction);
    const Block levels = fit_levels(parts.inliers);
    if (keep_levels) value_levels = levels;
    return code(columns, levels, parts.mask).transposed();
  }

  static void add_row(Block& to, const Block& from, std::int64_t row) {
    for (std::int64_t c = 0; c < from.columns; ++c) to.x.push_back(from.at(row, c));
    ++to.rows;
  }

  void append(Block& rows, const Block& coded, const Block& exact, std::int64_t sinks) const {
    for (std::int64_t r = 0; r < coded.rows; ++r) add_row(rows, r < sinks ? exact : coded, r);
  }

  KVCacheConfig config_;
  std::int64_t batch_;
  std::int64_t heads_;
  std::int64_t dim_;
  DType type_;
  std::int64_t levels_;
};

}  // namespace kvant::kvquant
