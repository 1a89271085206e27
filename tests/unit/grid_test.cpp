// Least-squares grids, their sums and the Hadamard rotation, for every kernel set.
#include "cache/grid.hpp"

#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant {
namespace {

using testing::scalar;

struct Grid : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

TEST_P(Grid, SumsHaveTheBitsOfTheScalarSet) {
  std::mt19937 random(3);
  for (int n = 1; n <= 300; n += n < 40 ? 1 : 37) {
    const auto x = testing::random_floats(static_cast<std::size_t>(n), random(), std::exp2(static_cast<float>(n % 9)));
    std::vector<std::uint8_t> codes(x.size());
    for (auto& code : codes) code = static_cast<std::uint8_t>(random() % 256);
    const tiles::LineSums sums = set.line_sums(codes.data(), x.data(), n);
    const tiles::LineSums expected = scalar().line_sums(codes.data(), x.data(), n);
    EXPECT_EQ(sums.code, expected.code);
    EXPECT_EQ(sums.code_square, expected.code_square);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(sums.value), std::bit_cast<std::uint64_t>(expected.value)) << n;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(sums.product), std::bit_cast<std::uint64_t>(expected.product)) << n;
    EXPECT_EQ(std::bit_cast<std::uint64_t>(set.grid_error(codes.data(), x.data(), n, -1.3F, 0.017F)),
              std::bit_cast<std::uint64_t>(scalar().grid_error(codes.data(), x.data(), n, -1.3F, 0.017F)))
        << n;
  }
}

TEST_P(Grid, SumsAreThoseOfTheDefinition) {
  const auto x = testing::random_floats(133, 5);
  std::vector<std::uint8_t> codes(x.size());
  long double value = 0, product = 0, error = 0;
  std::int64_t code = 0, square = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    codes[i] = static_cast<std::uint8_t>(i * 7 % 64);
    value += x[i];
    product += static_cast<long double>(codes[i]) * x[i];
    code += codes[i];
    square += codes[i] * codes[i];
    const float point = -2.0F + static_cast<float>(codes[i]) * 0.0625F;  // exact
    error += (static_cast<long double>(x[i]) - point) * (static_cast<long double>(x[i]) - point);
  }
  const tiles::LineSums sums = set.line_sums(codes.data(), x.data(), 133);
  EXPECT_EQ(sums.code, code);
  EXPECT_EQ(sums.code_square, square);
  EXPECT_NEAR(sums.value, static_cast<double>(value), 1e-11);
  EXPECT_NEAR(sums.product, static_cast<double>(product), 1e-9);
  EXPECT_NEAR(set.grid_error(codes.data(), x.data(), 133, -2.0F, 0.0625F), static_cast<double>(error), 1e-9);
}

// H[i][j] = (-1)^(number of ones in i & j), Sylvester's construction.
TEST_P(Grid, HadamardIsTheMatrix) {
  for (const int block : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
    const int n = 3 * block;
    const auto x = testing::random_floats(static_cast<std::size_t>(n), 9);
    std::vector<float> y = x;
    set.hadamard(y.data(), n, block);
    for (int i = 0; i < n; ++i) {
      double expected = 0;
      for (int j = 0; j < block; ++j) {
        const double sign = std::popcount(static_cast<unsigned>(i % block & j)) % 2 == 0 ? 1 : -1;
        expected += sign * x[static_cast<std::size_t>(i / block * block + j)];
      }
      EXPECT_NEAR(y[static_cast<std::size_t>(i)], expected, 1e-5 * block) << block;
    }
    std::vector<float> reference = x;
    scalar().hadamard(reference.data(), n, block);
    EXPECT_EQ(std::memcmp(y.data(), reference.data(), y.size() * sizeof(float)), 0) << block;
  }
}

TEST_P(Grid, HadamardTwiceIsTheIdentityTimesTheBlock) {
  const auto x = testing::random_floats(192, 4);
  std::vector<float> y = x;
  set.hadamard(y.data(), 192, 64);
  set.hadamard(y.data(), 192, 64);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], 64 * x[i], 1e-3);
}

