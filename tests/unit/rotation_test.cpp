// The rotation of keys: its parameters, its angles and the tiles that are turned.
#include "cache/rotation.hpp"

#include <gtest/gtest.h>

#include "support/rope.hpp"
#include "support/tile_data.hpp"

namespace kvant {
namespace {

using testing::ropes;

TEST(KeyRotation, IsUndoneToWhatTheHostBeganWith) {
  for (const auto& [name, parameters] : ropes()) {
    const std::vector<std::int64_t> positions = {0, 1, 2, 1000, 17, 131071, 5, -3, 8191};
    const auto rows = testing::random_keys(static_cast<std::int64_t>(positions.size()), 2, 26, 3);
    auto turned = testing::rope_rows(parameters, positions, 2, 26, rows);
    EXPECT_NE(turned, rows);
    undo_rotation(make_rotation(parameters), positions, 2, 26, turned.data());
    for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(rows[i], turned[i], 1e-4) << name << " " << i;
  }
}

TEST(KeyRotation, ImpossibleParametersAreNamed) {
  const auto refused = [](RopeParameters p, const char* part) {
    testing::expect_error(ErrorCode::invalid_argument, {"rope parameter", part}, [&] { make_rotation(p); });
  };
  refused({.rotated = 0}, "rotated");
  refused({.rotated = 7}, "rotated");
  refused({.rotated = 8, .base = 1}, "base");
  refused({.rotated = 8, .scale = 0}, "scale");
  refused({.rotated = 8, .extrapolation = NAN}, "extrapolation");
  refused({.rotated = 8, .extrapolation = 1, .original_context = 0}, "original_context");
  refused({.rotated = 8, .extrapolation = 1, .fast = 0, .original_context = 64}, "fast");
  refused({.rotated = 8, .factors = {1, 1}}, "factors");
  refused({.rotated = 4, .factors = {1, 0}}, "factors");
}

class Turning : public ::testing::TestWithParam<tiles::Kernels> {};
INSTANTIATE_TEST_SUITE_P(Sets, Turning, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

// Right to a rounding of float, at every size of angle, and the same bits on every set.
TEST_P(Turning, AnglesAreThoseOfTheLibrary) {
  std::mt19937 generator(5);
  std::uniform_real_distribution<double> digits(-1, 1);
  std::vector<double> turns = {0,     0.125, -0.125, 0.25, -0.25, 0.375,  0.5, -0.5,
                               0.625, 0.75,  1,      1.5,  2.25,  -7.875, 1e6, -1e6 - 0.5};
  while (turns.size() < 4096)
    turns.push_back(digits(generator) * std::pow(10.0, static_cast<int>(turns.size() % 9) - 2));
  std::vector<float> cosines(turns.size()), sines(turns.size()), more_cosines(turns.size()), more_sines(turns.size());
  GetParam().sincos(turns.data(), static_cast<int>(turns.size()), cosines.data(), sines.data());
  testing::scalar().sincos(turns.data(), static_cast<int>(turns.size()), more_cosines.data(), more_sines.data());
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const double angle = (turns[i] - std::round(turns[i])) * 2 * M_PI;
    ASSERT_NEAR(cosines[i], std::cos(angle), 6.1e-8) << turns[i];
    ASSERT_NEAR(sines[i], std::sin(angle), 6.1e-8) << turns[i];
    ASSERT_EQ(std::bit_cast<std::uint32_t>(cosines[i]), std::bit_cast<std::uint32_t>(more_cosines[i])) << turns[i];
    ASSERT_EQ(std::bit_cast<std::uint32_t>(sines[i]), std::bit_cast<std::uint32_t>(more_sines[i])) << turns[i];
  }
}

// Codes to rotated rows: the definition in double, over widths, page sizes, pairs and consecutive or scattered
// positions.
TEST_P(Turning, TilesAreTheDefinitionInDouble) {
  std::array<std::uint8_t, 16> table{};
  for (std::size_t i = 0; i < 16; ++i) table[i] = static_cast<std::uint8_t>(i * i + i);
  for (const int bits : {2, 3, 4}) {
    for (const int rows : {32, 64, 128, 256}) {
      const int depth = 26;
      const testing::Codes codes = testing::random_codes(rows, depth, bits, 7);
      std::vector<testing::Plane> packed;
      std::vector<tiles::CodePlane> planes;
      for (int shift = 0; shift < bits;) {
        const int width = bits - shift >= 4 ? 4 : (bits - shift >= 2 ? 2 : 1);
        packed.push_back(testing::pack(testing::scalar(), codes, width, shift));
        planes.push_back({packed.back().data(), width, shift, 0, depth});
        shift += width;
      }
      const auto min = testing::random_floats(26, 1);
      const auto step = testing::random_floats(26, 2, 0.01F);
      for (const auto& [name, parameters] : ropes()) {
        const cache::Rotation rotation(make_rotation(parameters), depth);
        std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
        for (int i = 0; i < rows; ++i) positions[static_cast<std::size_t>(i)] = 4000 + (i < 16 ? i : (i * 37) % 101);
        std::vector<tiles::TurnBlock> blocks(static_cast<std::size_t>(rows) / 16);
        std::vector<float> room(blocks.size() * rotation.block_floats());
        rotation.place(positions.data(), rows, blocks.data(), room.data());
        std::vector<float> out(static_cast<std::size_t>(depth * rows), NAN);
        GetParam().turn_tile({planes.data(), static_cast<int>(planes.size()), rows, depth, table.data(), min.data(),
                              step.data(), rotation.pairs(), rotation.pair_step(), rotation.pair_distance(),
                              blocks.data(), out.data(), rows});
        for (int row = 0; row < rows; ++row) {
          std::vector<double> head;
          for (std::size_t d = 0; d < 26; ++d) {
            head.push_back(min[d] + static_cast<double>(step[d]) * table[codes.at(static_cast<int>(d), row)]);
          }
          testing::rope_fp64(parameters, positions[static_cast<std::size_t>(row)], head.data());
          for (int d = 0; d < depth; ++d) {
            ASSERT_NEAR(out[static_cast<std::size_t>(d * rows + row)], head[static_cast<std::size_t>(d)], 1e-5)
                << name << " " << bits << " " << rows << " " << d << " " << row;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant
