// Calibration of the kvquant recipe: levels against brute force and plain k-means in fp64, the file, and recipes with
// one.
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
using testing::make_rows;
using testing::Rows;

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
    for (std::size_t c = 0; c < count; ++c) centers[c] = weight[c] > 0 ? sum[c] / weight[c] : centers[c];
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

TEST(CalibratedRecipe, NamesTheContentsOfItsFile) {
  const Calibration calibration = make_calibration(kShape, 0.02);
  const CalibrationFile file(calibration);
  const std::string text = "kvquant:outliers=0.02,voutliers=0.02,file=" + file.path();
  const Recipe recipe = parse_recipe(text);
  EXPECT_EQ(recipe.digest, calibration_digest(calibration));
  EXPECT_EQ(parse_recipe(to_text(recipe)), recipe);
  EXPECT_EQ(to_text(recipe).find("layer"), std::string::npos);
  const LayerRecipes layers = parse_layer_recipes("layers=0:kivi,*:" + text);
  EXPECT_EQ(layers.at(2).layer, 2);
  EXPECT_EQ(layers.at(0), parse_recipe("kivi"));
  EXPECT_EQ(parse_layer_recipes(to_text(layers)), layers);
  EXPECT_EQ(parse_layer_recipes(text + ",layer=2").at(0).layer, 2);
  EXPECT_NE(remark(recipe).find("'test model'"), std::string::npos);
  EXPECT_NE(remark(recipe).find("400 tokens"), std::string::npos);
  EXPECT_NE(remark(parse_recipe("kvquant")).find("not calibrated"), std::string::npos);
  EXPECT_NE(remark(parse_recipe("k=kivi,v=kvquant")).find("not calibrated"), std::string::npos);
  EXPECT_EQ(remark(parse_recipe("kivi")), "");
  // What was loaded stays, whatever becomes of the file; but who asks for the file gets what it holds.
  file.write(to_bytes(make_calibration(kShape, 0.02, 300)));
  EXPECT_EQ(parse_recipe(to_text(recipe)), recipe);
  EXPECT_NE(parse_recipe(text).digest, recipe.digest);
}

TEST(CalibratedRecipe, MismatchesAreErrors) {
  const CalibrationFile file(make_calibration(kShape, 0.02));
  const std::string text = "kvquant:outliers=0.02,voutliers=0.02" + file.options(0);
  EXPECT_NO_THROW(make_layout(parse_recipe(text), kShape));
  const auto refuse = [](const std::string& bad, const std::vector<std::string>& parts, CacheShape shape = kShape) {
    SCOPED_TRACE(bad);
    expect_error(ErrorCode::invalid_argument, parts, [&] { Cache(parse_recipe(bad), shape); });
  };
  refuse(text, {file.path(), "2 KV heads of 20 and 28", "2 KV heads of 24 and 28"}, {2, 24, 28, DType::f16});
  refuse(text, {"1 KV heads of 20"}, {1, 20, 28, DType::f16});
  refuse("kvquant:outliers=0.02,voutliers=0.02" + file.options(1), {"no layer 1"});
  refuse("kvquant:outliers=0.02,voutliers=0.02,file=" + file.path(), {"'layer' is not given"});
  refuse("kvquant" + std::string(":voutliers=0.02") + file.options(0), {"'outliers'", "'0.01'", "0.02", file.path()});
  refuse("kvquant:outliers=0.02" + file.options(0), {"'voutliers'", "'0.01'"});
  refuse(text + ",digest=0123456789abcdef", {file.path(), "digest", "0123456789abcdef"});
  refuse(text + ",digest=123", {"'digest'", "'123'", "16"});
  refuse("kvquant:file=/nowhere/at-all,layer=0", {"'/nowhere/at-all'"});
  refuse("kvquant:file=/tmp,layer=0", {"'/tmp'", "no file"});
  refuse("kvquant:file=a b,layer=0", {"'a b'"});
  refuse("kvquant:layer=0", {"'layer'", "with file="});
  refuse("kvquant:qnorm=1", {"'qnorm'", "file="});
  refuse("kvquant:vqnorm=1", {"'vqnorm'", "file="});
  refuse("kivi:file=" + file.path(), {"'file'", "kivi"});
  Recipe recipe = parse_recipe("kivi");
  recipe.file = file.path();
  expect_error(ErrorCode::invalid_argument, {"'file'", "only with kvquant"}, [&] { validate(recipe); });
  file.write({std::byte{1}});
  refuse("kvquant:file=" + file.path(), {file.path(), "ends early"});
}

