// Calibration of the kvquant recipe: levels against brute force and plain k-means in fp64, and the file.
#include "support/calibration.hpp"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <numeric>
#include <random>

#include "methods/kvquant/levels.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

using kvquant::LevelFit;
using testing::CalibrationFile;
using testing::expect_error;
using testing::make_calibration;

struct Sample {
  double value;
  double weight;
};

double level_value(int step) {
  return step / 127.0 - 1;
}

// Of the samples, each at the level that is nearest to its grid point.
double error_of(const std::vector<Sample>& samples, const std::vector<int>& levels) {
  double error = 0;
  for (const Sample& sample : samples) {
    const double point = std::round((sample.value + 1) * 127);
    const int nearest = *std::min_element(levels.begin(), levels.end(),
                                          [&](int a, int b) { return std::fabs(a - point) < std::fabs(b - point); });
    error += sample.weight * std::pow(sample.value - level_value(nearest), 2);
  }
  return error;
}

std::vector<int> levels_of(const std::array<std::uint8_t, 16>& table, int count) {
  return {table.begin(), table.begin() + count};
}

LevelTables fitted(const std::vector<Sample>& samples) {
  LevelFit fit;
  for (const Sample& sample : samples) fit.add(sample.value, sample.weight);
  return fit.tables();
}

// The least error of any `count` levels among the steps first..last.
double least_error(const std::vector<Sample>& samples, int count, int first, int last, std::vector<int>& chosen) {
  if (static_cast<int>(chosen.size()) == count) return error_of(samples, chosen);
  double least = 1e300;
  for (int step = chosen.empty() ? first : chosen.back() + 1; step <= last; ++step) {
    chosen.push_back(step);
    least = std::min(least, least_error(samples, count, first, last, chosen));
    chosen.pop_back();
  }
  return least;
}

TEST(Levels, AreTheBestOfAllThereAre) {
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    std::vector<Sample> samples;  // on the grid: then no sample is nearer to another level than its grid point is
    for (int i = 0; i < 30; ++i) {
      const int step = 120 + static_cast<int>(random() % 14);
      samples.push_back({level_value(step), round < 3 ? 1.0 : 0.01 * static_cast<double>(random() % 100)});
    }
    const LevelTables tables = fitted(samples);
    std::vector<int> chosen;
    EXPECT_NEAR(error_of(samples, levels_of(tables[0].levels, 4)), least_error(samples, 4, 120, 133, chosen), 1e-12);
    EXPECT_NEAR(error_of(samples, levels_of(tables[1].levels, 8)), least_error(samples, 8, 120, 133, chosen), 1e-12);
  }
}

// Lloyd's iteration without a grid, from evenly spaced quantiles.
std::vector<double> plain_k_means(std::vector<Sample> samples, std::size_t count) {
  std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.value < b.value; });
  std::vector<double> centers;
  for (std::size_t i = 0; i < count; ++i) centers.push_back(samples[(2 * i + 1) * samples.size() / (2 * count)].value);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> sum(count), weight(count);
    for (const Sample& s : samples) {
      std::size_t best = 0;
      for (std::size_t c = 1; c < count; ++c) {
        if (std::fabs(s.value - centers[c]) < std::fabs(s.value - centers[best])) best = c;
      }
      sum[best] += s.weight * s.value;
      weight[best] += s.weight;
    }
    const std::vector<double> before = centers;
    for (std::size_t c = 0; c < count; ++c) centers[c] = weight[c] > 0 ? sum[c] / weight[c] : centers[c];
    if (centers == before) break;  // so would all later rounds be
  }
  return centers;
}

double free_error(const std::vector<Sample>& samples, const std::vector<double>& centers) {
  double error = 0;
  for (const Sample& s : samples) {
    double least = 1e300;
    for (const double center : centers) least = std::min(least, std::pow(s.value - center, 2));
    error += s.weight * least;
  }
  return error;
}

// Better than Lloyd's local optimum, or worse by no more than the grid costs.
TEST(Levels, AreNoWorseThanPlainKMeans) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (const double gap : {0.0, 0.5}) {
    std::vector<Sample> samples;
    for (int i = 0; i < 2000; ++i) {
      const double value = normal(random) / 6 + (i % 3 == 0 ? gap : -gap);
      samples.push_back({std::clamp(value, -1.0, 1.0), std::fabs(normal(random))});
    }
    const LevelTables tables = fitted(samples);
    for (std::size_t t = 0; t < 3; ++t) {
      const auto count = std::size_t{4} << t;
      const std::vector<int> levels = levels_of(tables[t].levels, static_cast<int>(count));
      ASSERT_EQ(std::adjacent_find(levels.begin(), levels.end(), std::greater_equal<>()), levels.end());
      const double plain = free_error(samples, plain_k_means(samples, count));
      EXPECT_LT(error_of(samples, levels), 1.03 * plain) << gap << " " << count;
    }
  }
}

