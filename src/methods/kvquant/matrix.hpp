// Dense, padded fp32 copies of array slices: what the kernels work on.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "base/aligned.hpp"
#include "base/checked.hpp"
#include "exact/elements.hpp"
#include "kvant/array.hpp"
#include "methods/kvquant/nuq.hpp"

namespace kvant::kvquant {

inline std::int64_t padded_columns(std::int64_t columns) {
  return (columns + kColumnPad - 1) / kColumnPad * kColumnPad;
}

// Uninitialised memory for `count` of T, aligned for vectors.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t count) : bytes_(base::allocate_aligned(base::checked_multiply(count, sizeof(T)))) {}
  T* get() const { return reinterpret_cast<T*>(bytes_.get()); }
  T& operator[](std::size_t i) const { return get()[i]; }

 private:
  base::AlignedBytes bytes_;
};

// A zero-padded fp32 matrix [rows][stride].
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t columns)
      : rows_(rows),
        columns_(columns),
        stride_(padded_columns(columns)),
        data_(base::checked_multiply(static_cast<std::size_t>(rows), static_cast<std::size_t>(stride_))) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = columns; c < stride_; ++c) row(r)[c] = 0;
    }
  }
  float* row(std::int64_t r) const { return data_.get() + r * stride_; }
  float* data() const { return data_.get(); }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::int64_t stride() const { return stride_; }
  std::size_t padded_size() const { return static_cast<std::size_t>(rows_ * stride_); }
  Columns view() const { return {data_.get(), rows_, stride_, columns_}; }

 private:
  std::int64_t rows_ = 0;
  std::int64_t columns_ = 0;
  std::int64_t stride_ = 0;
  Scratch<float> data_;
};

// Throws Error(not_finite) naming the argument unless all n values are finite.
inline void require_finite(const char* name, const float* x, std::int64_t n) {
  constexpr std::uint32_t kExponent = 0x7F800000U;
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < n; ++i) bad |= (std::bit_cast<std::uint32_t>(x[i]) & kExponent) == kExponent ? 1U : 0U;
  if (bad == 0) return;
  for (std::int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) {
      base::fail(ErrorCode::not_finite,
                 std::string(name) + " holds " + std::to_string(x[i]) + "; only finite numbers " + "can be quantized");
    }
  }
}

inline void require_samples(std::int64_t rows) {
  if (rows >= 1) return;
  base::fail(ErrorCode::invalid_argument, "x has 0 samples; a level fit needs at least 1");
}

// Rows [N, D] of x at [batch][head], checked to be finite.
inline void load_rows(const char* name, const ConstArray& x, std::int64_t batch, std::int64_t head, Matrix& out) {
  for (std::int64_t r = 0; r < out.rows(); ++r) {
    exact::row_of(x, batch, head, r).load(out.row(r));
    require_finite(name, out.row(r), out.columns());
  }
}

}  // namespace kvant::kvquant
