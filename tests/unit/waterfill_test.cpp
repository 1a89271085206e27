// The widths of waterfill: their allocation, their planes and what a page stores.
#include <gtest/gtest.h>

#include <functional>

#include "cache/tile.hpp"
#include "methods/waterfill/allocate.hpp"
#include "support/data.hpp"
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

}  // namespace
}  // namespace kvant
