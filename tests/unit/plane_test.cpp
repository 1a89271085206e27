// tiles: the bytes of a plane, for every kernel set against the scalar one, and its sizes.
#include <gtest/gtest.h>

#include "support/tile_data.hpp"

namespace kvant {
namespace {

using testing::Codes;
using testing::Plane;
using testing::scalar;

struct Planes : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

TEST_P(Planes, PackEqualsScalarAndUnpackInverts) {
  for (const int bits : {1, 2, 4}) {
    for (const int rows : testing::kRowCounts) {
      for (const int depth : testing::kDepths) {
        SCOPED_TRACE(std::to_string(bits) + " bits " + std::to_string(rows) + " x " + std::to_string(depth));
        const Codes codes = testing::random_codes(rows, depth, bits, static_cast<std::uint32_t>(rows * depth));
        Plane plane = testing::pack(set, codes, bits, 0);
        ASSERT_EQ(plane.text(), testing::pack(scalar(), codes, bits, 0).text());
        ASSERT_TRUE(plane.intact());
        std::vector<std::uint8_t> back(codes.data.size());
        set.unpack_plane(plane.data(), bits, 0, rows, depth, nullptr, back.data(), codes.stride);
        ASSERT_EQ(back, codes.data);
      }
    }
  }
}

// The bits of a plane are those at its shift, whatever the rest of the code says.
TEST_P(Planes, EveryWidthSplitsAndJoins) {
  for (int width = 1; width <= 8; ++width) {
    const Codes codes = testing::random_codes(80, 37, width, static_cast<std::uint32_t>(width));
    std::vector<std::uint8_t> back(codes.data.size());
    for (int shift = 0; shift < width;) {
      const int bits = width - shift >= 4 ? 4 : (width - shift >= 2 ? 2 : 1);
      Plane plane = testing::pack(set, codes, bits, shift);
      ASSERT_EQ(plane.text(), testing::pack(scalar(), codes, bits, shift).text()) << width << " at " << shift;
      set.unpack_plane(plane.data(), bits, shift, codes.rows, codes.depth, nullptr, back.data(), codes.stride);
      shift += bits;
    }
    ASSERT_EQ(back, codes.data) << width;
  }
}

TEST_P(Planes, GatheredPlanesTakeTheirChannelsOnly) {
  for (const int bits : {1, 2, 4}) {
    for (const int rows : {3, 16, 80, 128, 256}) {
      for (const int depth : testing::kDepths) {
        const auto index = testing::some_channels(depth, static_cast<std::uint32_t>(depth));
        const Codes codes = testing::random_codes(rows, depth, 8, 4);
        Plane plane = testing::pack(set, codes, bits, 2, index);
        ASSERT_EQ(plane.text(), testing::pack(scalar(), codes, bits, 2, index).text()) << rows << "x" << depth;
        ASSERT_TRUE(plane.intact());
        std::vector<std::uint8_t> back(codes.data.size(), 0);
        set.unpack_plane(plane.data(), bits, 2, rows, static_cast<int>(index.size()), index.data(), back.data(),
                         codes.stride);
        std::vector<std::uint8_t> expected(codes.data.size(), 0);
        const int mask = ((1 << bits) - 1) << 2;
        for (const int d : index) {
          for (int row = 0; row < rows; ++row) {
            expected[static_cast<std::size_t>(d * codes.stride + row)] =
                static_cast<std::uint8_t>(codes.at(d, row) & mask);
          }
        }
        ASSERT_EQ(back, expected) << rows << "x" << depth;
      }
    }
  }
}

// The format as src/tiles/plane.hpp defines it, from the definition: other programs read these bytes.
TEST_P(Planes, WordOrderIsTheDocumentedOne) {
  for (const int bits : {1, 2, 4}) {
    const Codes codes = testing::random_codes(112, 36, bits, 8);
    Plane plane = testing::pack(set, codes, bits, 0);
    std::size_t offset = 0;
    for (int tile = 0; tile < 7;) {
      const int left = 7 - tile;
      const int tiles = std::min(left >= 4 ? 4 : (left >= 2 ? 2 : 1), 8 / bits);
      const int per_group = 8 / bits / tiles;
      const int groups = (9 + per_group - 1) / per_group;
      for (int g = 0; g < groups; ++g) {
        for (int lane = 0; lane < 16; ++lane) {
          for (int b = 0; b < 4; ++b) {
            int expected = 0;
            for (int p = 0; p < 8 / bits; ++p) {
              const int row = 16 * tile + 16 * (p % tiles) + lane;
              const int d = 4 * (g * per_group + p / tiles) + b;
              if (d < 36) expected |= codes.at(d, row) << (p * bits);
            }
            const auto at = offset + static_cast<std::size_t>(g * 64 + lane * 4 + b);
            ASSERT_EQ(static_cast<int>(plane.data()[at]), expected) << bits << " bits, byte " << at;
          }
        }
      }
      offset += static_cast<std::size_t>(groups) * 64;
      tile += tiles;
    }
    EXPECT_EQ(offset, tiles::plane_bytes(bits, 112, 36));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, Planes, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

// Whole groups: no padding where rows and depth fill them, and never less than the codes need.
static_assert(tiles::plane_bytes(1, 16, 32) == 64);
static_assert(tiles::plane_bytes(1, 16, 33) == 128);
static_assert(tiles::plane_bytes(2, 16, 16) == 64);
static_assert(tiles::plane_bytes(2, 64, 4) == 64);
static_assert(tiles::plane_bytes(2, 64, 5) == 128);
static_assert(tiles::plane_bytes(4, 32, 4) == 64);
static_assert(tiles::plane_bytes(4, 3, 8) == 64);
static_assert(tiles::plane_bytes(2, 128, 20) == 128 * 20 * 2 / 8);  // Kitty's boosted channels, D = 80
static_assert(tiles::plane_bytes(4, 256, 1024) == 256 * 1024 / 2);

TEST(PlaneBytes, CoverTheCodesAndArePaddedToGroups) {
  for (const int bits : {1, 2, 4}) {
    for (int rows = 1; rows <= 260; rows += 7) {
      for (int depth = 1; depth <= 260; depth += 3) {
        const std::size_t bytes = tiles::plane_bytes(bits, rows, depth);
        const int padded = base::round_up(rows, 16) * base::round_up(depth, 32);
        ASSERT_EQ(bytes % 64, 0U);
        ASSERT_GE(bytes * 8, static_cast<std::size_t>(rows * depth * bits));
        ASSERT_LE(bytes * 8, static_cast<std::size_t>(padded * bits)) << bits << " " << rows << " " << depth;
      }
    }
  }
}

}  // namespace
}  // namespace kvant
