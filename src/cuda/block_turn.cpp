#include "cuda/block_turn.hpp"

#include <algorithm>

#include "base/checked.hpp"
#include "cache/rotation.hpp"

namespace kvant::cuda {
namespace {

// `turns` per pair, whole steps of sincos, at each token of a page.
std::vector<float> make_places(const BlockTurns& plain, std::span<const double> turns, int key_dim) {
  std::vector<float> places(static_cast<std::size_t>(kPage * key_dim));
  std::vector<double> at(turns.size());
  std::vector<float> cosines(turns.size()), sines(turns.size());
  for (int token = 0; token < kPage; ++token) {
    std::transform(turns.begin(), turns.end(), at.begin(), [&](double turn) { return token * turn; });
    tiles::kernels().sincos(at.data(), static_cast<int>(at.size()), cosines.data(), sines.data());
    for (int pair = 0; pair < key_dim / 2; ++pair) {
      const auto entry = static_cast<std::size_t>(turn_entry(key_dim, token, plain.place(pair)));
      const bool turns_at_all = pair < plain.pairs;
      const auto from = static_cast<std::size_t>(pair);
      places[entry] = turns_at_all ? cosines[from] : 1.0F;
      places[entry + 2] = turns_at_all ? sines[from] : 0.0F;
    }
  }
  return places;
}

}  // namespace

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
  std::copy(tables.turns.begin(), tables.turns.end(), turns.begin());
  if (plain.adjacent() || plain.pairs % kTile == 0) tables.places = make_places(plain, turns, key_dim);
  return tables;
}

}  // namespace kvant::cuda
