// tiles: products with codes against 64-bit integers, with rows against fp64, and the rounding of x.
#include <gtest/gtest.h>

#include "support/tile_data.hpp"

namespace kvant {
namespace {

using testing::Codes;
using testing::PackedX;
using testing::Plane;
using testing::scalar;

struct Product : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

// Integers up to the limit, the limit itself among them: with steps of 1 they are packed unchanged.
std::vector<float> random_integers(int vectors, int depth, bool wide, std::uint32_t seed) {
  const int limit = static_cast<int>(wide ? tiles::kWideMax : tiles::kNarrowMax);
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> uniform(-limit, limit);
  std::vector<float> v(static_cast<std::size_t>(vectors * depth));
  for (float& x : v) x = static_cast<float>(uniform(generator));
  for (int n = 0; n < vectors; ++n) {
    v[static_cast<std::size_t>(n * depth + n % depth)] = static_cast<float>(n % 2 == 0 ? limit : -limit);
  }
  return v;
}

std::vector<float> int64_reference(const Codes& codes, const std::vector<float>& v, int vectors,
                                   const std::vector<float>& factor, float start) {
  std::vector<float> out(static_cast<std::size_t>(vectors * codes.stride));
  for (int n = 0; n < vectors; ++n) {
    for (int row = 0; row < codes.stride; ++row) {
      std::int64_t sum = 0;
      for (int d = 0; d < codes.depth; ++d) {
        sum += std::int64_t{codes.at(d, row)} *
               static_cast<std::int64_t>(v[static_cast<std::size_t>(n * codes.depth + d)]);
      }
      const float product = factor[static_cast<std::size_t>(n)] * static_cast<float>(sum);
      out[static_cast<std::size_t>(n * codes.stride + row)] = start + product;
    }
  }
  return out;
}

void check_product(const tiles::Kernels& set, const Codes& codes, int bits, const std::vector<float>& v, int vectors,
                   bool wide) {
  const std::vector<float> step(static_cast<std::size_t>(codes.depth), 1.0F);
  std::vector<float> factor;
  for (int n = 0; n < vectors; ++n) factor.push_back(0.37F * static_cast<float>(n - 2));
  const PackedX x = testing::pack_x(set, v, vectors, codes.depth, step, wide, 0);
  for (const float scale : x.scale) ASSERT_EQ(scale, 1.0F);
  Plane plane = testing::pack(set, codes, bits, 0);
  ASSERT_EQ(testing::multiply(set, plane, bits, codes.rows, codes.depth, x, vectors, wide, factor, 3.5F),
            int64_reference(codes, v, vectors, factor, 3.5F))
      << bits << " bits, " << codes.rows << " x " << codes.depth << ", " << vectors << " vectors, wide " << wide;
}

TEST_P(Product, CodesEqualIntegersForEveryShape) {
  for (const int bits : {1, 2, 4}) {
    for (const int rows : testing::kRowCounts) {
      for (const int depth : testing::kDepths) {
        const Codes codes = testing::random_codes(rows, depth, bits, static_cast<std::uint32_t>(rows + depth));
        const int vectors = 1 + (rows + depth) % 7;
        check_product(set, codes, bits, random_integers(vectors, depth, true, 1), vectors, true);
        check_product(set, codes, bits, random_integers(vectors, depth, false, 2), vectors, false);
      }
    }
  }
}

TEST_P(Product, CodesEqualIntegersForEveryVectorCount) {
  for (const int bits : {1, 2, 4}) {
    for (int vectors = 1; vectors <= 7; ++vectors) {
      for (const int rows : {16, 112}) {
        const Codes codes = testing::random_codes(rows, 44, bits, 3);
        check_product(set, codes, bits, random_integers(vectors, 44, true, 4), vectors, true);
        check_product(set, codes, bits, random_integers(vectors, 44, false, 5), vectors, false);
      }
    }
  }
}

// Saturation and overflow: the largest codes and x of the longest depth there is.
TEST_P(Product, LargestSumsAreExact) {
  for (const int bits : {1, 2, 4}) {
    for (const bool wide : {true, false}) {
      for (const float sign : {1.0F, -1.0F}) {
        Codes codes{64, 1024, 64, {}};
        codes.data.assign(1024 * 64, static_cast<std::uint8_t>((1 << bits) - 1));
        const float limit = wide ? tiles::kWideMax : tiles::kNarrowMax;
        check_product(set, codes, bits, std::vector<float>(1024, sign * limit), 1, wide);
        std::vector<float> half(1024, sign * (wide ? 32384.0F : limit));  // low byte -128
        half[0] = sign * limit;
        check_product(set, codes, bits, half, 1, wide);
      }
    }
  }
}

TEST_P(Product, GatheredPlanesMeetTheirChannels) {
  for (const int bits : {1, 2, 4}) {
    for (const int depth : testing::kDepths) {
      const auto index = testing::some_channels(depth, static_cast<std::uint32_t>(depth + bits));
      const int count = static_cast<int>(index.size());
      const Codes codes = testing::random_codes(80, depth, bits, 9);
      const std::vector<float> v = testing::random_floats(static_cast<std::size_t>(5 * depth), 7);
      const std::vector<float> step = testing::random_floats(static_cast<std::size_t>(depth), 8);
      const PackedX x = testing::pack_x(set, v, 5, depth, step, true, 0, index);
      Plane plane = testing::pack(set, codes, bits, 0, index);
      const std::vector<float> out = testing::multiply(set, plane, bits, 80, count, x, 5, true, x.scale);
      for (int n = 0; n < 5; ++n) {
        for (int row = 0; row < 80; ++row) {
          double sum = 0, magnitude = 0;
          for (const int d : index) {
            const double value =
                static_cast<double>(v[static_cast<std::size_t>(n * depth + d)]) * step[static_cast<std::size_t>(d)];
            sum += value * codes.at(d, row);
            magnitude = std::max(magnitude, std::fabs(value));
          }
          const double rounding = magnitude / 32639 * 0.51 * count * ((1 << bits) - 1);
          ASSERT_NEAR(out[static_cast<std::size_t>(n * 80 + row)], sum, rounding + 1e-5) << depth << " row " << row;
        }
      }
    }
  }
}

TEST_P(Product, XIsRoundedToNearestAndItsErrorGoesToTheBias) {
  for (const bool wide : {true, false}) {
    for (const int depth : testing::kDepths) {
      const std::vector<float> v = testing::random_floats(static_cast<std::size_t>(3 * depth), 17);
      const std::vector<float> step = testing::random_floats(static_cast<std::size_t>(depth), 18);
      const PackedX x = testing::pack_x(set, v, 3, depth, step, wide, 1.5F);
      const std::vector<float> integers = testing::unpack_x(set, x, depth, 3, wide);
      ASSERT_EQ(integers,
                testing::unpack_x(scalar(), testing::pack_x(scalar(), v, 3, depth, step, wide, 1.5F), depth, 3, wide));
      for (int n = 0; n < 3; ++n) {
        const double scale = x.scale[static_cast<std::size_t>(n)];
        double error = 0;
        for (int d = 0; d < depth; ++d) {
          const auto at = static_cast<std::size_t>(n * depth + d);
          const double exact = static_cast<double>(v[at]) * step[static_cast<std::size_t>(d)];
          ASSERT_LE(std::fabs(exact - scale * integers[at]), 0.501 * scale) << depth << " " << d;
          error += exact - scale * integers[at];
        }
        ASSERT_NEAR(x.bias[static_cast<std::size_t>(n)], 10 + 1.5 * error, 0.02 * scale + 2e-6) << depth;
      }
    }
  }
}

TEST_P(Product, ZeroAndTinyXStayFinite) {
  const std::vector<float> step(40, 0.5F);
  // Softmax weights of a page far below the maximum: the largest is small enough that limit / largest overflows.
  for (const float peak : {0.0F, 1e-45F, 1e-40F, 1e-37F, 1e-35F, 1e-33F, 1e-30F, 1e-20F}) {
    std::vector<float> v(40, 0.0F);
    v[7] = peak;
    v[9] = peak * 0.25F;
    for (const bool wide : {true, false}) {
      const PackedX x = testing::pack_x(set, v, 1, 40, step, wide, 7.5F);
      ASSERT_TRUE(std::isfinite(x.scale[0])) << peak;
      ASSERT_NEAR(x.bias[0], 10.0F, 1e-5F) << peak;
      const Codes codes = testing::random_codes(32, 40, 4, 3);
      Plane plane = testing::pack(set, codes, 4, 0);
      for (const float out : testing::multiply(set, plane, 4, 32, 40, x, 1, wide, x.scale)) {
        ASSERT_TRUE(std::isfinite(out)) << peak;
        ASSERT_LE(std::fabs(out), peak * 16) << peak;
      }
    }
  }
}

TEST_P(Product, NanAndInfinityReachTheResult) {
  const std::vector<float> step(70, 1.0F);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const int at : {0, 3, 15, 16, 33, 69}) {
      std::vector<float> v = testing::random_floats(3 * 70, 5);
      v[static_cast<std::size_t>(70 + at)] = bad;  // the second of three vectors
      for (const bool wide : {true, false}) {
        const PackedX x = testing::pack_x(set, v, 3, 70, step, wide, 1.5F);
        Codes codes = testing::random_codes(48, 70, 2, 3);
        Plane plane = testing::pack(set, codes, 2, 0);
        const std::vector<float> out = testing::multiply(set, plane, 2, 48, 70, x, 3, wide, x.scale);
        for (int i = 0; i < 3 * 48; ++i) {
          ASSERT_EQ(std::isfinite(out[static_cast<std::size_t>(i)]), i / 48 != 1) << bad << " at " << at;
        }
      }
    }
  }
}

