// methods: what kitty stores, against kivi where they must agree and against the definition where they must not.
#include <gtest/gtest.h>

#include <random>

#include "cache/tile.hpp"
#include "methods/method.hpp"
#include "support/data.hpp"

namespace kvant {
namespace {

using testing::filled;
using testing::make_rows;
using testing::Rows;

std::string blocks_of(const Cache& cache) {
  std::string bytes;
  for (std::int64_t page = 0; page * cache.recipe().page < cache.length(); ++page) {
    const auto block = cache.store().sealed_block(page);
    bytes.append(reinterpret_cast<const char*>(block.data()), block.size());
  }
  return bytes;
}

// The channels that lead the stored order: those that the high plane covers.
std::vector<std::uint16_t> boosted_channels(const Cache& cache, std::int64_t page, int head) {
  const PageLayout& layout = cache.store().layout();
  const cache::TileView view(layout, layout.key, cache.store().sealed_block(page).data(), head);
  std::vector<std::uint16_t> order(static_cast<std::size_t>(layout.key.depth));
  view.order(order.data());
  order.resize(static_cast<std::size_t>(layout.key.planes.at(1).depth));
  return order;
}

// Attention of the newest tokens, which decoded values alone do not pin down.
std::vector<float> attention_of(const Cache& cache) {
  return testing::attend(cache, testing::random_queries(3, 4, cache.shape().key_dim), 3, 4).out;
}

TEST(Kitty, WithoutBoostItIsKiviByteForByte) {
  for (const int dim : {5, 64, 80, 128}) {
    for (const char* options : {"v=2,sink=0,window=0", "v=3,sink=9,window=16,page=64", "v=8,sink=128,window=0"}) {
      const Rows rows = make_rows({2, dim, dim, DType::f16}, 300);
      const std::string text(options);
      const Cache kitty = filled("kitty:boost=0," + text, rows);
      const Cache kivi = filled("kivi:k=2," + text, rows);
      ASSERT_GT(kivi.counts().sealed_pages, 0);
      EXPECT_EQ(blocks_of(kitty), blocks_of(kivi)) << dim << " " << text;
      EXPECT_EQ(testing::read_all(kitty.store(), Side::key, 300), testing::read_all(kivi.store(), Side::key, 300));
      EXPECT_EQ(attention_of(kitty), attention_of(kivi)) << dim << " " << text;
    }
  }
}

// The codes of four bits lie in two planes instead of one: the values agree, the bytes cannot.
TEST(Kitty, FullyBoostedItHoldsTheValuesOfKiviWithFourBits) {
  for (const int dim : {5, 64, 80, 128}) {
    const Rows rows = make_rows({2, dim, dim, DType::f16}, 300);
    const Cache kitty = filled("kitty:boost=1,v=2,sink=4,window=0", rows);
    const Cache kivi = filled("kivi:k=4,v=2,sink=4,window=0", rows);
    ASSERT_EQ(kitty.counts().sealed_pages, 2);
    EXPECT_EQ(kitty.store().layout().key.order_entry, 0);
    for (const Side side : {Side::key, Side::value}) {
      EXPECT_EQ(testing::read_all(kitty.store(), side, 300), testing::read_all(kivi.store(), side, 300)) << dim;
    }
    for (const std::string& set : kernel_names()) {
      const testing::ForcedKernel forced(set);
      EXPECT_EQ(attention_of(kitty), attention_of(kivi)) << dim << " " << set;
    }
  }
}

TEST(Kitty, AnySelectorAgreesWithKiviWhereAllChannelsAreAlike) {
  const Rows rows = make_rows({2, 64, 64, DType::f16}, 300);
  for (const std::string selector : {"magnitude", "variance", "range", "query"}) {
    for (const auto& [boost, bits] : {std::pair("0", "2"), std::pair("1", "4")}) {
      const std::string rest = ",v=2,sink=32,window=0";
      const Cache kitty = filled("kitty:selector=" + selector + ",boost=" + boost + rest, rows);
      const Cache kivi = filled(std::string("kivi:k=") + bits + rest, rows);
      EXPECT_EQ(testing::read_all(kitty.store(), Side::key, 300), testing::read_all(kivi.store(), Side::key, 300));
      EXPECT_EQ(attention_of(kitty), attention_of(kivi)) << selector << " " << boost;
    }
  }
}

// Each selector by its definition, in double; shares of the ablation.
TEST(Kitty, SelectorsRankByTheirDefinition) {
  const CacheShape shape{2, 40, 16, DType::f32};
  Rows rows = make_rows(shape, 192, 17);
  for (int t = 0; t < 192; ++t) rows.key(t, 1, 3) += 9;  // a large mean: loud, with the variance of any other
  const auto score = [&](const std::string& selector, int page, int head, int d) {
    double sum = 0, square = 0, low = 1e300, high = -1e300, queries = 0;
    for (int t = page * 64; t < page * 64 + 64; ++t) {
      const double x = rows.key(t, head, d);
      sum += selector == "magnitude" ? std::fabs(x) : x;
      square += x * x;
      low = std::min(low, x);
      high = std::max(high, x);
    }
    for (int t = 0; t < page * 64 + 64; ++t) {
      for (int h = 2 * head; h < 2 * head + 2; ++h) {
        queries += std::pow(rows.queries[static_cast<std::size_t>((t * 4 + h) * 40 + d)], 2);
      }
    }
    if (selector == "magnitude") return sum;
    if (selector == "variance") return square - sum * sum / 64;
    return (high - low) * (selector == "query" ? std::sqrt(queries) : 1.0);
  };
  std::vector<std::vector<std::uint16_t>> chosen;
  for (const std::string selector : {"magnitude", "variance", "range", "query"}) {
    for (const double boost : {0.125, 0.2, 0.25}) {
      const Cache cache =
          filled("kitty:selector=" + selector + ",boost=" + std::to_string(boost) + ",sink=0,window=0,page=64", rows);
      for (int page = 0; page < 3; ++page) {
        for (int head = 0; head < 2; ++head) {
          std::vector<std::uint16_t> order(40);
          std::iota(order.begin(), order.end(), std::uint16_t{0});
          std::stable_sort(order.begin(), order.end(), [&](std::uint16_t a, std::uint16_t b) {
            return score(selector, page, head, a) > score(selector, page, head, b);
          });
          order.resize(static_cast<std::size_t>(std::lround(boost * 40)));
          std::sort(order.begin(), order.end());
          ASSERT_EQ(boosted_channels(cache, page, head), order) << selector << " " << boost << " " << page << head;
          if (page == 2 && head == 1 && boost == 0.25) chosen.push_back(order);
        }
      }
      EXPECT_EQ(cache.store().counts().blind_seals, 0);
    }
  }
  for (std::size_t i = 1; i < chosen.size(); ++i) EXPECT_NE(chosen[i], chosen[i - 1]) << i;
}

// Without queries the ranges decide, and the store says how often.
TEST(Kitty, QuerySelectorSaysWhenItHasSeenNone) {
  Rows rows = make_rows({2, 40, 16, DType::f16}, 128, 21);
  rows.queries.clear();
  const std::string rest = ",sink=0,window=0,page=64";
  const Cache blind = filled("kitty:selector=query" + rest, rows);
  EXPECT_EQ(blind.store().counts().blind_seals, 2);
  EXPECT_EQ(blocks_of(blind), blocks_of(filled("kitty:selector=range" + rest, rows)));
  EXPECT_NE(remark(blind.recipe()).find("blind_seals"), std::string::npos);
  EXPECT_EQ(filled("kitty:selector=range" + rest, rows).store().counts().blind_seals, 0);
  EXPECT_EQ(filled("waterfill:window=0,page=64", rows).store().counts().blind_seals, 2);
}

TEST(Kitty, LoudestChannelsOfEachPageAndHeadAreBoosted) {
  std::mt19937 random(5);
  for (const int dim : {40, 64, 72, 128}) {
    Rows rows = make_rows({2, dim, dim, DType::f16}, 256, 31);
    for (int page = 0; page < 2; ++page) {
      for (int head = 0; head < 2; ++head) {
        for (int d = 0; d < dim; ++d) {
          const float loud = std::exp2(static_cast<float>(random() % 8));
          for (int t = 0; t < 128; ++t) rows.key(page * 128 + t, head, d) = loud * (t % 2 == 0 ? 1.0F : -0.5F);
        }
      }
    }
    const Cache cache = filled("kitty:boost=0.25,sink=0,window=0", rows);
    ASSERT_EQ(cache.counts().sealed_pages, 2);
    for (int page = 0; page < 2; ++page) {
      for (int head = 0; head < 2; ++head) {
        // Ties are many here (eight loudnesses): the lower channel goes first.
        std::vector<std::uint16_t> order(static_cast<std::size_t>(dim));
        std::iota(order.begin(), order.end(), std::uint16_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::uint16_t a, std::uint16_t b) {
          return std::fabs(rows.key(page * 128, head, a)) > std::fabs(rows.key(page * 128, head, b));
        });
        order.resize(static_cast<std::size_t>(dim / 4));
        std::sort(order.begin(), order.end());
        EXPECT_EQ(boosted_channels(cache, page, head), order) << dim << " page " << page << " head " << head;
      }
    }
  }
}

TEST(Kitty, BoostedChannelsHaveFourBitsTheOthersTwo) {
  const Rows rows = make_rows({1, 64, 64, DType::f16}, 128, 8);
  const Cache cache = filled("kitty:boost=0.25,sink=0,window=0", rows);
  const std::vector<float> stored = testing::read_all(cache.store(), Side::key, 128);
  const auto index = boosted_channels(cache, 0, 0);
  for (int d = 0; d < 64; ++d) {
    std::vector<float> levels;
    for (int t = 0; t < 128; ++t) levels.push_back(stored[static_cast<std::size_t>(t * 64 + d)]);
    std::sort(levels.begin(), levels.end());
    const auto distinct = std::unique(levels.begin(), levels.end()) - levels.begin();
    const bool boosted = std::find(index.begin(), index.end(), d) != index.end();
    EXPECT_LE(distinct, boosted ? 16 : 4) << d;
    EXPECT_GE(distinct, boosted ? 8 : 2) << d;
  }
}

TEST(Kitty, CountOfBoostedChannelsIsRoundedToNearest) {
  const auto count = [](const char* recipe, int dim) {
    const TileLayout tile = make_layout(parse_recipe(recipe), {1, dim, dim, DType::f16}).key;
    return tile.order_entry == 0 ? 0 : tile.planes.at(1).depth;
  };
  EXPECT_EQ(count("kitty:boost=0.25", 80), 20);
  EXPECT_EQ(count("kitty:boost=0.1", 72), 7);
  EXPECT_EQ(count("kitty:boost=0.125", 128), 16);
  EXPECT_EQ(count("kitty:boost=0.001", 64), 0);
  EXPECT_EQ(count("kitty:boost=0.999", 64), 0);  // all 64: no list is needed
}

TEST(Kitty, SinksDoNotTakePartInTheRanking) {
  Rows rows = make_rows({1, 64, 64, DType::f16}, 128, 8);
  const auto without = boosted_channels(filled("kitty:boost=0.25,sink=4,window=0", rows), 0, 0);
  for (int t = 0; t < 4; ++t) {
    for (int d = 0; d < 64; ++d) rows.key(t, 0, d) = d % 2 == 0 ? 5000.0F : 0.0F;
  }
  EXPECT_EQ(boosted_channels(filled("kitty:boost=0.25,sink=4,window=0", rows), 0, 0), without);
}

TEST(Methods, UniformPlanesCoverEveryWidth) {
  for (int width = 1; width <= 8; ++width) {
    int next = 0;
    for (const catalog::PlaneSpec& plane : catalog::uniform_planes(width, 10)) {
      EXPECT_TRUE(plane.bits == 1 || plane.bits == 2 || plane.bits == 4);
      EXPECT_EQ(plane.shift, next);
      EXPECT_EQ(plane.depth, 10);
      next += plane.bits;
    }
    EXPECT_EQ(next, width);
  }
}

}  // namespace
}  // namespace kvant
