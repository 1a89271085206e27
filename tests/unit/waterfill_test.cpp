// The widths of waterfill: their allocation, their planes and what a page stores.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <functional>

#include "cache/tile.hpp"
#include "methods/waterfill/allocate.hpp"
#include "support/continue.hpp"
#include "support/model.hpp"
#include "tiles/plane.hpp"

namespace kvant {
namespace {

std::vector<std::uint8_t> allocate(const std::vector<double>& energy, int low, int high, int budget) {
  std::vector<std::uint8_t> widths(energy.size());
  catalog::allocate_widths(energy.data(), static_cast<int>(energy.size()), low, high, budget, widths.data());
  return widths;
}

double distortion(const std::vector<double>& energy, const std::vector<int>& order, const std::vector<int>& widths) {
  double sum = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    sum += energy[static_cast<std::size_t>(order[i])] * std::pow(4.0, -widths[i / 4]);
  }
  return sum;
}

std::vector<double> random_energy(std::size_t channels, std::mt19937& random) {
  std::vector<double> energy(channels);
  std::normal_distribution<double> normal(0, 3);
  for (double& e : energy) e = std::exp2(normal(random));
  return energy;
}

std::vector<int> by_energy(const std::vector<double>& energy) {
  std::vector<int> order(energy.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return energy[static_cast<std::size_t>(a)] > energy[static_cast<std::size_t>(b)];
  });
  return order;
}

// Small enough to try every allocation of the fours.
TEST(Allocate, IsTheBestOfAllAllocations) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const auto energy = random_energy(20, random);
    const int low = 1 + static_cast<int>(random() % 2);
    const int high = low + 1 + static_cast<int>(random() % 3);
    const int budget = 5 * low + static_cast<int>(random() % static_cast<unsigned>(5 * (high - low) + 1));
    const auto order = by_energy(energy);
    double best = 1e300;
    std::vector<int> widths(5, low);
    const std::function<void(std::size_t, int)> try_all = [&](std::size_t at, int left) {
      if (at == widths.size()) {
        if (left == 0) best = std::min(best, distortion(energy, order, widths));
        return;
      }
      for (int w = low; w <= high; ++w) {
        widths[at] = w;
        try_all(at + 1, left - w);
      }
    };
    try_all(0, budget);
    const auto found = allocate(energy, low, high, budget);
    std::vector<int> of_fours;
    for (std::size_t i = 0; i < order.size(); i += 4) of_fours.push_back(found[static_cast<std::size_t>(order[i])]);
    EXPECT_NEAR(distortion(energy, order, of_fours), best, best * 1e-12) << round;
    EXPECT_EQ(std::accumulate(of_fours.begin(), of_fours.end(), 0), budget);
  }
}

TEST(Allocate, EveryFourHasOneWidthAndTheBudgetIsExact) {
  std::mt19937 random(2);
  for (const int channels : {4, 64, 80, 96, 112, 128, 192, 256, 1024}) {
    for (const double mean : {1.5, 2.5, 3.0, 4.25}) {
      const int fours = channels / 4;
      const int budget = static_cast<int>(mean * fours);
      const auto energy = random_energy(static_cast<std::size_t>(channels), random);
      const auto widths = allocate(energy, 1, 6, budget);
      const auto order = by_energy(energy);
      int sum = 0;
      for (std::size_t i = 0; i < order.size(); ++i) {
        const int width = widths[static_cast<std::size_t>(order[i])];
        EXPECT_EQ(width, widths[static_cast<std::size_t>(order[i / 4 * 4])]);
        EXPECT_LE(width, widths[static_cast<std::size_t>(order[i < 4 ? 0 : i / 4 * 4 - 1])]);
        sum += width;
      }
      EXPECT_EQ(sum, 4 * budget) << channels;
    }
  }
}

