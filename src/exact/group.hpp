// The group quantizer over rows of one group.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "exact/columns.hpp"

namespace kvant::exact {

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);  // group sizes go to 2^63 - 1
}

inline float levels_of(int bits) {
  return static_cast<float>((1 << bits) - 1);
}

// Minimum, maximum and scale of every column of one group, reused from group to group.
class GroupGrid {
 public:
  // Every column with the same width.
  GroupGrid(std::int64_t columns, int bits);
  // One width per column.
  explicit GroupGrid(std::span<const std::uint8_t> bits);
  GroupGrid(const GroupGrid&) = delete;  // the pointers below point into storage_
  GroupGrid& operator=(const GroupGrid&) = delete;

  // Takes minimum and maximum from at least one row.
  void fit(const ConstRows& rows);
  // Recomputes the scales after min() and max() were filled from stored endpoints.
  void rescale();

  // Codes of consecutive rows are columns() bytes apart.
  void encode(const ConstRows& rows, std::uint8_t* codes) const;
  void decode(const std::uint8_t* codes, const Rows& out, Rounding rounding = Rounding::direct) const;

  std::int64_t columns() const { return columns_; }
  float* min() { return min_; }
  float* max() { return max_; }
  const float* min() const { return min_; }
  const float* max() const { return max_; }
  const float* scale() const { return scale_; }

 private:
  explicit GroupGrid(std::int64_t columns);

  std::int64_t columns_ = 0;
  std::vector<float> storage_;
  float* min_ = nullptr;
  float* max_ = nullptr;
  float* scale_ = nullptr;
  float* levels_ = nullptr;
};

}  // namespace kvant::exact