// A page by its definition, in double: the calibrated range, the page's farthest values beyond it kept, the others at
// the end's level.
void check_keys(const std::string& options, bool qnorm, DType dtype) {
  const CacheShape shape{2, 20, 28, dtype};
  const Calibration calibration = make_calibration(shape, 0.05);
  const CalibrationFile file(calibration);
  const std::string text = "kvquant:outliers=0.05,voutliers=0.05,page=32,window=0,sink=0" + options + file.options(2);
  Rows rows = make_rows(shape, 96, 8);
  for (std::size_t i = 0; i < rows.keys.size(); i += 7) rows.keys[i] *= 1.7F;  // more beyond the range than slots
  const Cache cache = testing::filled(text, rows);
  ASSERT_EQ(cache.counts().sealed_pages, 3);
  const LayerCalibration& layer = calibration.at(2);
  const int bits = std::get<KvquantKeys>(cache.recipe().key).bits;
  const LevelTable& table = layer.keys[static_cast<std::size_t>(bits - 2)];
  const auto stored = testing::read_all(cache.store(), Side::key, 96);
  int clamped = 0;
  for (int page = 0; page < 3; ++page) {
    for (std::size_t c = 0; c < 40; ++c) {
      const double min = testing::rounded_to(dtype, layer.key_min[c]);
      const double max = testing::rounded_to(dtype, layer.key_max[c]);
      std::vector<double> x;
      std::vector<std::pair<double, std::size_t>> beyond;  // minus the distance, token: of equal ones the first is kept
      for (std::size_t t = 0; t < 32; ++t) {
        x.push_back(testing::rounded_to(dtype, rows.keys[(static_cast<std::size_t>(page) * 32 + t) * 40 + c]));
        const double distance = std::max(min - x.back(), x.back() - max);
        if (distance > 0) beyond.emplace_back(-distance, t);
      }
      std::sort(beyond.begin(), beyond.end());
      if (beyond.size() > 2) beyond.resize(2);  // ceil(0.025 * 32) = 1 slot for each end
      for (std::size_t t = 0; t < 32; ++t) {
        const double actual = stored[(static_cast<std::size_t>(page) * 32 + t) * 40 + c];
        const double distance = std::max(min - x[t], x[t] - max);
        if (std::any_of(beyond.begin(), beyond.end(), [&](const auto& kept) { return kept.second == t; })) {
          ASSERT_EQ(actual, x[t]);
          continue;
        }
        clamped += distance > 0 ? 1 : 0;
        const double point = std::clamp(std::floor((x[t] - min) / (max - min) * 254 + 0.5), 0.0, 254.0);
        int best = 0;
        for (int code = 1; code < 1 << bits; ++code) {
          const auto level = [&](int of) { return static_cast<double>(table.levels[static_cast<std::size_t>(of)]); };
          if (std::fabs(level(code) - point) <= std::fabs(level(best) - point)) best = code;
        }
        const auto& decoded = qnorm ? table.normed : table.levels;
        const double expected = min + decoded[static_cast<std::size_t>(best)] * (max - min) / 254;
        ASSERT_NEAR(actual, expected, 1e-5 * (max - min) + 1e-6 * std::fabs(expected)) << text << " " << c << " " << t;
      }
    }
  }
  EXPECT_GT(clamped, 20) << text;
}

TEST(CalibratedRecipe, KeysAreCodedOnTheCalibratedRange) {
  check_keys("", false, DType::f16);
  check_keys(",k=2,qnorm=1", true, DType::f16);
  check_keys(",k=4", false, DType::f32);
  check_keys(",k=2,v=4", false, DType::bf16);
}

