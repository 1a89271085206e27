// Without a GPU: the device's page format and the cutting of work are host code.
#include <gtest/gtest.h>

#include <map>

#include "cuda/device_format.hpp"
#include "cuda/plan.hpp"
#include "cuda/support.hpp"

namespace kvant::cuda::test {
namespace {

TEST(DevicePage, RoundTripKeepsEveryBit) {
  for (const char* recipe : {"kivi:k=2,v=2", "kivi:k=3,v=3", "kivi:k=4,v=4", "kivi:k=4,v=2", "kivi:k=2,v=3", "kitty",
                             "kitty:boost=0.1,v=4", "kitty:boost=1", "small", "balanced", "near-lossless",
                             "waterfill:k=1,high=1,v=3", "waterfill:k=6,low=6,high=6,v=4", "waterfill:k=3.3,high=6"}) {
    for (const int dim : {64, 96, 128, 192, 256}) {
      for (const DType type : {DType::f16, DType::bf16}) {
        SCOPED_TRACE(std::string(recipe) + " " + std::to_string(dim));
        const CacheShape shape{2, dim, dim == 192 ? 128 : dim, type};
        const Cache cache = random_cache(recipe, shape, 256, 5);
        const DeviceFormat format = make_device_format(parse_recipe(recipe), shape);
        const auto block = cache.store().sealed_block(0);
        ASSERT_EQ(block.size(), cache.store().layout().page_bytes);
        std::vector<std::byte> back(block.size());
        for (int head = 0; head < shape.kv_heads; ++head) {
          std::vector<std::byte> device(format.head_bytes(), std::byte{0xCC});
          to_device(format, cache.store().layout(), block, head, device);
          from_device(format, cache.store().layout(), device, head, back);
        }
        EXPECT_TRUE(std::equal(block.begin(), block.end(), back.begin(), back.end()));
      }
    }
  }
}

TEST(DevicePage, SizesAreTheStudys) {
  const CacheShape shape{1, 128, 128, DType::f16};
  EXPECT_EQ(make_device_format(parse_recipe("kivi:k=2,v=2"), shape).head_bytes(), 9216U);
  EXPECT_EQ(make_device_format(parse_recipe("kivi:k=4,v=4"), shape).head_bytes(), 17408U);
  EXPECT_EQ(make_device_format(parse_recipe("kitty"), shape).head_bytes(), 9216U + 1024U + 32U);
  // 2.5 bits: half a kilobyte of endpoints, a byte per channel, the counts; nothing is padded to a step.
  EXPECT_EQ(make_device_format(parse_recipe("small"), shape).head_bytes(), 5120U + 512U + 128U + 16U + 4608U);
}

TEST(DevicePage, RefusesWhatHasNoKernels) {
  const CacheShape shape{1, 128, 128, DType::f16};
  const auto refused = [](const char* recipe, const CacheShape& s, const char* word) {
    expect_refused([&] { make_device_format(parse_recipe(recipe), s); }, recipe, word);
  };
  refused("kivi:k=8,v=4", shape, "8");
  refused("kivi:k=1,v=4", shape, "1");
  refused("kivi:page=64", shape, "page");
  refused("f16", shape, "f16");
  refused("waterfill:v=8", shape, "8");
  refused("waterfill:page=64", shape, "page");
  refused("k=zipcache,v=kivi:4", shape, "orders the tokens");
  refused("kitty:selector=variance", shape, "otherwise than by magnitude");
  refused("waterfill:feedback=1", shape, "feeds errors of keys back");
  refused("kivi", {1, 80, 128, DType::f16}, "80");
  refused("kivi", {1, 128, 128, DType::f32}, "f32");
}

TEST(DevicePage, RefusesForgedChannelLists) {
  const CacheShape shape{1, 128, 128, DType::f16};
  const Cache cache = random_cache("kitty", shape, 256, 9);
  const DeviceFormat format = make_device_format(parse_recipe("kitty"), shape);
  std::vector<std::byte> device(format.head_bytes());
  to_device(format, cache.store().layout(), cache.store().sealed_block(0), 0, device);
  std::vector<std::byte> back(cache.store().layout().page_bytes);
  const auto at = static_cast<std::size_t>(format.key.index_offset());
  device[at + 1] = device[at];
  EXPECT_THROW(from_device(format, cache.store().layout(), device, 0, back), Error);
  device[at + 31] = std::byte{200};
  EXPECT_THROW(from_device(format, cache.store().layout(), device, 0, back), Error);
}

TEST(DevicePage, RefusesForgedWidths) {
  const CacheShape shape{1, 128, 128, DType::f16};
  const Cache cache = random_cache("small", shape, 256, 9);
  const PageLayout& layout = cache.store().layout();
  const DeviceFormat format = make_device_format(parse_recipe("small"), shape);
  std::vector<std::byte> good(format.head_bytes());
  to_device(format, layout, cache.store().sealed_block(0), 0, good);
  std::vector<std::byte> back(layout.page_bytes);
  EXPECT_NO_THROW(from_device(format, layout, good, 0, back));
  const auto forged = [&](int offset, std::byte value) {
    std::vector<std::byte> device = good;
    device[static_cast<std::size_t>(offset)] = value;
    EXPECT_THROW(from_device(format, layout, device, 0, back), Error) << offset;
  };
  forged(format.key.index_offset(), good[static_cast<std::size_t>(format.key.index_offset()) + 127]);  // twice
  forged(format.key.index_offset() + 5, std::byte{128});
  for (int i = 0; i < 6; ++i) forged(format.key.counts_offset() + i, std::byte{200});
  // The right number of fours, but wider than the page has place for.
  std::vector<std::byte> device = good;
  for (int i = 0; i < 6; ++i) device[static_cast<std::size_t>(format.key.counts_offset() + i)] = std::byte{0};
  device[static_cast<std::size_t>(format.key.counts_offset())] = std::byte{32};
  for (int i = 0; i < 128; ++i) {
    device[static_cast<std::size_t>(format.key.index_offset() + i)] = static_cast<std::byte>(i);
  }
  EXPECT_THROW(from_device(format, layout, device, 0, back), Error);
}

// Every unit of every vector is in exactly one segment, parts are numbered and counted, nothing shares a partial.
TEST(Plan, CoversEveryUnitOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<PlanSequence> sequences(random() % 6);
    for (PlanSequence& s : sequences) {
      s.first_unit = static_cast<int>(random() % 3);
      s.coded_units = s.first_unit + static_cast<int>(random() % (round % 3 == 0 ? 2 : 300));
      s.exact_tiles = static_cast<int>(random() % 20);
      s.live_tiles = s.exact_tiles == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(s.exact_tiles + 1));
    }
    PlanShape shape;
    shape.kv_heads = 1 + static_cast<int>(random() % 4);
    shape.vectors = 1 + static_cast<int>(random() % 12);
    shape.exact_cost = 0.9;
    Split split;
    const int items = static_cast<int>(sequences.size()) * shape.kv_heads * ((shape.vectors + 3) / 4);
    split.aligned = round % 3 == 0;
    split.whole = round % 3 == 1 ? 1 + static_cast<int>(random() % 4) : 0;
    split.groups = split.aligned     ? std::max(1, items) * (1 + static_cast<int>(random() % 5))
                   : split.whole > 0 ? (items + split.whole - 1) / split.whole
                                     : 1 + static_cast<int>(random() % 200);
    const Plan plan = make_plan(split, shape, sequences);
    ASSERT_EQ(plan.first_segment.size(), static_cast<std::size_t>(split.groups) + 1);
    ASSERT_EQ(plan.first_segment.back(), static_cast<int>(plan.segments.size()));
    std::map<std::tuple<int, int, int>, std::vector<Segment>> found;
    for (const Segment& s : plan.segments) found[{s.sequence, s.kv_head, s.vector0}].push_back(s);
    EXPECT_EQ(found.size(), static_cast<std::size_t>(items));
    std::vector<int> partials(static_cast<std::size_t>(plan.partials));
    for (auto& [key, segments] : found) {
      const PlanSequence& sequence = sequences[static_cast<std::size_t>(std::get<0>(key))];
      int at = sequence.first_unit;
      if (split.whole > 0) {
        EXPECT_EQ(segments.size(), 1U);
      }
      for (std::size_t i = 0; i < segments.size(); ++i) {
        EXPECT_EQ(segments[i].begin, at);
        EXPECT_GE(segments[i].end, at);
        EXPECT_EQ(segments[i].part, static_cast<int>(i));
        EXPECT_EQ(segments[i].parts, static_cast<int>(segments.size()));
        EXPECT_EQ(segments[i].counter, segments[0].counter);
        at = segments[i].end;
        if (segments.size() > 1) ++partials[static_cast<std::size_t>(segments[i].partial0 + segments[i].part)];
      }
      EXPECT_EQ(at, sequence.coded_units + sequence.exact_tiles);
    }
    for (const int uses : partials) EXPECT_EQ(uses, 1);
  }
}