// Which of two zeros is the smaller one depends on the registers; ends of a range are the same everywhere.
TEST(GridRange, HasNoMinusZero) {
  cache::RowCoder coder(DType::f16, false, 40);
  std::vector<std::uint8_t> codes(40);
  for (int n = 1; n <= 40; ++n) {
    for (const int period : {1, 2, 3, 7}) {
      std::vector<float> x(40, 0.0F);
      for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(period)) x[i] = -0.0F;
      for (const cache::Endpoints ends : {coder.range(x.data(), n), coder.code(x.data(), n, 3, codes.data())}) {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(ends.min), 0U);
        EXPECT_EQ(std::bit_cast<std::uint32_t>(ends.max), 0U);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Grid, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

// ---- RowCoder, against fp64 written from its definition

double squared_error(const std::vector<float>& x, const std::vector<std::uint8_t>& codes, cache::Endpoints grid,
                     int levels) {
  double error = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double point = grid.min + codes[i] * (static_cast<double>(grid.max) - grid.min) / levels;
    error += (x[i] - point) * (x[i] - point);
  }
  return error;
}

struct Coded {
  std::vector<std::uint8_t> codes;
  cache::Endpoints grid;
  double error;
};

Coded code_row(const std::vector<float>& x, DType dtype, bool least_squares, int levels) {
  Coded coded{std::vector<std::uint8_t>(x.size()), {}, 0};
  cache::RowCoder coder(dtype, least_squares, static_cast<int>(x.size()));
  coded.grid = coder.code(x.data(), static_cast<int>(x.size()), levels, coded.codes.data());
  coded.error = squared_error(x, coded.codes, coded.grid, levels);
  return coded;
}

std::vector<float> row_of(DType dtype, std::uint32_t seed, int n) {
  auto x = testing::random_floats(static_cast<std::size_t>(n), seed, std::exp2(static_cast<float>(seed % 13) - 6));
  const float offset = seed % 5 == 0 ? 20.0F : 0.0F;
  for (float& value : x) value = testing::rounded_to(dtype, value + offset);
  return x;
}

TEST(RowCoder, LeastSquaresIsNeverWorseThanTheRange) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    double range = 0, line = 0;
    for (std::uint32_t seed = 1; seed <= 300; ++seed) {
      const int levels = (1 << (1 + seed % 6)) - 1;
      const auto x = row_of(dtype, seed, 16 + static_cast<int>(seed % 200));
      const Coded a = code_row(x, dtype, false, levels);
      const Coded b = code_row(x, dtype, true, levels);
      // The coder compares errors of points in binary32; here they are in binary64.
      EXPECT_LE(b.error, a.error * 1.0001 + 1e-12) << seed;
      EXPECT_EQ(testing::rounded_to(dtype, b.grid.min), b.grid.min);
      EXPECT_EQ(testing::rounded_to(dtype, b.grid.max), b.grid.max);
      if (levels == 1 && seed % 5 != 0) {
        range += a.error;
        line += b.error;
      }
    }
    EXPECT_LT(line, 0.6 * range) << name_of(dtype);  // one bit: the means of two halves instead of the extremes
  }
}

// Every value sits on the nearest point of the grid that is stored.
TEST(RowCoder, CodesAreTheNearestPointsOfTheStoredGrid) {
  for (std::uint32_t seed = 1; seed <= 60; ++seed) {
    for (const bool least_squares : {false, true}) {
      const int levels = (1 << (1 + seed % 6)) - 1;
      const auto x = row_of(DType::f16, seed, 128);
      const Coded coded = code_row(x, DType::f16, least_squares, levels);
      const double step = (static_cast<double>(coded.grid.max) - coded.grid.min) / levels;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double point = coded.grid.min + coded.codes[i] * step;
        const double clipped = std::clamp<double>(x[i], coded.grid.min, coded.grid.max);
        EXPECT_LE(std::fabs(clipped - point), step * 0.5001 + 1e-6 * std::fabs(point)) << seed;
      }
    }
  }
}

TEST(RowCoder, TheLineIsTheOneOfRegression) {
  // Two clusters, one bit: the line goes through their means, 1/3 and 9.
  const std::vector<float> x = {0, 0, 1, 9, 8, 10};
  const Coded coded = code_row(x, DType::f32, true, 1);
  EXPECT_NEAR(coded.grid.min, 1.0 / 3, 1e-6);
  EXPECT_NEAR(coded.grid.max, 9, 1e-6);
}

TEST(RowCoder, ConstantTinyAndHugeRows) {
  for (const bool least_squares : {false, true}) {
    const Coded constant = code_row(std::vector<float>(20, 3.5F), DType::f16, least_squares, 3);
    EXPECT_EQ(constant.grid.min, 3.5F);
    EXPECT_EQ(constant.grid.max, 3.5F);
    EXPECT_EQ(constant.error, 0);
    const Coded single = code_row({-2.0F}, DType::f16, least_squares, 15);
    EXPECT_EQ(single.grid.min, -2.0F);
    EXPECT_EQ(single.error, 0);
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      const float most = base::largest_stored(dtype);
      std::vector<float> x = testing::random_floats(100, 1);
      for (float& value : x) value = std::clamp(value, -1.0F, 1.0F) * most;
      const Coded huge = code_row(x, dtype, least_squares, 7);
      EXPECT_LE(std::fabs(huge.grid.min), most);
      EXPECT_LE(std::fabs(huge.grid.max), most);
      EXPECT_TRUE(std::isfinite(huge.grid.max - huge.grid.min));
    }
    // Below the smallest step of binary16 the grid collapses, never to a NaN.
    const Coded tiny = code_row({0.0F, 5.9604645e-8F, 0.0F, 5.9604645e-8F}, DType::f16, least_squares, 15);
    EXPECT_TRUE(std::isfinite(tiny.error));
  }
}

}  // namespace
}  // namespace kvant
