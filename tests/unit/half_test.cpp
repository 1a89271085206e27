// base: half types over all of their values, checked sizes, names.
#include "base/half.hpp"

#include <gtest/gtest.h>

#include "base/checked.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

using base::bfloat_to_float;
using base::float_to_bfloat;
using base::float_to_half;
using base::half_to_float;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value of a binary16 straight from the standard's definition.
double half_value(int bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool is_nan_half(int bits) {
  return (bits & 0x7C00) == 0x7C00 && (bits & 0x3FF) != 0;
}

TEST(Half, EveryValueWidensExactly) {
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = half_to_float(static_cast<std::uint16_t>(bits));
    if (is_nan_half(bits)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else if ((bits & 0x7C00) == 0x7C00) {
      ASSERT_EQ(value, (bits & 0x8000) != 0 ? -kInfinity : kInfinity);
    } else {
      ASSERT_EQ(value, half_value(bits)) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    }
  }
}

TEST(Half, EveryValueComesBack) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const std::uint16_t back = float_to_half(half_to_float(half));
    if (is_nan_half(bits)) {
      ASSERT_TRUE(is_nan_half(back)) << bits;
      ASSERT_EQ(back & 0x8000, bits & 0x8000) << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

TEST(Half, MidpointsOfAllNeighboursGoToTheEvenOne) {
  for (int bits = 0; bits < 0x7BFF; ++bits) {
    const auto low = static_cast<float>(half_value(bits));
    const auto high = static_cast<float>(half_value(bits + 1));
    const float middle = (low + high) / 2;  // 12 significant bits: exact
    const int even = (bits & 1) == 0 ? bits : bits + 1;
    ASSERT_EQ(float_to_half(middle), even);
    ASSERT_EQ(float_to_half(-middle), even | 0x8000);
    ASSERT_EQ(float_to_half(std::nextafter(middle, 0.0F)), bits);
    ASSERT_EQ(float_to_half(std::nextafter(middle, kInfinity)), bits + 1);
  }
}

TEST(Half, OverflowAndNan) {
  EXPECT_EQ(float_to_half(65504.0F), 0x7BFF);
  EXPECT_EQ(float_to_half(base::kRoundsToMaxHalf), 0x7BFF);
  EXPECT_EQ(float_to_half(std::nextafter(65520.0F, 0.0F)), 0x7BFF);
  EXPECT_EQ(float_to_half(65520.0F), 0x7C00);
  EXPECT_EQ(float_to_half(-65520.0F), 0xFC00);
  EXPECT_EQ(float_to_half(kInfinity), 0x7C00);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(float_to_half(-std::numeric_limits<float>::denorm_min()), 0x8000);
  // A NaN whose payload sits in the low bits only must not become infinity.
  EXPECT_TRUE(is_nan_half(float_to_half(std::bit_cast<float>(0x7F800001U))));
  EXPECT_TRUE(is_nan_half(float_to_half(std::bit_cast<float>(0xFF800001U))));
}

TEST(Bfloat, EveryValueBothWays) {
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = bfloat_to_float(static_cast<std::uint16_t>(bits));
    const bool nan = (bits & 0x7F80) == 0x7F80 && (bits & 0x7F) != 0;
    ASSERT_EQ(std::isnan(value), nan) << bits;
    const std::uint16_t back = float_to_bfloat(value);
    if (nan) {
      ASSERT_TRUE(std::isnan(bfloat_to_float(back))) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(value), static_cast<std::uint32_t>(bits) << 16);
      ASSERT_EQ(back, bits);
    }
  }
}

TEST(Bfloat, MidpointsOfAllNeighboursGoToTheEvenOne) {
  for (std::uint32_t bits = 0; bits < 0x7F7F; ++bits) {
    const std::uint32_t middle = (bits << 16) | 0x8000U;
    const std::uint32_t even = (bits & 1U) == 0 ? bits : bits + 1;
    ASSERT_EQ(float_to_bfloat(std::bit_cast<float>(middle)), even);
    ASSERT_EQ(float_to_bfloat(std::bit_cast<float>(middle | 0x80000000U)), even | 0x8000U);
    ASSERT_EQ(float_to_bfloat(std::bit_cast<float>(middle - 1)), bits);
    ASSERT_EQ(float_to_bfloat(std::bit_cast<float>(middle + 1)), bits + 1);
  }
  EXPECT_EQ(float_to_bfloat(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(float_to_bfloat(base::kMaxBfloat), 0x7F7F);
  EXPECT_TRUE(std::isnan(bfloat_to_float(float_to_bfloat(std::bit_cast<float>(0x7F800001U)))));
}

TEST(Half, LoadAndStoreTakeTheTypeAsAnArgument) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> bytes(4 * size_of(type));
    base::store_float(bytes.data(), type, 2, 1.5F);
    EXPECT_EQ(base::load_float(bytes.data(), type, 2), 1.5F) << name_of(type);
    EXPECT_EQ(base::load_float(bytes.data(), type, 1), 0.0F);
    EXPECT_EQ(testing::rounded_to(type, base::max_finite(type)), base::max_finite(type));
  }
}

TEST(Checked, SizesThatOverflowAreRefused) {
  constexpr std::size_t kMax = std::numeric_limits<std::size_t>::max();
  EXPECT_EQ(base::checked_multiply(kMax / 2, 2), kMax - 1);
  EXPECT_EQ(base::checked_multiply(0, kMax), 0U);
  EXPECT_EQ(base::checked_add(kMax - 1, 1), kMax);
  testing::expect_error(ErrorCode::out_of_memory, {"overflows"}, [] { base::checked_multiply(kMax / 2 + 1, 2); });
  testing::expect_error(ErrorCode::out_of_memory, {"overflows"}, [] { base::checked_add(kMax, 1); });
}

TEST(Checked, RoundUp) {
  static_assert(base::round_up(0, 16) == 0);
  static_assert(base::round_up(1, 16) == 16);
  static_assert(base::round_up(16, 16) == 16);
  static_assert(base::round_up(std::size_t{17}, std::size_t{16}) == 32);
}

TEST(Names, CodesAndTypesHaveStableText) {
  EXPECT_STREQ(name_of(ErrorCode::invalid_argument), "invalid_argument");
  EXPECT_STREQ(name_of(ErrorCode::out_of_range), "out_of_range");
  EXPECT_STREQ(name_of(ErrorCode::not_finite), "not_finite");
  EXPECT_STREQ(name_of(ErrorCode::unsupported), "unsupported");
  EXPECT_STREQ(name_of(ErrorCode::bad_format), "bad_format");
  EXPECT_STREQ(name_of(ErrorCode::out_of_memory), "out_of_memory");
  EXPECT_STREQ(name_of(DType::f32), "f32");
  EXPECT_STREQ(name_of(DType::f16), "f16");
  EXPECT_STREQ(name_of(DType::bf16), "bf16");
}

TEST(Runtime, KernelSetsAreListedAndForced) {
  const std::vector<std::string> names = kernel_names();
  EXPECT_EQ(names.back(), "scalar");
  for (const std::string& name : names) {
    force_kernel(name);
    EXPECT_EQ(active_kernel(), name);
  }
  force_kernel(names.front());
  testing::expect_error(ErrorCode::invalid_argument, {"sse9", "scalar"}, [] { force_kernel("sse9"); });
  EXPECT_EQ(active_kernel(), names.front());
}

}  // namespace
}  // namespace kvant