// Batches that come out nearly even keep their (sequence, head)s whole; few, long or unequal ones are cut.
TEST(Plan, WholeSequencesWhereCutsWouldCostMore) {
  PlanDevice device;
  device.clusters_of_2 = 66;
  device.clusters_of_8 = 16;
  EXPECT_EQ(choose_split(device, 256, 64, true).whole, 2);
  EXPECT_EQ(choose_split(device, 256, 64, true).groups, 128);
  EXPECT_EQ(choose_split(device, 128, 256, true).whole, 1);
  EXPECT_EQ(choose_split(device, 256, 64, false).whole, 0);   // lengths differ
  EXPECT_EQ(choose_split(device, 256, 1024, true).whole, 0);  // four idle multiprocessors cost more
  EXPECT_EQ(choose_split(device, 140, 64, true).whole, 0);    // two on each of 70 would leave 62 idle
  EXPECT_EQ(choose_split(device, 64, 64, true).whole, 0);     // clusters
  EXPECT_EQ(choose_split(device, 256, 256, true).whole, 2);
  device.thin_pages = true;
  EXPECT_EQ(choose_split(device, 256, 256, true).whole, 0);
  EXPECT_FALSE(choose_split(device, 256, 256, true).few_warps);
}

// Few (sequence, head)s: a cluster of 8 each for short ones, else blocks that fill the device as long as more of them
// mean fewer rounds.
TEST(Plan, ClustersAndPartsWhereHeadsAreFew) {
  PlanDevice device;
  device.clusters_of_2 = 66;
  device.clusters_of_8 = 16;
  device.halves = true;
  const auto expect = [&](int items, int pages, int ranks, int groups, bool half = false) {
    const Split split = choose_split(device, items, pages, true);
    EXPECT_EQ(split.ranks, ranks) << items << " x " << pages;
    EXPECT_EQ(split.groups, groups) << items << " x " << pages;
    EXPECT_EQ(split.half, half) << items << " x " << pages;
    EXPECT_TRUE(split.aligned) << items << " x " << pages;
  };
  expect(8, 32, 8, 8, true);
  expect(8, 128, 8, 8);
  expect(8, 256, 1, 128);
  expect(8, 1024, 1, 128);
  expect(1, 256, 1, 32);
  expect(1, 1024, 1, 64);
  expect(32, 64, 1, 128);
  expect(44, 256, 1, 132);
  expect(45, 256, 2, 45);
  expect(66, 256, 2, 66);
  EXPECT_TRUE(choose_split(device, 8, 1024, true).few_warps);
  device.more_warps = true;
  EXPECT_FALSE(choose_split(device, 8, 1024, true).few_warps);
  EXPECT_TRUE(choose_split(device, 8, 256, true).few_warps);
  expect(8, 128, 1, 128);
  device.clusters_of_2 = device.clusters_of_8 = 0;  // before sm_90
  expect(8, 16, 1, 16);
  expect(66, 256, 1, 132);
}

