// Random arrays and the fp64 attention that the behaviour tests of the reference caches share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "base/half.hpp"
#include "kvant/reference_cache.hpp"

namespace kvant::testing {

// A dense array [batch, heads, tokens, dim] of one type.
struct Rows {
  DType type = DType::f16;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t tokens = 0;
  std::int64_t dim = 1;
  std::vector<std::byte> bytes;

  Rows(DType dtype, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d)
      : type(dtype), batch(b), heads(h), tokens(s), dim(d) {
    bytes.resize(static_cast<std::size_t>(b * h * s * d) * size_of(dtype));
  }
  Array array() { return dense_array(static_cast<void*>(bytes.data()), type, {batch, heads, tokens, dim}); }
  ConstArray array() const {
    return dense_array(static_cast<const void*>(bytes.data()), type, {batch, heads, tokens, dim});
  }
  // One matrix [tokens, dim] of it.
  ConstArray matrix(std::int64_t head) const {
    const auto skip = static_cast<std::size_t>(head * tokens * dim) * size_of(type);
    return dense_array(static_cast<const void*>(bytes.data() + skip), type, {tokens, dim});
  }
  std::int64_t index(std::int64_t head, std::int64_t token) const { return (head * tokens + token) * dim; }
  float at(std::int64_t i) const { return base::load_float(bytes.data(), type, i); }
  void set(std::int64_t i, float value) { base::store_float(bytes.data(), type, i, value); }
};

// Normal values with a loud channel and, now and then, a constant one.
inline Rows random_rows(DType type, std::int64_t batch, std::int64_t heads, std::int64_t tokens, std::int64_t dim,
                        std::mt19937& random) {
  Rows rows(type, batch, heads, tokens, dim);
  std::normal_distribution<float> normal;
  const bool flat = random() % 8 == 0;
  for (std::int64_t i = 0; i < batch * heads * tokens * dim; ++i) {
    const float value = normal(random) * (i % dim % 7 == 3 ? 6.0F : 1.0F);
    rows.set(i, flat && i % dim == 0 ? -0.5F : value);
  }
  return rows;
}

// ||out - expected|| / ||expected|| of attention in fp64 over the rows that a cache returned.
inline double attention_error(const Rows& keys, const Rows& values, const Rows& queries, const Rows& out,
                              const ReferenceAttentionOptions& options) {
  const double scale = options.scale != 0 ? options.scale : 1.0 / std::sqrt(static_cast<double>(keys.dim));
  const std::int64_t group = queries.heads / keys.heads;
  double difference = 0;
  double norm = 0;
  for (std::int64_t qh = 0; qh < queries.batch * queries.heads; ++qh) {
    const std::int64_t kv = qh / queries.heads * keys.heads + qh % queries.heads / group;
    for (std::int64_t r = 0; r < queries.tokens; ++r) {
      const std::int64_t visible = options.causal ? keys.tokens - queries.tokens + r + 1 : keys.tokens;
      std::vector<double> weights(static_cast<std::size_t>(keys.tokens));
      double peak = -std::numeric_limits<double>::infinity();
      for (std::int64_t t = 0; t < visible; ++t) {
        double dot = 0;
        for (std::int64_t d = 0; d < keys.dim; ++d) {
          dot += static_cast<double>(queries.at(queries.index(qh, r) + d)) * keys.at(keys.index(kv, t) + d);
        }
        weights[static_cast<std::size_t>(t)] = dot * scale;
        peak = std::max(peak, dot * scale);
      }
      double total = 0;
      for (std::int64_t t = 0; t < visible; ++t) {
        auto& weight = weights[static_cast<std::size_t>(t)];
        weight = std::exp(weight - peak);
        total += weight;
      }
      for (std::int64_t d = 0; d < values.dim; ++d) {
        double want = 0;
        for (std::int64_t t = 0; t < visible; ++t) {
          want += weights[static_cast<std::size_t>(t)] / total * values.at(values.index(kv, t) + d);
        }
        const double got = out.at(out.index(qh, r) + d);
        if (!std::isfinite(got)) return std::numeric_limits<double>::infinity();
        difference += (got - want) * (got - want);
        norm += want * want;
      }
    }
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

}  // namespace kvant::testing