TEST(Levels, WithoutWeightAreEvenlySpaced) {
  EXPECT_EQ(levels_of(fitted({})[0].levels, 4), (std::vector<int>{0, 85, 169, 254}));
  const LevelTables one = fitted({{0.25, 3.0}});
  for (std::size_t t = 0; t < 3; ++t) {
    const auto levels = levels_of(one[t].levels, 4 << t);
    EXPECT_EQ(std::adjacent_find(levels.begin(), levels.end(), std::greater_equal<>()), levels.end());
    EXPECT_NE(std::find(levels.begin(), levels.end(), 159), levels.end());
  }
}

// Q-Norm: what the moved levels stand for has the mean and the deviation of the samples.
TEST(Levels, NormedOnesKeepMeanAndDeviation) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  std::vector<Sample> samples;
  for (int i = 0; i < 20000; ++i) samples.push_back({std::clamp(0.1 + normal(random) / 5, -1.0, 1.0), 1.0});
  const LevelTables tables = fitted(samples);
  const auto moments = [&](const std::vector<int>& nearest, const std::vector<int>& levels) {
    double sum = 0, square = 0;
    for (const Sample& s : samples) {
      const double point = std::round((s.value + 1) * 127);
      std::size_t best = 0;
      for (std::size_t c = 1; c < nearest.size(); ++c) {
        if (std::fabs(nearest[c] - point) < std::fabs(nearest[best] - point)) best = c;
      }
      sum += level_value(levels[best]);
      square += std::pow(level_value(levels[best]), 2);
    }
    const double mean = sum / static_cast<double>(samples.size());
    return std::pair(mean, std::sqrt(square / static_cast<double>(samples.size()) - mean * mean));
  };
  double sum = 0, square = 0;
  for (const Sample& s : samples) sum += s.value, square += s.value * s.value;
  const double mean = sum / 20000;
  const double deviation = std::sqrt(square / 20000 - mean * mean);
  const std::vector<int> levels = levels_of(tables[0].levels, 4);
  const auto plain = moments(levels, levels);
  const auto normed = moments(levels, levels_of(tables[0].normed, 4));
  EXPECT_LT(plain.second, 0.96 * deviation);
  EXPECT_NEAR(normed.second, deviation, 0.006);  // levels lie on a grid of 1 / 127
  EXPECT_NEAR(normed.first, mean, 0.004);
}

// Samples of a layer by the definition: each vector moved to [-1, 1] by its range without outliers, weight s^2 * F.
struct Layer {
  int heads, key_dim, value_dim;
  std::int64_t tokens;
  std::vector<float> keys, values, key_weights, value_weights;

  CalibrationRows rows(bool weighted) const {
    return {heads,
            key_dim,
            value_dim,
            tokens,
            keys.data(),
            values.data(),
            weighted ? key_weights.data() : nullptr,
            weighted ? value_weights.data() : nullptr};
  }
};

std::pair<double, double> range_of(std::vector<float> vector, double outliers) {
  std::sort(vector.begin(), vector.end());
  const auto outside = static_cast<std::size_t>(std::ceil(outliers / 2 * static_cast<double>(vector.size()) - 1e-9));
  return {vector[outside], vector[vector.size() - 1 - outside]};
}

void add_samples(const std::vector<float>& vector, const std::vector<float>& weights, double outliers,
                 std::vector<Sample>& samples) {
  const auto [min, max] = range_of(vector, outliers);
  const double s = (max - min) / 2;
  for (std::size_t i = 0; i < vector.size(); ++i) {
    if (vector[i] < min || vector[i] > max) continue;
    samples.push_back({(vector[i] - (min + max) / 2) / s, s * s * (weights.empty() ? 1.0 : weights[i])});
  }
}

Layer random_layer() {
  Layer layer{2, 6, 5, 300, {}, {}, {}, {}};
  layer.keys = testing::random_keys(layer.tokens, 2, 6, 3);
  layer.values = testing::random_floats(static_cast<std::size_t>(layer.tokens) * 10, 4);
  layer.key_weights = testing::random_floats(layer.keys.size(), 5);
  layer.value_weights = testing::random_floats(layer.values.size(), 6);
  for (std::vector<float>* weights : {&layer.key_weights, &layer.value_weights}) {
    for (float& w : *weights) w *= w;
  }
  return layer;
}

