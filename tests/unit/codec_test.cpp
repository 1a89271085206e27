// tiles: half types, the uniform grid and its extremes, for every kernel set against the scalar one.
#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant {
namespace {

using testing::scalar;

struct Codec : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

float widened(DType type, std::uint16_t bits) {
  return type == DType::f16 ? base::half_to_float(bits) : base::bfloat_to_float(bits);
}
std::uint16_t narrowed(DType type, float value) {
  return type == DType::f16 ? base::float_to_half(value) : base::float_to_bfloat(value);
}

bool same_float(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

TEST_P(Codec, WidenEqualsScalarOverAllValues) {
  std::vector<std::uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), std::uint16_t{0});
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<float> wide(bits.size());
    set.widen(bits.data(), type, wide.data(), 65536);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      ASSERT_TRUE(same_float(wide[i], widened(type, bits[i]))) << name_of(type) << " " << i;
    }
  }
}

// Every value of the type, the midpoints to its neighbour and the floats just beside them.
TEST_P(Codec, NarrowEqualsScalarAroundAllValues) {
  for (const DType type : {DType::f16, DType::bf16}) {
    std::vector<float> x;
    for (int i = 0; i < 65536; ++i) {
      const float value = widened(type, static_cast<std::uint16_t>(i));
      x.push_back(value);
      if (!std::isfinite(value)) continue;
      const float next = widened(type, static_cast<std::uint16_t>(i + 1));
      const auto middle = static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
      x.insert(x.end(), {middle, std::nextafter(middle, -1e30F), std::nextafter(middle, 1e30F)});
    }
    std::vector<std::uint16_t> narrow(x.size());
    set.narrow(x.data(), narrow.data(), type, static_cast<std::int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(widened(type, narrow[i])));
      } else {
        ASSERT_EQ(narrow[i], narrowed(type, x[i])) << name_of(type) << " " << x[i];
      }
    }
  }
}

TEST_P(Codec, WidenAndNarrowStopAtTheEnd) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (int n = 0; n < 70; ++n) {
      const std::vector<float> x = testing::random_floats(static_cast<std::size_t>(n), 5);
      std::vector<std::byte> narrow(static_cast<std::size_t>(n + 1) * size_of(type), std::byte{0x5A});
      set.narrow(x.data(), narrow.data(), type, n);
      EXPECT_EQ(narrow[static_cast<std::size_t>(n) * size_of(type)], std::byte{0x5A}) << n;
      std::vector<float> wide(static_cast<std::size_t>(n) + 1, 77.0F);
      set.widen(narrow.data(), type, wide.data(), n);
      EXPECT_EQ(wide.back(), 77.0F) << n;
      for (int i = 0; i < n; ++i) {
        EXPECT_EQ(wide[static_cast<std::size_t>(i)], testing::rounded_to(type, x[static_cast<std::size_t>(i)]));
      }
    }
  }
}

TEST_P(Codec, MinMaxOfEveryLength) {
  for (int n = 1; n < 70; ++n) {
    std::vector<float> x = testing::random_floats(static_cast<std::size_t>(n), 3);
    for (int at = 0; at < n; ++at) {
      std::vector<float> spiked = x;
      spiked[static_cast<std::size_t>(at)] = 50;
      spiked[static_cast<std::size_t>(n - 1 - at)] = -50;
      float min = 0, max = 0;
      set.min_max(spiked.data(), n, &min, &max);
      ASSERT_EQ(min, -50.0F) << n << " " << at;
      ASSERT_EQ(max, *std::max_element(spiked.begin(), spiked.end())) << n << " " << at;
    }
  }
}

void expect_same_codes(const tiles::Kernels& set, const std::vector<float>& x, int bits, const char* what) {
  const int n = static_cast<int>(x.size());
  const int levels = (1 << bits) - 1;
  float min = 0, max = 0;
  scalar().min_max(x.data(), n, &min, &max);
  const float step = tiles::grid_step(min, max, levels);
  std::vector<std::uint8_t> codes(x.size(), 0xEE), expected(x.size(), 0xDD);
  set.quantize(x.data(), n, min, step, levels, codes.data());
  scalar().quantize(x.data(), n, min, step, levels, expected.data());
  ASSERT_EQ(codes, expected) << what << " bits " << bits;
  std::vector<float> back(x.size()), expected_back(x.size());
  set.dequantize(codes.data(), n, min, step, back.data());
  scalar().dequantize(codes.data(), n, min, step, expected_back.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_TRUE(same_float(back[i], expected_back[i])) << what << " bits " << bits;
    // Half a step, what rounding min + code * step to float adds, and a step that is itself a rounded subnormal.
    const double slack = 0.5001 * step + 4e-7 * std::max(std::fabs(min), std::fabs(max)) + levels * 1.5e-45 +
                         (step > 0 ? 0 : static_cast<double>(max) - min);
    ASSERT_LE(std::fabs(static_cast<double>(back[i]) - x[i]), slack) << what << " bits " << bits << " x " << x[i];
  }
}

