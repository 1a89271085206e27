#include "exact/group.hpp"

#include <algorithm>

namespace kvant::exact {

GroupGrid::GroupGrid(std::int64_t columns) : columns_(columns), storage_(static_cast<std::size_t>(columns) * 4) {
  min_ = storage_.data();
  max_ = min_ + columns;
  scale_ = max_ + columns;
  levels_ = scale_ + columns;
}

GroupGrid::GroupGrid(std::int64_t columns, int bits) : GroupGrid(columns) {
  std::fill_n(levels_, columns, levels_of(bits));
}

GroupGrid::GroupGrid(std::span<const std::uint8_t> bits) : GroupGrid(static_cast<std::int64_t>(bits.size())) {
  for (std::size_t c = 0; c < bits.size(); ++c) levels_[c] = levels_of(bits[c]);
}

void GroupGrid::fit(const ConstRows& rows) {
  exact::columns().min_max(rows, columns_, min_, max_);
  rescale();
}

void GroupGrid::rescale() {
  exact::columns().grid(min_, max_, levels_, columns_, scale_);
}

void GroupGrid::encode(const ConstRows& rows, std::uint8_t* codes) const {
  exact::columns().encode(rows, {min_, scale_, levels_}, columns_, codes, columns_);
}

void GroupGrid::decode(const std::uint8_t* codes, const Rows& out, Rounding rounding) const {
  exact::columns().decode(codes, columns_, {min_, scale_, levels_}, columns_, out, rounding);
}

}  // namespace kvant::exact
