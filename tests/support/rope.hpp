// RoPE in double, written from the definition as ggml documents its ROPE operation, for tests of stores that undo it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kvant/rotation.hpp"

namespace kvant::testing {

// One head at one position, in place. The angle of a pair is built up step by step, as hosts do it.
inline void rope_fp64(const RopeParameters& p, double position, double* head) {
  const int pairs = p.rotated / 2;
  const double step = std::pow(p.base, -1.0 / pairs);
  const auto boundary = [&](double turns) {
    return p.rotated * std::log(p.original_context / (turns * 2 * M_PI)) / (2 * std::log(p.base));
  };
  double scale = p.attention;
  if (p.extrapolation != 0) scale *= 1.0 - 0.1 * std::log(p.scale);
  double angle = position;
  for (int i = 0; i < pairs; ++i, angle *= step) {
    const double whole =
        p.factors.empty() ? angle : angle / static_cast<double>(p.factors[static_cast<std::size_t>(i)]);
    double used = p.scale * whole;
    if (p.extrapolation != 0) {
      const double low = std::max(0.0, std::floor(boundary(p.fast)));
      const double high = std::min(p.rotated - 1.0, std::ceil(boundary(p.slow)));
      const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
      const double mix = p.extrapolation * (1 - ramp);
      used = used * (1 - mix) + whole * mix;
    }
    double& x = head[p.pairs == RotaryPairs::adjacent ? 2 * i : i];
    double& y = head[p.pairs == RotaryPairs::adjacent ? 2 * i + 1 : i + pairs];
    const double turned = (x * std::cos(used) - y * std::sin(used)) * scale;
    y = (x * std::sin(used) + y * std::cos(used)) * scale;
    x = turned;
  }
}

// All rows [positions][heads][dim].
inline std::vector<float> rope_rows(const RopeParameters& p, const std::vector<std::int64_t>& positions, int heads,
                                    int dim, const std::vector<float>& rows) {
  std::vector<float> result;
  std::vector<double> head(static_cast<std::size_t>(dim));
  for (std::size_t i = 0, at = 0; i < positions.size(); ++i) {
    for (int h = 0; h < heads; ++h, at += head.size()) {
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(at), dim, head.begin());
      rope_fp64(p, static_cast<double>(positions[i]), head.data());
      for (const double x : head) result.push_back(static_cast<float>(x));
    }
  }
  return result;
}

struct NamedRope {
  std::string name;
  RopeParameters parameters;
};

// For heads of 24 channels and more: both kinds, some channels left alone, YaRN, divisors (Llama 3).
inline std::vector<NamedRope> ropes() {
  using enum RotaryPairs;
  std::vector<float> factors(12);
  for (std::size_t i = 0; i < 12; ++i) factors[i] = 1.0F + 0.4F * static_cast<float>(i);
  RopeParameters yarn{adjacent, 24, 10000, 0.25, 1, 1, 32, 1, 128, {}};
  RopeParameters mixed{halves, 24, 500000, 0.5, 0.7, 1.25, 16, 2, 1024, factors};
  return {{"adjacent", {adjacent, 24}},
          {"halves", {halves, 24}},
          {"partial", {adjacent, 10, 1000}},
          {"partial_halves", {halves, 14, 1000000}},
          {"scaled", {halves, 24, 10000, 0.125}},
          {"yarn", yarn},
          {"yarn_and_factors", mixed}};
}

}  // namespace kvant::testing
