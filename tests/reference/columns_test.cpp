// The column kernels of every instruction set against the arithmetic of numerics.md written out, bit for bit.
#include "exact/columns.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/half.hpp"

namespace kvant::exact {
namespace {

constexpr int kSizes[] = {1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 100, 128, 130, 200};

std::vector<float> random_values(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
    const auto odd = random() % 40;
    if (odd == 0) value = std::numeric_limits<float>::quiet_NaN();
    if (odd == 1) value = std::numeric_limits<float>::infinity();
    if (odd == 2) value = -std::numeric_limits<float>::infinity();
    if (odd < 8 && odd > 2) value = std::nearbyint(value);
  }
  return values;
}

ConstRows one_row(const void* const& row) {
  return {&row, 1, DType::f32};
}

void expect_bits(const char* what, const char* target, const std::vector<float>& got, const std::vector<float>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << " on " << target << ", column " << i << " of " << want.size() << ": " << got[i] << " for "
        << want[i];
  }
}

// A matrix in one of the types; `wide` is what it holds.
struct Matrix {
  Matrix(std::size_t rows, std::size_t columns, DType element, std::mt19937& random)
      : type(element), wide(random_values(rows * columns, random)), narrow(wide.size() * size_of(element)) {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      base::store_float(narrow.data(), type, index, wide[i]);
      wide[i] = base::load_float(narrow.data(), type, index);
    }
    for (std::size_t r = 0; r < rows; ++r) pointers.push_back(narrow.data() + r * columns * size_of(type));
  }
  ConstRows rows() const { return {pointers.data(), static_cast<std::int64_t>(pointers.size()), type}; }

  DType type;
  std::vector<float> wide;
  std::vector<std::byte> narrow;
  std::vector<const void*> pointers;
};

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr std::size_t kRows = 5;

TEST(Columns, SumsEqualTheirDefinition) {
  std::mt19937 random(3);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      for (const DType type : kTypes) {
        const auto size = static_cast<std::size_t>(n);
        const Matrix x(kRows, size, type, random);
        const std::vector<float> mean = random_values(size, random);
        std::vector<float> got(size, 0.5F);
        std::vector<float> want(size, 0.5F);
        k.add(x.rows(), n, got.data());
        k.add_squares(x.rows(), n, got.data());
        k.add_squared_differences(x.rows(), mean.data(), n, got.data());
        k.multiply(0.3F, n, got.data());
        for (std::size_t c = 0; c < size; ++c) {
          for (std::size_t r = 0; r < kRows; ++r) want[c] += x.wide[r * size + c];
          for (std::size_t r = 0; r < kRows; ++r) {
            const float square = x.wide[r * size + c] * x.wide[r * size + c];
            want[c] += square;
          }
          for (std::size_t r = 0; r < kRows; ++r) {
            const float difference = x.wide[r * size + c] - mean[c];
            const float squared = difference * difference;
            want[c] += squared;
          }
          want[c] *= 0.3F;
        }
        expect_bits("sums", k.target, got, want);
      }
    }
  }
}

TEST(Columns, ExtremesPropagateNaN) {
  std::mt19937 random(4);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      for (const DType type : kTypes) {
        const auto size = static_cast<std::size_t>(n);
        const Matrix x(kRows, size, type, random);
        std::vector<float> min(size);
        std::vector<float> max(size);
        k.min_max(x.rows(), n, min.data(), max.data());
        std::vector<float> low(x.wide.begin(), x.wide.begin() + n);
        std::vector<float> high = low;
        for (std::size_t r = 1; r < kRows; ++r) {
          for (std::size_t c = 0; c < size; ++c) {
            const float value = x.wide[r * size + c];
            if (std::isnan(low[c])) continue;
            if (std::isnan(value)) low[c] = high[c] = value;
            if (value < low[c]) low[c] = value;
            if (value > high[c]) high[c] = value;
          }
        }
        expect_bits("min", k.target, min, low);
        expect_bits("max", k.target, max, high);
      }
    }
  }
}

