// The kvquant recipe: levels, ranges, outliers and what a page stores of them.
#include <gtest/gtest.h>
#include <xxhash.h>

#include "support/model.hpp"

namespace kvant {
namespace {

using testing::make_rows;
using testing::Rows;

// Lloyd's iteration for a standard normal distribution: each level is the mean of what is nearest to it.
std::vector<double> lloyd_max(int levels) {
  const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); };
  const auto below = [](double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; };
  std::vector<double> points;
  for (int i = 0; i < levels; ++i) points.push_back(-2 + 4.0 * i / (levels - 1));
  for (int round = 0; round < 20000; ++round) {
    double low = -40;
    for (std::size_t i = 0; i < points.size(); ++i) {
      const double high = i + 1 < points.size() ? (points[i] + points[i + 1]) / 2 : 40;
      points[i] = (density(low) - density(high)) / (below(high) - below(low));
      low = high;
    }
  }
  return points;
}

TEST(Kvquant, LevelsAreThoseOfANormalDistribution) {
  for (const int bits : {2, 3, 4}) {
    const std::string text = "kvquant:k=" + std::to_string(bits) + ",v=" + std::to_string(bits);
    const PageLayout layout = make_layout(parse_recipe(text), {1, 64, 64, DType::f16});
    const auto points = lloyd_max(1 << bits);
    for (std::size_t c = 0; c < points.size(); ++c) {
      EXPECT_NEAR(layout.key.table[c] - 127, 127 * points[c] / points.back(), 0.55) << bits << " " << c;
    }
    EXPECT_EQ(layout.key.table, layout.value.table);
  }
}

// The recipe by its definition, in double.
std::vector<double> code_vector(const std::vector<double>& x, double share, std::size_t whole, const TileLayout& tile) {
  std::vector<double> sorted = x;
  std::sort(sorted.begin(), sorted.end());
  auto outside = static_cast<std::size_t>(std::ceil(share / 2 * static_cast<double>(whole) - 1e-9));
  outside = std::min(outside, (x.size() - 1) / 2);
  const double min = sorted[outside];
  const double max = sorted[x.size() - 1 - outside];
  int bits = 0;
  for (const PlaneLayout& plane : tile.planes) bits += plane.bits;
  std::vector<double> result;
  for (const double value : x) {
    if (value < min || value > max || max == min) {
      result.push_back(value);
      continue;
    }
    const double place = std::floor((value - min) / (max - min) * 254 + 0.5);
    double best = 1e9;
    for (int c = 0; c < 1 << bits; ++c) {
      const double level = tile.table[static_cast<std::size_t>(c)];
      if (std::fabs(level - place) <= std::fabs(best - place)) best = level;
    }
    result.push_back(min + best * (max - min) / 254);
  }
  return result;
}

void expect_near(const std::vector<double>& expected, const std::vector<double>& actual) {
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::fabs(value));
  for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(expected[i], actual[i], 1e-6 * largest) << i;
}

// Whole numbers and halves are values of every type, so nothing is rounded before it is coded.
Rows exact_rows(const CacheShape& shape, std::int64_t tokens, std::uint32_t seed) {
  Rows rows = make_rows(shape, tokens, seed);
  for (std::vector<float>* part : {&rows.keys, &rows.values}) {
    for (float& x : *part) x = std::nearbyint(std::clamp(x * 8, -100.0F, 100.0F)) + (x > 1.5F ? 20.0F : 0.0F);
  }
  return rows;
}

