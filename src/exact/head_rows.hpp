// The rows of one head of an array as pointers, and matrices of this library as rows.
#pragma once

#include <cstdint>
#include <vector>

#include "exact/columns.hpp"
#include "exact/elements.hpp"

namespace kvant::exact {

// Pointers to the rows of a dense matrix.
template <typename T, typename Pointer>
std::vector<Pointer> row_pointers(T* first, std::int64_t rows, std::int64_t stride) {
  std::vector<Pointer> pointers(static_cast<std::size_t>(rows));
  for (std::size_t r = 0; r < pointers.size(); ++r) pointers[r] = first + static_cast<std::int64_t>(r) * stride;
  return pointers;
}

// float rows [rows][columns] that are owned, for kernels that read or write them.
class FloatRows {
 public:
  FloatRows(std::int64_t rows, std::int64_t columns)
      : columns_(columns),
        values_(static_cast<std::size_t>(rows * columns)),
        pointers_(row_pointers<float, void*>(values_.data(), rows, columns)) {}
  FloatRows(const FloatRows&) = delete;  // the pointers point into values_
  FloatRows& operator=(const FloatRows&) = delete;

  float* row(std::int64_t r) { return values_.data() + r * columns_; }
  Rows writable(std::int64_t count) { return {pointers_.data(), count, DType::f32}; }
  ConstRows first(std::int64_t count) const { return {pointers_.data(), count, DType::f32}; }
  ConstRows as_one() const { return first(1); }  // the rows lie one behind the other

 private:
  std::int64_t columns_ = 0;
  std::vector<float> values_;
  std::vector<void*> pointers_;
};

// Rows of array[batch][head]: where they lie if their channels are contiguous, else a widened copy.
class HeadRows {
 public:
  HeadRows(const ConstArray& x, std::int64_t batch, std::int64_t head)
      : rows_(x.extent[at(x.rank - 2)]), type_(x.type), columns_(x.extent[at(x.rank - 1)]) {
    pointers_.resize(static_cast<std::size_t>(rows_));
    const bool in_place = x.stride[at(x.rank - 1)] == 1;
    if (!in_place) {
      type_ = DType::f32;
      copy_.resize(static_cast<std::size_t>(rows_ * columns_));
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      const ConstRow source = row_of(x, batch, head, r);
      if (in_place) {
        pointers_[static_cast<std::size_t>(r)] = source.start();
      } else {
        float* row = copy_.data() + r * columns_;
        source.load(row);
        pointers_[static_cast<std::size_t>(r)] = row;
      }
    }
  }
  HeadRows(const HeadRows&) = delete;  // the pointers may point into copy_
  HeadRows& operator=(const HeadRows&) = delete;

  std::int64_t count() const { return rows_; }
  const void* row(std::int64_t r) const { return pointers_[static_cast<std::size_t>(r)]; }
  DType type() const { return type_; }
  ConstRows all() const { return {pointers_.data(), rows_, type_}; }

 private:
  std::int64_t rows_ = 0;
  DType type_ = DType::f32;
  std::int64_t columns_ = 0;
  std::vector<const void*> pointers_;
  std::vector<float> copy_;
};

}  // namespace kvant::exact