// Few pages: enough blocks for every multiprocessor, as many teams as have pages, parts that are merged fast.
TEST(Plan, TeamsWherePagesAreFew) {
  const auto expect = [](std::int64_t items, std::int64_t pages, int teams, int parts) {
    const TeamSplit split = choose_teams(132, 4, items, pages);
    EXPECT_EQ(split.teams, teams) << items << " x " << pages;
    EXPECT_EQ(split.parts, parts) << items << " x " << pages;
  };
  expect(8, 32, 2, 16);
  expect(8, 64, 4, 16);
  expect(1, 64, 4, 16);
  expect(8, 8, 2, 4);
  expect(8, 128, 4, 16);
  expect(8, 160, 0, 1);  // a warp each
  expect(8, 256, 0, 1);
  expect(256, 64, 0, 1);
  expect(8, 0, 1, 1);  // nothing but exact tokens
  expect(0, 10, 0, 1);
  EXPECT_EQ(choose_teams(132, 2, 8, 64).teams, 2);
  EXPECT_EQ(choose_teams(20, 4, 8, 64).teams, 0);  // a small device
}

TEST(Plan, GroupsShareTheWorkEqually) {
  const std::vector<PlanSequence> sequences(32, PlanSequence{0, 256, 0, 0, 0});
  PlanShape shape;
  shape.kv_heads = 8;
  shape.vectors = 4;
  const Plan plan = make_plan({1, 132, false, false}, shape, sequences);
  for (int g = 0; g < 132; ++g) {
    int units = 0;
    for (int i = plan.first_segment[static_cast<std::size_t>(g)];
         i < plan.first_segment[static_cast<std::size_t>(g) + 1]; ++i) {
      units += plan.segments[static_cast<std::size_t>(i)].end - plan.segments[static_cast<std::size_t>(i)].begin;
    }
    EXPECT_NEAR(units, 32 * 8 * 256 / 132.0, 12);  // the ends of segments count as work, too
  }
}

}  // namespace
}  // namespace kvant::cuda::test
