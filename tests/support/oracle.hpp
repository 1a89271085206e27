// O1 of the fault list: attention in fp64 over what the store itself decodes, and the data that tests feed in.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "kvant/kvant.hpp"

namespace kvant::testing {

constexpr double kTolerance = 2e-3;  // relative to the largest output, as the fault list suggests for O1

inline std::vector<float> random_floats(std::size_t count, std::uint32_t seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// Keys as real models have them: a few loud channels and a constant part per channel.
inline std::vector<float> random_keys(std::int64_t tokens, int heads, int dim, std::uint32_t seed) {
  std::vector<float> keys = random_floats(static_cast<std::size_t>(tokens * heads * dim), seed);
  const std::vector<float> offset = random_floats(static_cast<std::size_t>(heads * dim), seed + 1, 2.0F);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t channel = i % static_cast<std::size_t>(heads * dim);
    keys[i] = offset[channel] + keys[i] * (channel % 17 == 3 ? 8.0F : 1.0F);
  }
  return keys;
}

struct Case {
  CacheShape shape;
  int group = 1;
  std::int64_t tokens = 0;
  std::int64_t rows = 1;
};

// Keys and values of a store as doubles, [tokens][heads][dim].
inline std::vector<float> read_all(const PageStore& store, Side side, std::int64_t tokens) {
  const int dim = side == Side::key ? store.shape().key_dim : store.shape().value_dim;
  std::vector<std::int64_t> cells(static_cast<std::size_t>(tokens));
  std::iota(cells.begin(), cells.end(), 0);
  std::vector<float> rows(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(store.shape().kv_heads * dim));
  store.read(side, cells, dense_view(rows.data(), DType::f32, tokens, store.shape().kv_heads, dim));
  return rows;
}

// What is added to the logit of (row, query head, cell); -inf hides the cell.
using Bias = std::vector<double>;  // [rows][query_heads][tokens], empty: nothing is added

struct Expected {
  std::vector<double> out;  // [rows][query_heads][value_dim]
  std::vector<double> lse;  // [rows][query_heads]
};

// The sums of the oracle. Sanitizers look at the code under test; here they would take most of the tests' time.
#define KVANT_UNSANITIZED __attribute__((no_sanitize("address", "undefined")))

KVANT_UNSANITIZED inline double dot_fp64(const float* a, const float* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

KVANT_UNSANITIZED inline void add_scaled_fp64(double* sum, double weight, const float* values, int count) {
  for (int i = 0; i < count; ++i) sum[i] += weight * values[i];
}

#undef KVANT_UNSANITIZED

inline Expected attend_fp64(const CacheShape& shape, int group, std::int64_t tokens, std::int64_t rows,
                            const std::vector<float>& keys, const std::vector<float>& values,
                            const std::vector<float>& queries, double scale, double softcap, const Bias& bias,
                            const float* sinks = nullptr) {
  const int heads = shape.kv_heads * group;
  if (keys.size() < static_cast<std::size_t>(tokens * shape.kv_heads * shape.key_dim) ||
      values.size() < static_cast<std::size_t>(tokens * shape.kv_heads * shape.value_dim) ||
      queries.size() < static_cast<std::size_t>(rows * heads * shape.key_dim)) {
    throw std::invalid_argument("attend_fp64: rows are missing");
  }
  Expected expected;
  expected.out.assign(static_cast<std::size_t>(rows * heads * shape.value_dim), 0.0);
  expected.lse.assign(static_cast<std::size_t>(rows * heads), -std::numeric_limits<double>::infinity());
  std::vector<double> logits(static_cast<std::size_t>(tokens));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int h = 0; h < heads; ++h) {
      const std::size_t vector = static_cast<std::size_t>(r * heads + h);
      double peak = sinks != nullptr ? sinks[h] : -std::numeric_limits<double>::infinity();
      for (std::int64_t t = 0; t < tokens; ++t) {
        const float* q = queries.data() + vector * static_cast<std::size_t>(shape.key_dim);
        const float* k = keys.data() + (t * shape.kv_heads + h / group) * shape.key_dim;
        double sum = scale * dot_fp64(q, k, shape.key_dim);
        if (softcap > 0) sum = softcap * std::tanh(sum / softcap);
        if (!bias.empty()) sum += bias[vector * static_cast<std::size_t>(tokens) + static_cast<std::size_t>(t)];
        logits[static_cast<std::size_t>(t)] = sum;
        peak = std::max(peak, sum);
      }
      if (peak == -std::numeric_limits<double>::infinity()) continue;
      double total = sinks != nullptr ? std::exp(sinks[h] - peak) : 0.0;
      for (const double logit : logits) total += std::exp(logit - peak);
      expected.lse[vector] = peak + std::log(total);
      double* out = expected.out.data() + vector * static_cast<std::size_t>(shape.value_dim);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const double weight = std::exp(logits[static_cast<std::size_t>(t)] - peak) / total;
        const float* v = values.data() + (t * shape.kv_heads + h / group) * shape.value_dim;
        add_scaled_fp64(out, weight, v, shape.value_dim);
      }
    }
  }
  return expected;
}

// ||actual - expected|| / ||expected||, infinity when anything is not finite.
inline double relative_error(const std::vector<float>& actual, const std::vector<double>& expected) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// -inf where a causal, possibly sliding, window hides the cell.
inline Bias causal_bias(int heads, std::int64_t tokens, std::int64_t rows, std::int64_t window) {
  Bias bias(static_cast<std::size_t>(rows * heads * tokens), 0.0);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t position = tokens - rows + r;
    for (int h = 0; h < heads; ++h) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (t > position || (window > 0 && t <= position - window)) {
          bias[static_cast<std::size_t>((r * heads + h) * tokens + t)] = -std::numeric_limits<double>::infinity();
        }
      }
    }
  }
  return bias;
}

// Fills a cache with random tokens, attends causally and returns the relative O1 error.
inline double o1_error(const Recipe& recipe, const Case& c, AttentionOptions options = {}, std::uint32_t seed = 1) {
  Cache cache(recipe, c.shape);
  const int heads = c.shape.kv_heads * c.group;
  const auto keys = random_keys(c.tokens, c.shape.kv_heads, c.shape.key_dim, seed);
  const auto values =
      random_floats(static_cast<std::size_t>(c.tokens * c.shape.kv_heads * c.shape.value_dim), seed + 7);
  cache.append(dense_view(keys.data(), DType::f32, c.tokens, c.shape.kv_heads, c.shape.key_dim),
               dense_view(values.data(), DType::f32, c.tokens, c.shape.kv_heads, c.shape.value_dim));
  const auto queries = random_floats(static_cast<std::size_t>(c.rows * heads * c.shape.key_dim), seed + 9, 0.7F);
  std::vector<float> out(static_cast<std::size_t>(c.rows * heads * c.shape.value_dim), -77.0F);
  cache.attend(dense_view(queries.data(), DType::f32, c.rows, heads, c.shape.key_dim),
               dense_view(out.data(), DType::f32, c.rows, heads, c.shape.value_dim), options);
  const double scale = options.scale != 0 ? options.scale : 1.0 / std::sqrt(c.shape.key_dim);
  const Expected expected =
      attend_fp64(c.shape, c.group, c.tokens, c.rows, read_all(cache.store(), Side::key, c.tokens),
                  read_all(cache.store(), Side::value, c.tokens), queries, scale, options.softcap,
                  causal_bias(heads, c.tokens, c.rows, options.sliding_window), options.sinks);
  return relative_error(out, expected.out);
}

// Runs the rest of a scope with one kernel set, then goes back to the best one.
class ForcedKernel {
 public:
  explicit ForcedKernel(const std::string& name) { force_kernel(name); }
  ~ForcedKernel() { force_kernel(kernel_names().front()); }
};

}  // namespace kvant::testing
