// One sealed page per recipe, byte for byte as it was first written: tests/data/pages/NAME.page. A change here is a
// change of the format (docs/format.md) or of what an encoder decides. f16 seals no page: an image of it, f16.kvant.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "kvant/calibration.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

struct Golden {
  const char* name;
  const char* recipe;
  bool queries;
};

const Golden kGolden[] = {
    {"kivi", "kivi:k=3,v=2,page=32,window=0,sink=0", false},
    {"kitty", "kitty:boost=0.25,v=2,page=32,window=0,sink=2", false},
    {"kitty-query", "kitty:boost=0.2,selector=query,v=2,page=32,window=0,sink=2", true},
    {"waterfill", "waterfill:k=2.5,v=2,page=64,window=0,sink=4", true},
    {"waterfill-blind", "waterfill:k=3,v=3,low=1,high=6,shared=1,page=32,window=0,sink=0", false},
    {"waterfill-range", "waterfill:k=4,v=4,low=2,high=6,grid=range,vgrid=range,rotate=0,page=32,window=0,sink=0", true},
    {"waterfill-feedback", "waterfill:k=2.5,v=2,feedback=1,page=64,window=0,sink=4", true},
    {"kvquant", "kvquant:k=3,v=3,outliers=0.05,voutliers=0.1,page=32,window=0,sink=1", false},
    {"kvquant-before-rope", "kvquant:k=3,v=2,rope=before,outliers=0.05,page=32,window=0,sink=1", false},
    {"kvquant-calibrated",
     "kvquant:k=2,v=3,outliers=0.05,voutliers=0.05,qnorm=1,page=32,window=0,sink=1,layer=4,file=calibration-v1.kvcal",
     false},
    {"zipcache", "zipcache:page=64,window=0,sink=2", true},
    {"zipcache-norm", "zipcache:saliency=norm,salient=0.3,high=3,low=1,vhigh=6,vlow=3,page=32,window=0", false},
};

// Whole numbers, so that the data do not depend on any library's random generator; louder channels further on.
std::vector<float> whole_numbers(std::size_t count, std::size_t channels) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>((i * i * 7 + i * 3 + i / 64) % 61) - 30.0F;
    values[i] = value * static_cast<float>(1 + i % channels % 5 * (i % channels / 5));
  }
  return values;
}

std::string data_file(const std::string& name) {
  return std::string(KVANT_TEST_DATA) + "/" + name;
}

// A file is one of the test data.
Recipe recipe_of(const Golden& golden) {
  std::string text = golden.recipe;
  const std::size_t file = text.find("file=");
  if (file != std::string::npos) text.insert(file + 5, data_file(""));
  return parse_recipe(text);
}

std::vector<std::byte> page_of(const Golden& golden) {
  const CacheShape shape{2, 24, 16, DType::f16};
  Cache cache(recipe_of(golden), shape);
  cache.set_key_rotation(make_rotation({.rotated = 20}));
  const std::int64_t tokens = cache.recipe().page;
  const auto keys = whole_numbers(static_cast<std::size_t>(tokens * 2 * 24), 24);
  const auto values = whole_numbers(static_cast<std::size_t>(tokens * 2 * 16), 16);
  const auto queries = whole_numbers(static_cast<std::size_t>(tokens * 6 * 24), 7);
  cache.append(dense_view(keys.data(), DType::f32, tokens, 2, 24), dense_view(values.data(), DType::f32, tokens, 2, 16),
               golden.queries ? dense_view(queries.data(), DType::f32, tokens, 6, 24) : ConstView());
  const auto block = cache.store().sealed_block(0);
  return {block.begin(), block.end()};
}

std::vector<char> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The calibration of one layer whose keys and values are whole numbers: the same bytes everywhere.
std::vector<std::byte> calibration_bytes() {
  const auto keys = whole_numbers(100 * 2 * 24, 24);
  const auto values = whole_numbers(100 * 2 * 16, 16);
  const CalibrationRows rows{2, 24, 16, 100, keys.data(), values.data(), nullptr, nullptr};
  return to_bytes({"golden", "llama", "whole numbers", 0.05, 100, false, {calibrate_layer(4, rows, 0.05)}});
}

TEST(GoldenCalibration, IsWhatItAlwaysWas) {
  const std::vector<char> expected = contents(data_file("calibration-v1.kvcal"));
  const std::vector<std::byte> bytes = calibration_bytes();
  ASSERT_EQ(bytes.size(), expected.size());
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
}

TEST(GoldenPage, OpenRowsAreWhatTheyAlwaysWere) {
  const auto keys = whole_numbers(std::size_t{16} * 2 * 24, 24);
  const auto values = whole_numbers(std::size_t{16} * 2 * 16, 16);
  const std::vector<char> expected = contents(data_file("pages/f16.kvant"));
  for (const std::string& set : kernel_names()) {
    const testing::ForcedKernel forced(set);
    Cache cache(parse_recipe("f16"), {2, 24, 16, DType::f16});
    cache.append(dense_view(keys.data(), DType::f32, 16, 2, 24), dense_view(values.data(), DType::f32, 16, 2, 16));
    const std::vector<std::byte> image = cache.save();
    ASSERT_EQ(image.size(), expected.size());
    EXPECT_EQ(std::memcmp(image.data(), expected.data(), image.size()), 0) << set;
  }
}

TEST(GoldenPage, EveryRecipeWritesTheBytesItAlwaysWrote) {
  for (const Golden& golden : kGolden) {
    const std::vector<char> expected = contents(data_file(std::string("pages/") + golden.name + ".page"));
    for (const std::string& set : kernel_names()) {
      const testing::ForcedKernel forced(set);
      const std::vector<std::byte> page = page_of(golden);
      ASSERT_EQ(page.size(), expected.size()) << golden.name;
      EXPECT_EQ(std::memcmp(page.data(), expected.data(), page.size()), 0) << golden.name << " " << set;
    }
  }
}

}  // namespace
}  // namespace kvant
