// The rotation of keys that block pages hold as they were before RoPE: what kernels are told of it (BlockTurns).
#pragma once

#include <vector>

#include "cuda/block_format.hpp"
#include "kvant/rotation.hpp"

namespace kvant::cuda {

// The arrays of a BlockTurns, and the rest of it.
struct TurnTables {
  std::vector<double> turns;
  std::vector<float> offsets;
  std::vector<float> places;  // empty: BlockTurns::places is null
  BlockTurns plain;           // without arrays

  // Where the arrays lie, here or on the device.
  BlockTurns at(const double* turns_at, const float* offsets_at, const float* places_at) const {
    BlockTurns result = plain;
    result.turns = turns_at;
    result.offsets = offsets_at;
    result.places = places.empty() ? nullptr : places_at;
    return result;
  }
};

// Throws Error(invalid_argument) unless the rotation fits heads of key_dim channels.
TurnTables make_turn_tables(const KeyRotation& rotation, int key_dim);

}  // namespace kvant::cuda
