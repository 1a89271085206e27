#include "methods/kvquant/encode.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "base/threads.hpp"
#include "methods/kvquant/matrix.hpp"
#include "tiles/kernels.hpp"

namespace kvant::kvquant {
namespace {

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

void store_exact(const PackedSide& side, const PackedSide::Place& place, std::int64_t head, const float* row) {
  tiles::kernels().narrow(row, side.slot(place, head).row, side.shape().type, side.shape().channels);
}

// ---- keys

void mark_by_threshold(const Matrix& block, const float* threshold, std::uint8_t* mask) {
  for (std::int64_t r = 0; r < block.rows(); ++r) {
    for (std::int64_t c = 0; c < block.columns(); ++c) {
      mask[r * block.stride() + c] = std::abs(block.row(r)[c]) >= threshold[c] ? 1 : 0;
    }
  }
}

void mark_keys(const KeyEncoding& call, const Matrix& block, std::uint8_t* mask) {
  if (call.threshold != nullptr) {
    mark_by_threshold(block, call.threshold, mask);
  } else if (call.rank_outliers > 0) {
    const Scratch<float> scratch(float_scratch(block.rows(), call.rank_outliers));
    nuq_kernels().mark_outliers(block.view(), call.rank_outliers, mask, scratch.get());
  }
}

// Appends the marked cells of a row; returns how many.
std::int64_t list_outliers(const std::uint8_t* mask, const float* x, std::int64_t columns, std::int64_t row,
                           std::vector<Outlier>& list) {
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < columns; first += 8) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, mask + first, sizeof eight);  // rows of a mask are padded
    if (eight == 0) continue;
    for (std::int64_t c = first; c < std::min(first + 8, columns); ++c) {
      if (mask[c] == 0) continue;
      list.push_back({static_cast<std::int32_t>(row), static_cast<std::uint16_t>(c), x[c]});
      ++count;
    }
  }
  return count;
}

std::int64_t encode_key_head(const KeyEncoding& call, const PackedSide& side, const PackedSide::Places& places,
                             std::int64_t head, std::vector<Outlier>& outliers) {
  const SideShape& shape = side.shape();
  Matrix block(call.keys->extent[2], shape.channels);
  for (std::int64_t r = 0; r < block.rows(); ++r) {
    exact::row_of(*call.keys, head / shape.heads, head % shape.heads, r).load(block.row(r));
  }
  Matrix levels(shape.level_count(), shape.channels);
  const float* own = call.levels + head % shape.heads * shape.level_count() * shape.channels;
  for (std::int64_t l = 0; l < levels.rows(); ++l) std::copy_n(own + l * shape.channels, shape.channels, levels.row(l));
  std::vector<std::uint8_t> mask(block.padded_size(), 0);
  mark_keys(call, block, mask.data());
  const Scratch<std::uint8_t> codes(block.padded_size());
  nuq_kernels().encode(block.view(), shape.level_count(), levels.data(), codes.get());
  std::vector<Outlier> of_sinks;
  std::int64_t count = 0;
  for (std::int64_t r = 0; r < block.rows(); ++r) {
    const bool exact = r < call.exact;
    const PackedSide::Place& place = places[size(r)];
    if (exact) {
      store_exact(side, place, head, block.row(r));
    } else {
      nuq_kernels().slice(codes.get() + r * block.stride(), shape.channels, shape.bits, side.slot(place, head).codes);
    }
    count +=
        list_outliers(mask.data() + r * block.stride(), block.row(r), shape.channels, r, exact ? of_sinks : outliers);
  }
  return count;
}

// ---- values

constexpr std::int64_t kTokensAtOnce = 32;  // tokens (of any head) that one fit works on, one per lane

// Value rows as columns: lane i is token first + i of the call, counted over all heads.
class ValueBlock {
 public:
  ValueBlock(const ValueEncoding& call, const PackedSide& side, const PackedSide::Places& places, std::int64_t first,
             std::int64_t lanes)
      : call_(call),
        side_(side),
        places_(places),
        first_(first),
        lanes_(lanes),
        rows_(lanes, side.shape().channels),
        x_(side.shape().channels, lanes),
        levels_(side.shape().level_count(), lanes),
        mask_(x_.padded_size(), 0),
        codes_(x_.padded_size()) {
    for (std::int64_t i = 0; i < lanes; ++i) {
      exact::row_of(*call.values, head(i) / side.shape().heads, head(i) % side.shape().heads, token(i))
          .load(rows_.row(i));
      for (std::int64_t c = 0; c < x_.rows(); ++c) x_.row(c)[i] = rows_.row(i)[c];
    }
  }

  void fit(std::int64_t sweeps) {
    const std::int64_t k = side_.shape().token_outliers;
    Matrix inliers(x_.rows(), lanes_);
    const float* samples = x_.data();
    if (k > 0) {
      const Scratch<float> scratch(float_scratch(x_.rows(), k));
      nuq_kernels().mark_outliers(x_.view(), k, mask_.data(), scratch.get());
      nuq_kernels().fill_outliers(x_.view(), mask_.data(), inliers.data());
      samples = inliers.data();
    }
    const Scratch<float> scratch(float_scratch(x_.rows(), 0));
    const int level_count = side_.shape().level_count();
    nuq_kernels().fit({samples, x_.rows(), x_.stride(), lanes_}, level_count, sweeps, levels_.data(), scratch.get());
    nuq_kernels().encode(x_.view(), level_count, levels_.data(), codes_.get());
  }