TEST(CalibratedRecipe, ValuesAreCodedWithTheCalibratedLevels) {
  const Calibration calibration = make_calibration(kShape, 0.05);
  const CalibrationFile file(calibration);
  const Rows rows = make_rows(kShape, 64, 6);
  for (const bool qnorm : {false, true}) {
    const std::string text =
        "k=kivi:4,v=kvquant:2,voutliers=0.05,window=0,page=64,vqnorm=" + std::string(qnorm ? "1" : "0") +
        file.options(0);
    const Cache cache = testing::filled(text, rows);
    const auto& table = calibration.at(0).values[0];
    const TileLayout& tile = cache.store().layout().value;
    EXPECT_TRUE(std::equal(tile.table.begin(), tile.table.end(), (qnorm ? table.normed : table.levels).begin()));
    EXPECT_EQ(tile.coding_table.empty(), !qnorm);
    EXPECT_TRUE(cache.store().layout().key.table.empty());  // keys of another method have nothing from the file
    const auto stored = testing::read_all(cache.store(), Side::value, 64);
    for (std::size_t t = 0; t < 64; ++t) {
      std::vector<float> x;
      for (std::size_t c = 0; c < 56; ++c) x.push_back(testing::rounded_to(DType::f16, rows.values[t * 56 + c]));
      const auto [min, max] = range_of(x, 0.05);
      for (std::size_t c = 0; c < 56; ++c) {
        if (x[c] < min || x[c] > max) {
          ASSERT_EQ(stored[t * 56 + c], x[c]);
          continue;
        }
        const double point = std::floor((x[c] - min) / (max - min) * 254 + 0.5);
        std::size_t best = 0;
        for (std::size_t code = 1; code < 4; ++code) {
          if (std::fabs(table.levels[code] - point) <= std::fabs(table.levels[best] - point)) best = code;
        }
        const double level = (qnorm ? table.normed : table.levels)[best];
        ASSERT_NEAR(stored[t * 56 + c], min + level * (max - min) / 254, 1e-5 * (max - min));
      }
    }
  }
}

const char* const kCalibrated[] = {
    "kvquant:window=0,page=32", "kvquant:k=2,v=2,qnorm=1,vqnorm=1,window=24,page=64,sink=3",
    "k=zipcache,v=kvquant:3,saliency=norm,window=0,page=64", "k=kvquant:4,v=waterfill:3,window=0"};

// O1 on every instruction set, O3 and images.
TEST(CalibratedRecipe, AttendsAsItDecodesAndDoesNotDependOnChunks) {
  const CalibrationFile file(make_calibration(kShape, 0.01));
  const Rows rows = make_rows(kShape, 200, 12);
  for (const char* base : kCalibrated) {
    const std::string text = base + file.options(2);
    for (const std::string& set : kernel_names()) {
      const testing::ForcedKernel forced(set);
      EXPECT_LT(testing::o1_error(parse_recipe(text), {kShape, 3, 200, 2}), testing::kTolerance) << text << " " << set;
    }
    const Cache whole = testing::filled(text, rows);
    Cache chunks(parse_recipe(text), kShape);
    for (std::int64_t done = 0; done < 200; done += 40) testing::append(chunks, rows, done, 40);
    const std::vector<std::byte> image = whole.save();
    EXPECT_TRUE(image == chunks.save()) << text;
    EXPECT_TRUE(Cache::load(image).save() == image) << text;
  }
}

TEST(CalibratedRecipe, BytesOfItsTablesAreCounted) {
  const CalibrationFile file(make_calibration(kShape, 0.01));
  const auto tables = [](const std::string& text) { return Cache(parse_recipe(text), kShape).bytes().tables; };
  EXPECT_EQ(tables("kvquant" + std::string(":k=3") + file.options(0)), tables("kvquant") + 2 * 40 * sizeof(float));
}

}  // namespace
}  // namespace kvant