TEST(Kvquant, PagesHoldWhatTheDefinitionSays) {
  for (const char* text : {"kvquant:window=0", "kvquant:k=2,v=4,outliers=0.1,voutliers=0.06,sink=7,page=32,window=0",
                           "kvquant:k=4,v=2,outliers=0,voutliers=0,sink=0,page=64,window=0"}) {
    const Recipe recipe = parse_recipe(text);
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      const CacheShape shape{3, 20, 28, dtype};
      const Rows rows = exact_rows(shape, 256, 5);
      const Cache cache = testing::filled(text, rows);
      ASSERT_EQ(cache.counts().open_pages, 0);
      const auto keys = testing::read_all(cache.store(), Side::key, 256);
      const auto values = testing::read_all(cache.store(), Side::value, 256);
      for (std::int64_t first = 0; first < 256; first += recipe.page) {
        for (int channel = 0; channel < 3 * 20; ++channel) {
          std::vector<double> from, to;
          for (std::int64_t t = std::max<std::int64_t>(first, recipe.sink); t < first + recipe.page; ++t) {
            from.push_back(rows.keys[static_cast<std::size_t>(t * 60 + channel)]);
            to.push_back(keys[static_cast<std::size_t>(t * 60 + channel)]);
          }
          expect_near(code_vector(from, std::get<KvquantKeys>(recipe.key).outliers,
                                  static_cast<std::size_t>(recipe.page), cache.store().layout().key),
                      to);
        }
      }
      for (std::int64_t t = recipe.sink; t < 256; ++t) {
        const auto row = [&](const std::vector<float>& all) {
          return std::vector<double>(all.begin() + t * 84, all.begin() + (t + 1) * 84);
        };
        expect_near(code_vector(row(rows.values), std::get<KvquantValues>(recipe.value).outliers, 84,
                                cache.store().layout().value),
                    row(values));
      }
      if (HasFatalFailure()) return;
    }
  }
}

// A page that is decoded and coded again has the same bytes: ranges are values of the page, outliers come back exactly.
TEST(Kvquant, CodingDecodedRowsAgainChangesNothing) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const char* text :
         {"kvquant:window=0,sink=0", "kvquant:k=2,v=2,outliers=0.1,voutliers=0.1,page=32,window=0,sink=0"}) {
      Rows rows = make_rows({2, 24, 40, dtype}, 128, 9);
      for (std::size_t i = 0; i < rows.keys.size(); i += 3) rows.keys[i] = std::nearbyint(rows.keys[i]);  // ties
      const Cache cache = testing::filled(text, rows);
      rows.keys = testing::read_all(cache.store(), Side::key, 128);
      rows.values = testing::read_all(cache.store(), Side::value, 128);
      const Cache again = testing::filled(text, rows);
      const auto a = cache.store().sealed_block(0);
      const auto b = again.store().sealed_block(0);
      ASSERT_FALSE(a.empty());
      EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << text << " " << name_of(dtype);
    }
  }
}

// Fewer values than levels, equal ones, two different ones, pages of sinks but for one token (failures.md, KVQuant e).
TEST(Kvquant, DegenerateVectorsComeBackExactly) {
  for (const char* text :
       {"kvquant:page=32,window=0,sink=0", "kvquant:page=32,window=0,sink=31,outliers=0.1,voutliers=0.1"}) {
    for (int kind = 0; kind < 5; ++kind) {
      Rows rows = make_rows({2, 8, 1, DType::f16}, 32, 3);
      for (std::int64_t t = 0; t < 32; ++t) {
        for (int d = 0; d < 8; ++d) {
          float& key = rows.keys[static_cast<std::size_t>(t * 16 + d)];
          if (kind == 0) key = 3.0F;
          if (kind == 1) key = t % 2 == 0 ? 1.0F : -1.0F;
          if (kind == 2) key = t == 9 ? 65504.0F : 0.0F;
          if (kind == 3) key = t == 9 ? -65504.0F : (t == 10 ? 65504.0F : 1.0F);
          if (kind == 4) key = 0x1p-24F;
          rows.keys[static_cast<std::size_t>(t * 16 + d + 8)] = -key;
        }
      }
      const Cache cache = testing::filled(text, rows);
      ASSERT_EQ(cache.counts().sealed_pages, 1);
      EXPECT_EQ(testing::read_all(cache.store(), Side::key, 32), rows.keys) << text << " " << kind;
      const auto image = cache.save();
      EXPECT_TRUE(Cache::load(image).save() == image);
      const auto queries = testing::random_queries(1, 4, 8);
      for (const float out : testing::attend(cache, queries, 1, 4).out) ASSERT_TRUE(std::isfinite(out));
    }
  }
}