TEST_P(Codec, QuantizeEqualsScalarOnEveryGrid) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int n : {1, 2, 3, 15, 16, 17, 31, 80, 128, 256}) {
      const auto count = static_cast<std::size_t>(n);
      expect_same_codes(set, testing::random_floats(count, static_cast<std::uint32_t>(n)), bits, "normal");
      expect_same_codes(set, std::vector<float>(count, 3.25F), bits, "zero range");
      expect_same_codes(set, std::vector<float>(count, 0.0F), bits, "zeros");
      expect_same_codes(set, testing::random_floats(count, 2, 1e-30F), bits, "tiny");
      expect_same_codes(set, testing::random_floats(count, 2, 1e-42F), bits, "subnormal");
      expect_same_codes(set, testing::random_floats(count, 2, 1e37F), bits, "huge");
      std::vector<float> ties(count);  // a grid of step 1 whose midpoints are all hit
      for (std::size_t i = 0; i < count; ++i) ties[i] = 0.5F * static_cast<float>(i % (2 * ((1U << bits) - 1) + 1));
      expect_same_codes(set, ties, bits, "ties");
      std::vector<float> offset = testing::random_floats(count, 4, 1e-6F);  // range of few units in the last place
      for (float& x : offset) x += 9.0F;
      expect_same_codes(set, offset, bits, "offset");
    }
  }
}

TEST_P(Codec, TiesGoUpAndEndsAreClamped) {
  const std::vector<float> x = {0.0F, 0.5F, 1.5F, 2.5F, 3.0F, 0.49F, -5.0F, 9.0F};
  std::vector<std::uint8_t> codes(x.size());
  set.quantize(x.data(), static_cast<int>(x.size()), 0.0F, 1.0F, 3, codes.data());
  EXPECT_EQ(codes, (std::vector<std::uint8_t>{0, 1, 2, 3, 3, 0, 0, 3}));
}

TEST_P(Codec, DotEqualsFp64) {
  for (int n = 1; n <= 260; n += n < 40 ? 1 : 37) {
    const std::vector<float> a = testing::random_floats(static_cast<std::size_t>(n), 1);
    const std::vector<float> b = testing::random_floats(static_cast<std::size_t>(n), 2);
    double expected = 0, magnitude = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      expected += static_cast<double>(a[i]) * b[i];
      magnitude += std::fabs(static_cast<double>(a[i]) * b[i]);
    }
    EXPECT_NEAR(set.dot(a.data(), b.data(), n), expected, 1e-6 * magnitude) << n;
  }
}

// Middle and step of a page's grid, ends in every type, with a last part shorter than a register.
TEST_P(Codec, GridsEqualTheFormula) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int n : {1, 7, 16, 37, 128}) {
      const auto count = static_cast<std::size_t>(n);
      const std::vector<std::byte> low = testing::as_type(testing::random_floats(count, 1), type);
      const std::vector<std::byte> high = testing::as_type(testing::random_floats(count, 2), type);
      std::vector<float> inverse(count), middle(count + 1, 9.0F), step(count + 1, 9.0F);
      for (int i = 0; i < n; ++i) inverse[static_cast<std::size_t>(i)] = 1.0F / static_cast<float>(1 + i % 126);
      set.load_grid(low.data(), high.data(), type, inverse.data(), n, middle.data(), step.data());
      for (int i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const double from = base::load_float(low.data(), type, i);
        const double to = base::load_float(high.data(), type, i);
        ASSERT_NEAR(middle[at], (from + to) / 2, 1e-7 * (std::fabs(from) + std::fabs(to))) << n << " " << i;
        ASSERT_NEAR(step[at], (to - from) / (1 + i % 126), 2e-7 * std::fabs(to - from)) << n << " " << i;
      }
      ASSERT_EQ(middle[count], 9.0F);
      ASSERT_EQ(step[count], 9.0F);
    }
  }
}

TEST_P(Codec, LanesAreGatheredInOrder) {
  const std::vector<float> lanes = testing::random_floats(300 * 4, 3);
  for (const int n : {1, 4, 30, 128, 300}) {
    std::vector<std::uint16_t> order;
    for (int i = 0; i < n; ++i) order.push_back(static_cast<std::uint16_t>(i * 7 % 300));
    for (int vectors = 1; vectors <= 4; ++vectors) {
      std::vector<float> to(static_cast<std::size_t>(4 * 304), 9.0F);
      set.gather_lanes(lanes.data(), order.data(), n, vectors, to.data(), 304);
      for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 304; ++i) {
          const bool written = v < vectors && i < n;
          const float expected =
              written ? lanes[static_cast<std::size_t>(4 * order[static_cast<std::size_t>(i)] + v)] : 9.0F;
          ASSERT_EQ(to[static_cast<std::size_t>(v * 304 + i)], expected) << n << " " << v << " " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, Codec, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

}  // namespace
}  // namespace kvant