TEST(Allocate, TiesGoToTheLowerChannel) {
  const auto equal = allocate(std::vector<double>(16, 1.0), 1, 5, 4 + 6);
  // Bits go round: every four gets a second bit before any gets a third.
  EXPECT_EQ(equal, (std::vector<std::uint8_t>{3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(allocate(std::vector<double>(8, 0.0), 2, 4, 7), (std::vector<std::uint8_t>{4, 4, 4, 4, 3, 3, 3, 3}));
  std::vector<double> one(64, 0.0);
  one[37] = 1e30;
  const auto widths = allocate(one, 1, 5, 40);
  EXPECT_EQ(widths[37], 5);
  EXPECT_EQ(widths[0], 5);  // beside 37 in the first four: ties among the silent ones by channel
  EXPECT_EQ(widths[63], 1);
  EXPECT_EQ(allocate(std::vector<double>(8, 1.0), 1, 2, 100), std::vector<std::uint8_t>(8, 2));  // no more than high
}

// ---- planes

TEST(TilePlanes, CoverEveryChannelWithItsWidthWithoutOverlap) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    std::array<int, 6> counts{};
    for (int& count : counts) count = static_cast<int>(random() % 5);
    const int rows = 32 << (random() % 4);
    const int depth = 4 * std::accumulate(counts.begin(), counts.end(), 0);
    const auto planes = cache::place_planes(counts, rows, 128);
    std::vector<int> bits(static_cast<std::size_t>(depth)), mask(static_cast<std::size_t>(depth));
    std::size_t offset = 128;
    for (const PlaneLayout& plane : planes.span()) {
      EXPECT_EQ(plane.offset, offset);
      EXPECT_EQ(plane.bytes, tiles::plane_bytes(plane.bits, rows, plane.depth));
      EXPECT_EQ(plane.first % 4, 0);
      offset += plane.bytes;
      for (int i = plane.first; i < plane.first + plane.depth; ++i) {
        const int own = ((1 << plane.bits) - 1) << plane.shift;
        EXPECT_EQ(mask[static_cast<std::size_t>(i)] & own, 0);
        mask[static_cast<std::size_t>(i)] |= own;
        bits[static_cast<std::size_t>(i)] += plane.bits;
      }
    }
    std::size_t at = 0;
    for (std::size_t c = 0; c < counts.size(); ++c) {
      const int width = cache::kWidthOrder[c];
      for (int i = 0; i < 4 * counts[c]; ++i, ++at) {
        EXPECT_EQ(bits[at], width);
        EXPECT_EQ(mask[at], ((1 << width) - 1) << (width % 2 == 0 ? 1 : 0));  // contiguous bits, bit 0 for odd widths
      }
    }
  }
}

// All counts of small tiles, and random ones of large tiles: no page is larger than its layout, and with pages of 64
// tokens or more nothing is left over when the budget is even and used up.
TEST(TilePlanes, NoCountsExceedTheBudget) {
  const auto check = [](const std::array<int, 6>& counts, int rows) {
    int budget = 0;
    for (std::size_t c = 0; c < counts.size(); ++c) budget += counts[c] * cache::kWidthOrder[c];
    std::size_t bytes = 0;
    const auto planes = cache::place_planes(counts, rows, 0);
    for (const PlaneLayout& plane : planes.span()) bytes += plane.bytes;
    for (int more = 0; more < 3; ++more) ASSERT_LE(bytes, cache::most_plane_bytes(budget + more, rows));
    if (rows >= 64 && budget % 2 == 0) {
      ASSERT_EQ(bytes, cache::most_plane_bytes(budget, rows));
      ASSERT_EQ(bytes, static_cast<std::size_t>(budget * 4 * rows / 8));
    }
  };
  std::array<int, 6> counts{};
  for (int code = 0; code < 4096; ++code) {
    for (std::size_t c = 0; c < 6; ++c) counts[c] = code >> (2 * c) & 3;
    for (const int rows : {32, 64, 128, 256}) check(counts, rows);
  }
  std::mt19937 random(4);
  for (int round = 0; round < 2000; ++round) {
    for (int& count : counts) count = static_cast<int>(random() % 40);
    for (const int rows : {32, 64, 128, 256}) check(counts, rows);
  }
}

// ---- pages

using testing::make_rows;
using testing::Rows;

// Widths of a page by the definition: range of what is coded times rms of all queries up to the page's last token.
std::vector<int> expected_widths(const Rows& rows, const Recipe& recipe, std::int64_t page, int head, bool queries) {
  const auto& keys = std::get<WaterfillKeys>(recipe.key);
  const int channels = rows.shape.key_dim;
  std::vector<double> energy(static_cast<std::size_t>(channels));
  for (int d = 0; d < channels; ++d) {
    double min = 1e300, max = -1e300, sum = 0;
    for (std::int64_t t = std::max<std::int64_t>(page * recipe.page, recipe.sink); t < (page + 1) * recipe.page; ++t) {
      const double value = rows.keys[static_cast<std::size_t>((t * rows.shape.kv_heads + head) * channels + d)];
      min = std::min(min, value);
      max = std::max(max, value);
    }
    for (std::int64_t t = 0; queries && t < (page + 1) * recipe.page; ++t) {
      for (int g = 0; g < 2; ++g) {
        const std::int64_t vector = t * 2 * rows.shape.kv_heads + 2 * head + g;
        const double q = rows.queries[static_cast<std::size_t>(vector * channels + d)];
        sum += q * q;
      }
    }
    energy[static_cast<std::size_t>(d)] = (max - min) * (max - min) * (queries ? sum : 1);
  }
  const auto widths = allocate(energy, keys.low, keys.high, static_cast<int>(keys.bits * channels / 4));
  return {widths.begin(), widths.end()};
}

Rows f32_rows(int heads, int key_dim, int value_dim, std::int64_t tokens, std::uint32_t seed) {
  return make_rows({heads, key_dim, value_dim, DType::f32}, tokens, seed);
}

TEST(Waterfill, WidthsFollowRangesAndTheQueriesUpToThePagesLastToken) {
  for (const char* text : {"waterfill:window=0,sink=4", "waterfill:k=3,high=6,window=40,sink=0,page=64"}) {
    const Recipe recipe = parse_recipe(text);
    Rows rows = f32_rows(2, 64, 64, 500, 11);
    Cache cache(recipe, rows.shape);
    testing::append(cache, rows, 0, 200);
    testing::append(cache, rows, 200, 300);
    ASSERT_GE(cache.counts().sealed_pages, 3);
    for (std::int64_t page = 0; page < cache.counts().sealed_pages; ++page) {
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(testing::key_widths(cache.store(), page, head), expected_widths(rows, recipe, page, head, true));
      }
    }
    rows.queries.clear();
    Cache blind(recipe, rows.shape);
    testing::append(blind, rows, 0, 500);
    EXPECT_EQ(testing::key_widths(blind.store(), 0, 1), expected_widths(rows, recipe, 0, 1, false));
  }
}

