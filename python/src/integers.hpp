// Arguments whose element type may vary: codes that come as bytes, integers or floats.
#pragma once

#include <cstdint>
#include <memory>

#include "arrays.hpp"

namespace kvant::python {

// An array of integers of any type that NumPy, mlx or torch have for them (or f32), as T: the array itself where it is
// one of T, else a dense copy. The array must outlive it. Throws Error(invalid_argument) for another type or rank, and
// for a value that T cannot hold exactly.
template <typename T>
class Integers {
 public:
  Integers(const In& array, const char* name, int rank);
  Strided<const T> view() const { return view_; }

 private:
  std::unique_ptr<T[]> data_;
  Strided<const T> view_;
};

extern template class Integers<std::uint8_t>;
extern template class Integers<std::int32_t>;

}  // namespace kvant::python