  void write() const {
    for (std::int64_t i = 0; i < lanes_; ++i) {
      const PackedSide::Place& place = places_[size(token(i))];
      if (token(i) < call_.sinks) {
        store_exact(side_, place, head(i), rows_.row(i));
      } else if (place.run->coded) {
        write_codes(i, side_.slot(place, head(i)));
      } else {
        write_row(i, place);
      }
    }
  }

  // Column `token` of `out` [L][tokens] for the lanes of head 0.
  void copy_levels(std::int64_t tokens, std::vector<float>& out) const {
    for (std::int64_t i = 0; i < lanes_ && head(i) == 0; ++i) {
      for (std::int64_t l = 0; l < levels_.rows(); ++l) out[size(l * tokens + token(i))] = levels_.row(l)[i];
    }
  }

 private:
  std::int64_t head(std::int64_t lane) const { return (first_ + lane) / call_.values->extent[2]; }
  std::int64_t token(std::int64_t lane) const { return (first_ + lane) % call_.values->extent[2]; }
  bool is_outlier(std::int64_t channel, std::int64_t lane) const {
    return mask_[size(channel * x_.stride() + lane)] != 0;
  }

  void write_codes(std::int64_t lane, const PackedSide::Slot& slot) const {
    const SideShape& shape = side_.shape();
    std::uint8_t codes[1024 + kColumnPad];  // 1024 channels at most
    for (std::int64_t c = 0; c < shape.channels; ++c) codes[c] = codes_[size(c * x_.stride() + lane)];
    std::fill(codes + shape.channels, codes + padded_columns(shape.channels), std::uint8_t{0});
    nuq_kernels().slice(codes, shape.channels, shape.bits, slot.codes);
    for (std::int64_t l = 0; l < levels_.rows(); ++l) slot.levels[l] = base::float_to_half(levels_.row(l)[lane]);
    std::int64_t k = 0;
    for (std::int64_t c = 0; k < shape.token_outliers; ++c) {
      if (!is_outlier(c, lane)) continue;
      base::store_float(slot.outlier_values, shape.type, k, rows_.row(lane)[c]);
      const auto channel = static_cast<std::uint16_t>(c);
      if (shape.index_bytes() == 1) {
        slot.outlier_indices[k] = static_cast<std::byte>(channel);
      } else {
        std::memcpy(slot.outlier_indices + 2 * k, &channel, sizeof channel);
      }
      ++k;
    }
  }

  // The row that codes would decode to.
  void write_row(std::int64_t lane, const PackedSide::Place& place) const {
    std::vector<float> row(size(rows_.columns()));
    for (std::int64_t c = 0; c < rows_.columns(); ++c) {
      const float level = levels_.row(codes_[size(c * x_.stride() + lane)])[lane];
      row[size(c)] = is_outlier(c, lane) ? rows_.row(lane)[c] : base::half_to_float(base::float_to_half(level));
    }
    store_exact(side_, place, head(lane), row.data());
  }

  const ValueEncoding& call_;
  const PackedSide& side_;
  const PackedSide::Places& places_;
  std::int64_t first_;
  std::int64_t lanes_;
  Matrix rows_;    // [lane][channel]
  Matrix x_;       // [channel][lane]
  Matrix levels_;  // [level][lane]
  std::vector<std::uint8_t> mask_;
  Scratch<std::uint8_t> codes_;
};

}  // namespace

std::vector<std::vector<Outlier>> encode_keys(const KeyEncoding& call, const PackedSide& side,
                                              const PackedSide::Places& places, std::int64_t& count) {
  std::vector<std::vector<Outlier>> outliers(size(side.shape().all_heads()));
  std::atomic<std::int64_t> total = 0;
  base::parallel_for(side.shape().all_heads(), call.threads, [&](std::int64_t head, int) {
    total += encode_key_head(call, side, places, head, outliers[size(head)]);
  });
  count += total;
  return outliers;
}

void copy_rows(const ConstArray& rows, const PackedSide& side, const PackedSide::Places& places, std::int64_t n) {
  std::vector<float> row(size(side.shape().channels));
  for (std::int64_t head = 0; head < side.shape().all_heads(); ++head) {
    for (std::int64_t r = 0; r < n; ++r) {
      exact::row_of(rows, head / side.shape().heads, head % side.shape().heads, r).load(row.data());
      store_exact(side, places[size(r)], head, row.data());
    }
  }
}

std::vector<float> encode_values(const ValueEncoding& call, const PackedSide& side, const PackedSide::Places& places) {
  const std::int64_t tokens = call.values->extent[2];
  std::vector<float> levels(size(side.shape().level_count() * tokens));
  const std::int64_t all = side.shape().all_heads() * tokens;
  base::parallel_for((all + kTokensAtOnce - 1) / kTokensAtOnce, call.threads, [&](std::int64_t item, int) {
    const std::int64_t first = item * kTokensAtOnce;
    ValueBlock block(call, side, places, first, std::min(kTokensAtOnce, all - first));
    block.fit(call.sweeps);
    block.write();
    block.copy_levels(tokens, levels);
  });
  return levels;
}

}  // namespace kvant::kvquant