TEST(Waterfill, PagesHaveOneSizeWhateverTheScores) {
  const CacheShape shape{1, 64, 64, DType::f16};
  const char* const recipes[] = {"waterfill:window=0,sink=0", "waterfill:k=4.9,high=6,window=0,sink=0,page=32",
                                 "waterfill:k=1,high=1,window=0,sink=0", "waterfill:k=6,low=6,high=6,window=0,sink=0"};
  for (const char* text : recipes) {
    for (int kind = 0; kind < 5; ++kind) {
      Rows rows = make_rows(shape, 256, 5);
      for (std::int64_t t = 0; t < 256; ++t) {
        for (int d = 0; d < 64; ++d) {
          float& key = rows.key(t, 0, d);
          if (kind == 0) key = t % 2 == 0 ? 1.0F : -1.0F;  // all ranges equal
          if (kind == 1) key = 7.0F;                       // all ranges zero
          if (kind == 2) key = d == 13 ? key * 8000.0F : key * 1e-3F;
          if (kind == 3) key = d < 3 ? key : 0.0F;
          if (kind == 4) key = std::ldexp(t % 2 == 0 ? 1.0F : -1.0F, d / 8 - 8);
        }
      }
      const Cache cache = testing::filled(text, rows);
      const PageLayout& layout = cache.store().layout();
      ASSERT_EQ(cache.counts().open_pages, 0);
      EXPECT_EQ(cache.bytes().sealed, layout.page_bytes * static_cast<std::size_t>(cache.counts().sealed_pages));
      const auto widths = testing::key_widths(cache.store(), 0, 0);
      EXPECT_EQ(std::accumulate(widths.begin(), widths.end(), 0), 4 * layout.key.budget) << text << " " << kind;
      if (kind == 2) {
        EXPECT_EQ(widths[13], layout.key.high);
      }
      const auto queries = testing::random_queries(3, 2, 64);
      const auto expected =
          testing::expected_from(cache.store(), 256, queries, 3, 2, testing::causal_bias(2, 256, 3, 0));
      EXPECT_LT(testing::relative_error(testing::attend(cache, queries, 3, 2).out, expected.out), testing::kTolerance)
          << text << " " << kind;
      EXPECT_TRUE(Cache::load(cache.save()).save() == cache.save());
    }
  }
}

