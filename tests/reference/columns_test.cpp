// The column kernels of every instruction set against the arithmetic of numerics.md written out, bit for bit.
#include "exact/columns.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

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

void expect_bits(const char* what, const char* target, const std::vector<float>& got, const std::vector<float>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << " on " << target << ", column " << i << " of " << want.size() << ": " << got[i] << " for "
        << want[i];
  }
}

TEST(Columns, SumsEqualTheirDefinition) {
  std::mt19937 random(3);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      const auto size = static_cast<std::size_t>(n);
      const std::vector<float> x = random_values(size, random);
      const std::vector<float> mean = random_values(size, random);
      std::vector<float> got(size, 0.5F);
      std::vector<float> want(size, 0.5F);
      k.add(x.data(), n, got.data());
      k.add_squares(x.data(), n, got.data());
      k.add_squared_differences(x.data(), mean.data(), n, got.data());
      k.multiply(0.3F, n, got.data());
      for (std::size_t c = 0; c < size; ++c) {
        want[c] += x[c];
        const float square = x[c] * x[c];
        want[c] += square;
        const float difference = x[c] - mean[c];
        const float squared = difference * difference;
        want[c] += squared;
        want[c] *= 0.3F;
      }
      expect_bits("sums", k.target, got, want);
    }
  }
}

TEST(Columns, ExtremesPropagateNaN) {
  std::mt19937 random(4);
  for (const ColumnKernels& k : all_columns()) {
    for (const int n : kSizes) {
      const auto size = static_cast<std::size_t>(n);
      const std::vector<float> x = random_values(size * 5, random);
      std::vector<const float*> rows;
      for (std::size_t r = 0; r < 5; ++r) rows.push_back(x.data() + r * size);
      std::vector<float> min(size);
      std::vector<float> max(size);
      k.min_max(rows.data(), 5, n, min.data(), max.data());
      std::vector<float> low(rows[0], rows[0] + n);
      std::vector<float> high = low;
      for (std::size_t r = 1; r < 5; ++r) {
        for (std::size_t c = 0; c < size; ++c) {
          const float value = rows[r][c];
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
      k.encode(value.data(), min.data(), scale.data(), levels.data(), n, codes.data());
      k.decode(codes.data(), min.data(), scale.data(), n, got.data());
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