TEST_P(Product, RowsEqualFp64) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int rows : testing::kRowCounts) {
      for (const int depth : {1, 5, 64, 129}) {
        const int vectors = 1 + (rows + depth) % 7;
        const int padded = base::round_up(rows, 16);
        const std::vector<float> tile = testing::random_floats(static_cast<std::size_t>(depth * padded), 5);
        const std::vector<std::byte> bytes = testing::as_type(tile, type);
        const std::vector<float> v = testing::random_floats(static_cast<std::size_t>(vectors * depth), 6);
        std::vector<float> out(static_cast<std::size_t>(vectors * padded), 2.0F);
        set.multiply_rows({bytes.data(), type, padded, rows, depth, v.data(), depth, vectors, out.data(), padded});
        for (int n = 0; n < vectors; ++n) {
          for (int row = 0; row < rows; ++row) {
            double sum = 2, magnitude = 2;
            for (int d = 0; d < depth; ++d) {
              const double x = base::load_float(bytes.data(), type, d * padded + row);
              const double term = x * v[static_cast<std::size_t>(n * depth + d)];
              sum += term;
              magnitude += std::fabs(term);
            }
            ASSERT_NEAR(out[static_cast<std::size_t>(n * padded + row)], sum, 2e-6 * magnitude) << rows << "x" << depth;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, Product, ::testing::ValuesIn(testing::kernel_sets()),
                         testing::kernel_set_name);

}  // namespace
}  // namespace kvant