double value_error(const char* recipe, const Rows& rows) {
  const Cache cache = testing::filled(recipe, rows);
  const auto stored = testing::read_all(cache.store(), Side::value, 128);
  double sum = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) sum += std::pow(static_cast<double>(stored[i]) - rows.values[i], 2);
  return sum;
}

// One loud channel stretches the range of every token; rotated, it is spread over all of them.
TEST(Waterfill, RotationSpreadsLoudValueChannels) {
  for (const int dim : {64, 80, 112}) {
    Rows rows = make_rows({2, 64, dim, DType::f16}, 128, 3);
    for (std::int64_t t = 0; t < 128; ++t) rows.value(t, 0, 9) *= 6;
    const double plain = value_error("waterfill:window=0,sink=0,rotate=0", rows);
    EXPECT_LT(value_error("waterfill:window=0,sink=0", rows), 0.8 * plain) << dim;
    EXPECT_LT(value_error("waterfill:window=0,sink=0,shared=1", rows), plain) << dim;
    EXPECT_LT(value_error("waterfill:window=0,sink=0", rows),
              0.9 * value_error("waterfill:window=0,sink=0,vgrid=range", rows));
  }
}

// 64 values of half the limit of bfloat16 have no sum in binary32.
TEST(Waterfill, ValuesNextToTheTypesLimitStayFinite) {
  for (const auto& [type, limit] : {std::pair{DType::f16, 65504.0F}, {DType::bf16, 1.69e38F}}) {
    for (const int period : {3, 1000000}) {  // of the other sign; the errors of such rows may leave bfloat16
      if (type == DType::bf16 && period == 3) continue;
      Rows rows = make_rows({1, 64, 64, type}, 128, 3);
      for (std::size_t i = 0; i < rows.values.size(); ++i) {
        rows.values[i] = static_cast<int>(i) % period == 1 ? -limit : limit;
      }
      Cache cache = testing::filled("waterfill:window=0,sink=0", rows);
      const auto stored = testing::read_all(cache.store(), Side::value, 128);
      for (std::size_t i = 0; i < stored.size(); ++i) {
        ASSERT_TRUE(std::isfinite(stored[i])) << name_of(type) << " period " << period << ", value " << i;
        if (period > 3 && i >= 64) {
          ASSERT_NEAR(stored[i] / limit, 1, 0.01) << name_of(type);
        }
      }
      EXPECT_EQ(Cache::load(cache.save()).length(), 128);
      cache.trim(1);  // reopens
      for (const float value : testing::read_all(cache.store(), Side::value, 127)) {
        ASSERT_LE(std::fabs(value), 1.01F * limit);
      }
    }
  }
}

TEST(Waterfill, StatisticsFollowForksCopiesAndImages) {
  const Rows rows = f32_rows(2, 32, 32, 400, 21);
  const Recipe recipe = parse_recipe("waterfill:page=32,window=8");
  Cache cache(recipe, rows.shape);
  testing::append(cache, rows, 0, 150);
  testing::expect_same_continuations(cache, rows, 150);

  PageStore copy(recipe, rows.shape, 512);
  copy.copy_cells(cache.store(), 0, 0, 400);
  EXPECT_EQ(copy.impl().query_sums, cache.store().impl().query_sums);
  EXPECT_EQ(copy.impl().sums_at(std::vector<std::int64_t>{11, 12}),
            cache.store().impl().sums_at(std::vector<std::int64_t>{11, 12}));
  EXPECT_NE(copy.impl().sums_at(std::vector<std::int64_t>{12}).back(), copy.impl().query_sums);  // page 12 is open
}