// A token of 1000 times the size: all of its values are beyond every channel's range and none stretches it.
TEST(Kvquant, OutliersDoNotStretchTheRange) {
  Rows rows = make_rows({2, 32, 32, DType::f16}, 128, 4);
  const auto error = [&](const char* text) {
    const auto stored = testing::read_all(testing::filled(text, rows).store(), Side::key, 128);
    double sum = 0;
    for (std::size_t i = 0; i < stored.size(); ++i) sum += std::pow(static_cast<double>(stored[i]) - rows.keys[i], 2);
    return sum;
  };
  const double calm = error("kvquant:window=0,sink=0");
  EXPECT_LT(calm, error("kvquant:window=0,sink=0,outliers=0"));
  for (int head = 0; head < 2; ++head) {
    for (int d = 0; d < 32; ++d) rows.key(77, head, d) *= 1000;
  }
  EXPECT_LT(error("kvquant:window=0,sink=0"), 1.5 * calm);
  EXPECT_GT(error("kvquant:window=0,sink=0,outliers=0"), 100 * calm);
}

// README.md, "Bits per value".
TEST(Kvquant, BitsAreThoseOfTheFormula) {
  const auto expected = [](double bits, double vectors_values, double per_end, double slot_bits) {
    return bits + (32 + 2 * per_end * slot_bits) / vectors_values;
  };
  const PageLayout large = make_layout(parse_recipe("kvquant"), {8, 128, 128, DType::f16});
  EXPECT_NEAR(large.bits_per_value, (expected(3, 128, 1, 24) + expected(3, 1024, 6, 32)) / 2, 0.005);
  const PageLayout small = make_layout(parse_recipe("kvquant"), {3, 64, 64, DType::f16});
  EXPECT_NEAR(small.bits_per_value, (expected(3, 128, 1, 24) + expected(3, 192, 1, 32)) / 2, 0.015);
}

TEST(Kvquant, ForgedOutliersAreRefused) {
  const Rows rows = make_rows({2, 16, 24, DType::f16}, 64, 23);
  const Cache cache = testing::filled("kvquant:page=64,window=0,sink=0", rows);
  const std::vector<std::byte> image = cache.save();
  const auto block = cache.store().sealed_block(0);
  const auto found = std::search(image.begin(), image.end(), block.begin(), block.end());
  ASSERT_NE(found, image.end());
  const auto start = static_cast<std::size_t>(found - image.begin());
  const OutlierLayout& key = cache.store().layout().key.outliers;
  const OutlierLayout& value = cache.store().layout().value.outliers;
  ASSERT_GT(key.slots, 0);
  ASSERT_GT(value.slots, 0);
  struct Forgery {
    const char* what;
    std::size_t at;
    std::vector<std::uint8_t> bytes;
  };
  const Forgery forgeries[] = {
      {"outside its tile", key.row_offset, {64}},
      {"outside its tile", value.row_offset, {24}},
      {"outside its tile", value.depth_offset, {64}},
      {"ascending", key.row_offset, {63}},
      {"inside the range", value.value_offset, {0, 0}},
      {"not finite", key.value_offset, {0, 0x7C}},
      {"begin or end", value.start_offset, {1}},
      {"begin or end", value.start_offset + 4, {0xFF, 0xFF, 0xFF, 0xFF}},
      {"begin or end", value.start_offset + 8, {0, 0, 1, 0}},
  };
  for (const Forgery& forgery : forgeries) {
    std::vector<std::byte> forged = image;
    std::memcpy(forged.data() + start + forgery.at, forgery.bytes.data(), forgery.bytes.size());
    const std::size_t body = forged.size() - 8;
    const std::uint64_t checksum = XXH64(forged.data(), body, 0);
    std::memcpy(forged.data() + body, &checksum, sizeof checksum);
    testing::expect_error(ErrorCode::bad_format, {forgery.what}, [&] { Cache::load(forged); });
  }
}

}  // namespace
}  // namespace kvant
