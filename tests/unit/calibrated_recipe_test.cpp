// Recipes with a calibration file: their text, what is refused, and what their pages hold.
#include <gtest/gtest.h>

#include "support/calibration.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

using testing::CalibrationFile;
using testing::expect_error;
using testing::make_calibration;
using testing::make_rows;
using testing::Rows;

const CacheShape kShape{2, 20, 28, DType::f16};

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
  refuse(text + ",rope=before", {"'rope'", "'before'", "after", file.path()});
  Calibration before = make_calibration(kShape, 0.02);
  before.before_rope = true;
  const CalibrationFile other(before, "before");
  const std::string sides = "outliers=0.02,voutliers=0.02" + other.options(0);
  EXPECT_NO_THROW(make_layout(parse_recipe("kvquant:rope=before," + sides), kShape));
  EXPECT_NO_THROW(make_layout(parse_recipe("k=kivi,v=kvquant,voutliers=0.02" + other.options(0)), kShape));
  refuse("kvquant:" + sides, {"'rope'", "'after'", "before", other.path()});
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

std::pair<double, double> range_of(std::vector<float> vector, double outliers) {
  std::sort(vector.begin(), vector.end());
  const auto outside = static_cast<std::size_t>(std::ceil(outliers / 2 * static_cast<double>(vector.size()) - 1e-9));
  return {vector[outside], vector[vector.size() - 1 - outside]};
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
