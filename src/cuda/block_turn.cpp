#include "cuda/block_turn.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "cache/rotation.hpp"

namespace kvant::cuda {

TurnTables make_turn_tables(const KeyRotation& rotation, int key_dim) {
  const cache::Rotation checked(rotation, key_dim);
  TurnTables tables;
  tables.turns.assign(checked.turns().begin(), checked.turns().end());
  BlockTurns& plain = tables.plain;
  plain.pairs = checked.pairs();
  plain.padded = base::round_up(plain.pairs, kFour);
  plain.step = checked.pair_step();
  plain.distance = checked.pair_distance();
  plain.magnitude = static_cast<float>(rotation.magnitude);
  // sincos goes over whole steps; zeros turn nothing.
  std::vector<double> turns(base::round_up(tables.turns.size(), std::size_t{tiles::kSinCosStep}));
  std::vector<float> cosines(turns.size()), sines(turns.size());
  for (int offset = 0; offset < kTile; ++offset) {
    std::transform(tables.turns.begin(), tables.turns.end(), turns.begin(), [&](double turn) { return offset * turn; });
    tiles::kernels().sincos(turns.data(), static_cast<int>(turns.size()), cosines.data(), sines.data());
    for (std::size_t pair = 0; pair < static_cast<std::size_t>(plain.padded); ++pair) {
      tables.offsets.insert(tables.offsets.end(), {cosines[pair], sines[pair]});
    }
  }
  return tables;
}

}  // namespace kvant::cuda
