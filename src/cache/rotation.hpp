// The rotation of a store's keys, ready to be applied: angles of positions, and what attention needs per page.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvant/rotation.hpp"
#include "tiles/kernels.hpp"

namespace kvant::cache {

enum class Turn : std::uint8_t {
  rotate,  // as the host does
  undo,    // its inverse
  shift,   // a rotated key by some more positions: the magnitude is there already
};

class Rotation {
 public:
  // Throws Error(invalid_argument) unless the rotation fits heads of key_dim channels.
  Rotation(const KeyRotation& rotation, int key_dim);

  const KeyRotation& key_rotation() const { return key_; }
  // By what part of a turn each pair moves per position.
  std::span<const double> turns() const { return std::span(turns_).first(key_.frequencies.size()); }
  int pairs() const { return static_cast<int>(key_.frequencies.size()); }
  // Pair p is the channels p * pair_step() and that + pair_distance(); those from 2 * pairs() on are not turned.
  int pair_step() const { return key_.pairs == RotaryPairs::adjacent ? 2 : 1; }
  int pair_distance() const { return key_.pairs == RotaryPairs::adjacent ? 1 : pairs(); }

  // Turns column i of the channels [key_dim][stride] by positions[i], i < count.
  void turn(Turn how, const std::int32_t* positions, int count, float* channels, std::int64_t stride) const;

  // How the rows of a tile, a multiple of 16, are rotated. 16 rows of consecutive positions share a table; others get
  // one of their own, which costs 16 times the angles. `room`: block_floats() floats per 16 rows.
  void place(const std::int32_t* positions, int rows, tiles::TurnBlock* blocks, float* room) const;
  std::size_t block_floats() const;

  std::size_t bytes() const;

 private:
  std::size_t padded() const { return turns_.size(); }

  KeyRotation key_;
  std::vector<double> turns_;        // per position, padded with zeros to whole steps of sincos
  std::vector<float> lane_cosines_;  // [pairs][16]: of 0..15 positions
  std::vector<float> lane_sines_;
};

// positions as a store keeps them. Throws Error(out_of_range) for one that has more than 32 bits.
std::int32_t checked_position(std::int64_t position);

}  // namespace kvant::cache