TEST(Waterfill, QueriesThatCannotBeCountedAreRefused) {
  const Rows rows = f32_rows(2, 32, 32, 64, 22);
  PageStore store(parse_recipe("waterfill:page=32,window=0"), rows.shape, 64);
  testing::write_cells(store, rows, testing::cell_numbers(0, 64));
  const auto cells = testing::cell_numbers(0, 3);
  const auto view = [&](const std::vector<float>& data, std::int64_t count, std::int64_t heads, std::int64_t dim) {
    return dense_view(data.data(), DType::f32, count, heads, dim);
  };
  auto bad = rows.queries;
  bad[5] = std::numeric_limits<float>::quiet_NaN();
  using testing::expect_error;
  expect_error(ErrorCode::not_finite, {"query row 0", "head 0"}, [&] { store.observe(cells, view(bad, 3, 4, 32)); });
  expect_error(ErrorCode::invalid_argument, {"query heads", "3"}, [&] { store.observe(cells, view(bad, 3, 3, 32)); });
  expect_error(ErrorCode::invalid_argument, {"31 channels"}, [&] { store.observe(cells, view(bad, 3, 4, 31)); });
  expect_error(ErrorCode::invalid_argument, {"4 rows", "3 cells"},
               [&] { store.observe(cells, view(rows.queries, 4, 4, 32)); });
  const std::vector<std::int64_t> outside = {0, 64};
  expect_error(ErrorCode::out_of_range, {"cell 64"}, [&] { store.observe(outside, view(rows.queries, 2, 4, 32)); });
  for (const double sum : store.impl().query_sums) EXPECT_EQ(sum, 0);
  for (const auto& page : store.impl().pages) EXPECT_EQ(page.queries, nullptr);
  Cache cache(parse_recipe("waterfill"), rows.shape);
  expect_error(ErrorCode::invalid_argument, {"63 rows", "64 tokens"},
               [&] { cache.append(rows.key_view(0, 64), rows.value_view(0, 64), rows.query_view(0, 63)); });
  EXPECT_EQ(cache.length(), 0);
  expect_error(ErrorCode::invalid_argument, {"key_dim", "42", "multiple of 4"}, [&] {
    make_layout(parse_recipe("waterfill"), {1, 42, 64, DType::f16});
  });
}

TEST(Waterfill, ForgedWidthsAreRefused) {
  const Rows rows = make_rows({1, 32, 32, DType::f16}, 64, 23);
  const Cache cache = testing::filled("waterfill:page=64,window=0,sink=0", rows);
  const std::vector<std::byte> image = cache.save();
  const auto block = cache.store().sealed_block(0);
  const auto found = std::search(image.begin(), image.end(), block.begin(), block.end());
  ASSERT_NE(found, image.end());
  const auto at = static_cast<std::size_t>(found - image.begin()) + cache.store().layout().key.counts_offset;
  using Counts = std::array<std::uint16_t, 6>;  // of 6, 4, 5, 1, 3, 2; eight fours, 20 bits for all
  for (const Counts& counts : {Counts{1, 0, 0, 7, 0, 0},
                               {0, 0, 0, 8, 1, 0},
                               {0, 0, 0, 7, 0, 0},
                               {0, 5, 0, 3, 0, 0},
                               {0, 0, 0, 65535, 0, 9},
                               {0, 0, 8, 0, 0, 0}}) {
    std::vector<std::byte> forged = image;
    std::memcpy(forged.data() + at, counts.data(), sizeof counts);
    const std::size_t body = forged.size() - 8;
    const std::uint64_t checksum = XXH64(forged.data(), body, 0);
    std::memcpy(forged.data() + body, &checksum, sizeof checksum);
    testing::expect_error(ErrorCode::bad_format, {}, [&] { Cache::load(forged); });
  }
}

}  // namespace
}  // namespace kvant