TEST(Columns, CodesAndValuesEqualTheirDefinition) {
  std::mt19937 random(5);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      const auto size = static_cast<std::size_t>(n);
      const std::vector<float> a = random_values(size, random);
      const std::vector<float> b = random_values(size, random);
      const std::vector<float> x = random_values(size, random);
      std::vector<float> min(size), max(size), value(size), levels(size), scale(size), step(size), got(size),
          want(size);
      std::vector<std::uint8_t> codes(size), expected(size);
      for (std::size_t c = 0; c < size; ++c) {
        levels[c] = static_cast<float>((1 << (1 + random() % 8)) - 1);
        min[c] = std::fmin(a[c], b[c]);
        max[c] = std::fmax(a[c], b[c]);
        value[c] = random() % 2 == 0 ? x[c] : 0.5F * (a[c] + b[c]);  // halves: ties
        value[c] = std::fmin(std::fmax(value[c], min[c]), max[c]);
      }
      k.grid(min.data(), max.data(), levels.data(), n, scale.data());
      const GridView grid{min.data(), scale.data(), levels.data()};
      const void* value_row = value.data();
      void* got_row = got.data();
      k.encode(one_row(value_row), grid, n, codes.data(), n);
      k.decode(codes.data(), n, grid, n, {&got_row, 1, DType::f32}, Rounding::direct);
      for (std::size_t c = 0; c < size; ++c) {
        step[c] = (max[c] - min[c]) / levels[c];
        if (step[c] < 1e-8F) step[c] = 1e-8F;
        const float place = std::rint((value[c] - min[c]) / step[c]);
        expected[c] = std::isnan(place) ? 0 : static_cast<std::uint8_t>(std::fmin(place, levels[c]));
        const float product = static_cast<float>(expected[c]) * step[c];
        want[c] = product + min[c];
      }
      expect_bits("scale", k.target, scale, step);
      EXPECT_EQ(codes, expected) << k.target;
      expect_bits("value", k.target, got, want);
    }
  }
}

// Two rows of codes a stride apart, to every type and through fp16, with values that overflow and round.
TEST(Columns, DecodedRowsAreRoundedAsTheirDefinition) {
  std::mt19937 random(7);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      const auto size = static_cast<std::size_t>(n);
      const std::size_t stride = size + 3;
      std::vector<float> min = random_values(size, random);
      std::vector<float> scale = random_values(size, random);
      for (std::size_t c = 0; c < size; c += 3) scale[c] *= c % 2 == 0 ? 9000.0F : 1e-7F;
      std::vector<std::uint8_t> codes(2 * stride);
      for (auto& code : codes) code = static_cast<std::uint8_t>(random());
      for (const DType type : kTypes) {
        for (const Rounding rounding : {Rounding::direct, Rounding::through_half}) {
          std::vector<std::byte> got(2 * size * size_of(type));
          void* rows[] = {got.data(), got.data() + size * size_of(type)};
          k.decode(codes.data(), static_cast<std::int64_t>(stride), {min.data(), scale.data(), nullptr}, n,
                   {rows, 2, type}, rounding);
          std::vector<float> values(2 * size), expected(2 * size);
          for (std::size_t i = 0; i < 2 * size; ++i) {
            const float product = static_cast<float>(codes[i / size * stride + i % size]) * scale[i % size];
            float value = product + min[i % size];
            if (rounding == Rounding::through_half) value = base::half_to_float(base::float_to_half(value));
            std::uint32_t stored = 0;
            base::store_float(&stored, type, 0, value);
            expected[i] = base::load_float(&stored, type, 0);
            values[i] = base::load_float(got.data(), type, static_cast<std::int64_t>(i));
          }
          expect_bits("rounded", k.target, values, expected);
        }
      }
    }
  }
}

TEST(Columns, SlicesAreBitsAndComeBack) {
  std::mt19937 random(6);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      for (int bits = 1; bits <= 8; ++bits) {
        const int shift = static_cast<int>(random() % static_cast<unsigned>(9 - bits));
        const auto size = static_cast<std::size_t>(n);
        std::vector<std::uint8_t> rows(size * 8), planes(size * static_cast<std::size_t>(bits)), back(size * 8, 0);
        for (auto& code : rows) code = static_cast<std::uint8_t>(random());
        k.slice(rows.data(), n, shift, bits, n, planes.data(), n);
        for (std::size_t i = 0; i < planes.size(); ++i) {
          for (std::size_t r = 0; r < 8; ++r) {
            const std::size_t bit = static_cast<std::size_t>(shift) + i / size;
            ASSERT_EQ(planes[i] >> r & 1, rows[r * size + i % size] >> bit & 1) << k.target << " " << n;
          }
        }
        k.unslice(planes.data(), n, shift, bits, n, back.data(), n);
        const int mask = ((1 << bits) - 1) << shift;
        for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(back[i], rows[i] & mask) << k.target << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace kvant::exact