TEST(Calibration, RangesAndLevelsAreThoseOfTheDefinition) {
  const Layer layer = random_layer();
  for (const bool weighted : {false, true}) {
    for (const double outliers : {0.0, 0.01, 0.3}) {
      const LayerCalibration result = calibrate_layer(7, layer.rows(weighted), outliers);
      EXPECT_EQ(result.layer, 7);
      const auto vector = [](const std::vector<float>& all, std::size_t first, std::size_t count, std::size_t step) {
        std::vector<float> part;
        for (std::size_t i = 0; i < count; ++i) part.push_back(all[first + i * step]);
        return part;
      };
      std::vector<Sample> keys, values;
      for (std::size_t c = 0; c < 12; ++c) {
        const auto channel = vector(layer.keys, c, 300, 12);
        const auto [min, max] = range_of(channel, outliers);
        EXPECT_EQ(result.key_min[c], static_cast<float>(min));
        EXPECT_EQ(result.key_max[c], static_cast<float>(max));
        add_samples(channel, weighted ? vector(layer.key_weights, c, 300, 12) : std::vector<float>(), outliers, keys);
      }
      for (std::size_t t = 0; t < 300; ++t) {
        add_samples(vector(layer.values, t * 10, 10, 1),
                    weighted ? vector(layer.value_weights, t * 10, 10, 1) : std::vector<float>(), outliers, values);
      }
      for (const auto& [tables, samples] : {std::pair(result.keys, keys), std::pair(result.values, values)}) {
        for (std::size_t t = 0; t < 3; ++t) {
          const auto count = std::size_t{4} << t;
          const double plain = free_error(samples, plain_k_means(samples, count));
          EXPECT_LT(error_of(samples, levels_of(tables[t].levels, static_cast<int>(count))), 1.05 * plain + 1e-6);
        }
      }
    }
  }
}

TEST(Calibration, BadRowsAreNamed) {
  Layer layer = random_layer();
  const auto refuse = [&](ErrorCode code, const std::vector<std::string>& parts, const CalibrationRows& rows,
                          double outliers = 0.01) {
    expect_error(code, parts, [&] { calibrate_layer(3, rows, outliers); });
  };
  CalibrationRows rows = layer.rows(false);
  rows.tokens = 1;
  refuse(ErrorCode::invalid_argument, {"layer 3", "1 tokens", "2 and more"}, rows);
  rows = layer.rows(false);
  rows.key_dim = 1025;
  refuse(ErrorCode::invalid_argument, {"1025", "1 to 1024"}, rows);
  rows = layer.rows(false);
  rows.values = nullptr;
  refuse(ErrorCode::invalid_argument, {"values of layer 3", "no data"}, rows);
  refuse(ErrorCode::invalid_argument, {"outliers", "1.0"}, layer.rows(false), 1.0);
  layer.key_weights[17] = -1;
  refuse(ErrorCode::invalid_argument, {"weights of the keys", "value 17", "0 and more"}, layer.rows(true));
  layer.values[5] = std::numeric_limits<float>::infinity();
  refuse(ErrorCode::not_finite, {"values of layer 3", "value 5"}, layer.rows(true));
}

const CacheShape kShape{2, 20, 28, DType::f16};

TEST(CalibrationBytes, ComeBackFromTheFile) {
  Calibration calibration = make_calibration(kShape, 0.02);
  calibration.weighted = true;
  EXPECT_EQ(read_calibration(to_bytes(calibration)), calibration);
  const CalibrationFile file(calibration);
  EXPECT_EQ(*load_calibration(file.path()), calibration);
  const std::vector<std::byte> bytes = to_bytes(calibration);
  EXPECT_EQ(calibration_digest(calibration), XXH64(bytes.data(), bytes.size(), 0));
  expect_error(ErrorCode::invalid_argument, {"test model", "no layer 1", "2 layers"}, [&] { calibration.at(1); });
}

// The fuzzer's job in small, for compilers without libFuzzer.
TEST(CalibrationBytes, DamagedOnesAreRefusedOrComeBackAsTheyAre) {
  const std::vector<std::byte> good = to_bytes(make_calibration(kShape, 0.02, 40));
  for (std::size_t size = 0; size < good.size(); size += size < 200 ? 1 : 37) {
    expect_error(ErrorCode::bad_format, {"calibration file"}, [&] { read_calibration(std::span(good).first(size)); });
  }
  std::mt19937 random(11);
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::byte> bytes = good;
    const std::size_t at = random() % (bytes.size() - 8);
    bytes[at] ^= static_cast<std::byte>(1 + random() % 255);
    if (round % 4 == 0) {
      expect_error(ErrorCode::bad_format, {}, [&] { read_calibration(bytes); });
      continue;
    }
    const std::uint64_t checksum = XXH64(bytes.data(), bytes.size() - 8, 0);
    std::memcpy(bytes.data() + bytes.size() - 8, &checksum, 8);
    try {
      ASSERT_TRUE(to_bytes(read_calibration(bytes)) == bytes);
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::bad_format) << error.what();
    }
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace kvant
