#include "cache/rotation.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "base/checked.hpp"
#include "tiles/plane.hpp"

namespace kvant {
namespace cache {
namespace {

constexpr double kLargestMagnitude = 1024;
constexpr double kLargestFrequency = 1e6;  // with 32 bits of a position, angles still have a fraction

[[noreturn]] void refuse(const std::string& what) {
  base::fail(ErrorCode::invalid_argument, "key rotation: " + what);
}

}  // namespace

std::int32_t checked_position(std::int64_t position) {
  using Limits = std::numeric_limits<std::int32_t>;
  if (position >= Limits::min() && position <= Limits::max()) return static_cast<std::int32_t>(position);
  base::fail(ErrorCode::out_of_range, "position is " + std::to_string(position) + "; allowed: -2^31 to 2^31 - 1");
}

Rotation::Rotation(const KeyRotation& rotation, int key_dim) : key_(rotation) {
  if (key_dim < 1) refuse("key_dim is " + std::to_string(key_dim) + "; allowed: 1 and more");
  const std::size_t most = static_cast<std::size_t>(key_dim) / 2;
  if (key_.frequencies.empty() || key_.frequencies.size() > most) {
    refuse("has " + std::to_string(key_.frequencies.size()) + " pairs of channels; allowed: 1 to " +
           std::to_string(most) + ", half of key_dim");
  }
  for (const double frequency : key_.frequencies) {
    if (!(std::fabs(frequency) <= kLargestFrequency)) {
      refuse("a frequency is " + std::to_string(frequency) + "; allowed: magnitudes up to 10^6");
    }
    turns_.push_back(frequency / tiles::kTurn);
  }
  if (!(key_.magnitude >= 1 / kLargestMagnitude && key_.magnitude <= kLargestMagnitude)) {
    refuse("magnitude is " + std::to_string(key_.magnitude) + "; allowed: 1/1024 to 1024");
  }
  turns_.resize(base::round_up(turns_.size(), std::size_t{tiles::kSinCosStep}));
  double turns[tiles::kLanes];
  lane_cosines_.resize(key_.frequencies.size() * tiles::kLanes);
  lane_sines_.resize(lane_cosines_.size());
  for (std::size_t pair = 0; pair < key_.frequencies.size(); ++pair) {
    for (int lane = 0; lane < tiles::kLanes; ++lane) turns[lane] = lane * turns_[pair];
    tiles::kernels().sincos(turns, tiles::kLanes, lane_cosines_.data() + pair * tiles::kLanes,
                            lane_sines_.data() + pair * tiles::kLanes);
  }
}

void Rotation::turn(Turn how, const std::int32_t* positions, int count, float* channels, std::int64_t stride) const {
  const auto columns = base::round_up(static_cast<std::size_t>(count), std::size_t{tiles::kSinCosStep});
  std::vector<double> turns(columns);
  std::vector<float> cosines(columns), sines(columns);
  const auto magnitude = static_cast<float>(key_.magnitude);
  const float factor = how == Turn::rotate ? magnitude : (how == Turn::undo ? 1 / magnitude : 1.0F);
  const float sign = how == Turn::undo ? -factor : factor;
  for (int pair = 0; pair < pairs(); ++pair) {
    const double each = turns_[static_cast<std::size_t>(pair)];
    for (int i = 0; i < count; ++i) turns[static_cast<std::size_t>(i)] = positions[i] * each;
    tiles::kernels().sincos(turns.data(), static_cast<int>(columns), cosines.data(), sines.data());
    float* x = channels + pair * pair_step() * stride;
    float* y = x + pair_distance() * stride;
    for (int i = 0; i < count; ++i) {
      const float cosine = cosines[static_cast<std::size_t>(i)] * factor;
      const float sine = sines[static_cast<std::size_t>(i)] * sign;
      const float turned = x[i] * cosine - y[i] * sine;
      y[i] = x[i] * sine + y[i] * cosine;
      x[i] = turned;
    }
  }
}

// Per block: its angle [padded] twice, then a table of its own [pairs][16] twice.
std::size_t Rotation::block_floats() const {
  return 2 * padded() * (1 + tiles::kLanes);
}

void Rotation::place(const std::int32_t* positions, int rows, tiles::TurnBlock* blocks, float* room) const {
  const auto magnitude = static_cast<float>(key_.magnitude);
  std::array<double, tiles::kMaxDepth / 2> turns;
  for (int first = 0; first < rows; first += tiles::kLanes, room += block_floats()) {
    const std::int32_t* at = positions + first;
    float* cosines = room;
    float* sines = room + padded();
    float* own_cosines = sines + padded();
    float* own_sines = own_cosines + padded() * tiles::kLanes;
    bool consecutive = true;
    for (int i = 1; i < tiles::kLanes; ++i) consecutive &= std::int64_t{at[i]} - at[0] == i;
    if (consecutive) {
      for (std::size_t i = 0; i < padded(); ++i) turns[i] = at[0] * turns_[i];
      tiles::kernels().sincos(turns.data(), static_cast<int>(padded()), cosines, sines);
      for (std::size_t i = 0; i < padded(); ++i) cosines[i] *= magnitude;
      for (std::size_t i = 0; i < padded(); ++i) sines[i] *= magnitude;
      *blocks++ = {lane_cosines_.data(), lane_sines_.data(), cosines, sines};
      continue;
    }
    double row[tiles::kLanes];
    for (int pair = 0; pair < pairs(); ++pair) {
      for (int i = 0; i < tiles::kLanes; ++i) row[i] = at[i] * turns_[static_cast<std::size_t>(pair)];
      const std::ptrdiff_t table = std::ptrdiff_t{pair} * tiles::kLanes;
      tiles::kernels().sincos(row, tiles::kLanes, own_cosines + table, own_sines + table);
    }
    std::fill_n(cosines, padded(), magnitude);
    std::fill_n(sines, padded(), 0.0F);
    *blocks++ = {own_cosines, own_sines, cosines, sines};
  }
}

std::size_t Rotation::bytes() const {
  return sizeof(Rotation) + (key_.frequencies.capacity() + turns_.capacity()) * sizeof(double) +
         (lane_cosines_.capacity() + lane_sines_.capacity()) * sizeof(float);
}

}  // namespace cache

namespace {

void check_parameters(const RopeParameters& p) {
  const auto refuse = [](const char* name, double value, const char* allowed) {
    base::fail(ErrorCode::invalid_argument,
               std::string("rope parameter ") + name + " is " + std::to_string(value) + "; allowed: " + allowed);
  };
  constexpr int kMostChannels = 1024;
  const auto is_number = [](double value) { return std::isfinite(value); };
  if (p.rotated < 2 || p.rotated > kMostChannels || p.rotated % 2 != 0) {
    refuse("rotated", p.rotated, "even, 2 to 1024");
  }
  if (!(p.base > 1) || !is_number(p.base)) refuse("base", p.base, "above 1");
  if (!(p.scale > 0) || !is_number(p.scale)) refuse("scale", p.scale, "above 0");
  if (!is_number(p.extrapolation)) refuse("extrapolation", p.extrapolation, "a number");
  if (p.extrapolation == 0) return;
  if (!(p.fast > 0 && is_number(p.fast))) refuse("fast", p.fast, "above 0");
  if (!(p.slow > 0 && is_number(p.slow))) refuse("slow", p.slow, "above 0");
  if (p.original_context < 1) refuse("original_context", p.original_context, "1 and more, with extrapolation");
}

// The pair, as a real number, that turns `turns` times in the original context.
double pair_of_turns(const RopeParameters& p, double turns) {
  return p.rotated * std::log(p.original_context / (turns * 2 * std::numbers::pi)) / (2 * std::log(p.base));
}

}  // namespace

KeyRotation make_rotation(const RopeParameters& p) {
  check_parameters(p);
  const auto pairs = static_cast<std::size_t>(p.rotated) / 2;
  if (!p.factors.empty() && p.factors.size() != pairs) {
    base::fail(ErrorCode::invalid_argument, "rope parameter factors has " + std::to_string(p.factors.size()) +
                                                " numbers; allowed: none or " + std::to_string(pairs));
  }
  KeyRotation rotation{p.pairs, {}, p.attention};
  double first = 0;
  double last = 0;
  if (p.extrapolation != 0) {
    first = std::max(0.0, std::floor(pair_of_turns(p, p.fast)));
    last = std::min(p.rotated - 1.0, std::ceil(pair_of_turns(p, p.slow)));
    rotation.magnitude *= 1 + 0.1 * std::log(1 / p.scale);
  }
  for (std::size_t i = 0; i < pairs; ++i) {
    const double factor = p.factors.empty() ? 1.0 : static_cast<double>(p.factors[i]);
    if (!(factor != 0) || !std::isfinite(factor)) {
      base::fail(ErrorCode::invalid_argument,
                 "rope parameter factors is " + std::to_string(factor) + "; allowed: finite, not 0");
    }
    const double whole = std::pow(p.base, -2.0 * static_cast<double>(i) / p.rotated) / factor;
    // 1 where a pair is fast enough to keep its frequency, 0 where it is scaled.
    const double place = (static_cast<double>(i) - first) / std::max(0.001, last - first);
    const double kept = p.extrapolation * (1 - std::clamp(place, 0.0, 1.0));
    rotation.frequencies.push_back(whole * (p.scale * (1 - kept) + kept));
  }
  cache::Rotation(rotation, p.rotated);  // refuses what is beyond its limits
  return rotation;
}

void undo_rotation(const KeyRotation& rotation, std::span<const std::int64_t> positions, int heads, int dim,
                   float* rows) {
  const cache::Rotation turns(rotation, dim);
  if (heads < 0) base::fail(ErrorCode::invalid_argument, "heads is " + std::to_string(heads) + "; allowed: 0 and more");
  std::vector<std::int32_t> checked;
  for (const std::int64_t position : positions) checked.push_back(cache::checked_position(position));
  // A row is one column of its channels.
  for (const std::int32_t& position : checked) {
    for (int head = 0; head < heads; ++head, rows += dim) turns.turn(cache::Turn::undo, &position, 1, rows, 1);
  }
}

}  // namespace kvant
