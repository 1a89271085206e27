// Random call sequences of KVQuantKVCache against a plain list of rows, attention against fp64 over those rows (O1),
// and what a refused call leaves behind.
#include <gtest/gtest.h>

#include <random>

#include "kvant/error.hpp"
#include "reference/kvquant_model.hpp"

namespace kvant::kvquant {
namespace {

struct Scene {
  KVCacheConfig config;
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t dim = 8;
  DType type = DType::f16;

  std::int64_t all_heads() const { return batch * heads; }
};

int pick(std::mt19937& random, std::initializer_list<int> choices) {
  return *(choices.begin() + random() % choices.size());
}

Scene random_scene(std::mt19937& random) {
  Scene s;
  s.config.method = "kvquant";
  s.config.kvquant_bits = pick(random, {1, 2, 3, 3, 3, 4, 5, 8});
  s.config.kvquant_outlier_fraction = std::vector<double>{0, .01, .01, .05, .3, 7.0}[random() % 6];
  s.config.kvquant_n_sink = pick(random, {0, 1, 1, 4, 70});
  s.config.kvquant_lloyd_iters = pick(random, {0, 1, 8});
  s.config.kvquant_refit_interval = pick(random, {0, 0, 3, 16, 50});
  s.batch = pick(random, {1, 1, 2});
  s.heads = pick(random, {1, 2, 3});
  s.dim = pick(random, {1, 5, 8, 24, 40, 64, 100, 300});
  s.type = std::vector<DType>{DType::f16, DType::bf16, DType::f32}[random() % 3];
  return s;
}

// Values of the type, as floats: normal, on a coarse grid (ties), or constant.
std::vector<Block> random_blocks(const Scene& s, std::int64_t rows, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const int kind = pick(random, {0, 0, 0, 1, 2});
  std::vector<Block> blocks;
  for (std::int64_t i = 0; i < s.all_heads(); ++i) {
    Block block(rows, s.dim);
    for (float& x : block.x) {
      x = kind == 2 ? 1.25F : normal(random);
      if (kind == 1) x = std::nearbyint(x * 2) / 2;
      if (s.type == DType::f16) x = base::half_to_float(base::float_to_half(x));
      if (s.type == DType::bf16) x = base::bfloat_to_float(base::float_to_bfloat(x));
    }
    blocks.push_back(block);
  }
  return blocks;
}

// The blocks as an array [B, H, S, D] of the type whose tokens and channels are strided.
struct Packed {
  Packed(const Scene& s, const std::vector<Block>& blocks) {
    const std::int64_t rows = blocks[0].rows;
    const Extents stride{s.heads * rows * s.dim * 2, rows * s.dim * 2, 2, rows * 2};  // channels before tokens
    bytes.resize(static_cast<std::size_t>(s.all_heads() * rows * s.dim) * 2 * size_of(s.type));
    array = {bytes.data(), s.type, 4, {s.batch, s.heads, rows, s.dim}, stride};
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < s.dim; ++c) {
          const auto head = static_cast<std::int64_t>(i);
          const std::int64_t at =
              head / s.heads * stride[0] + head % s.heads * stride[1] + r * stride[2] + c * stride[3];
          base::store_float(bytes.data(), s.type, at, blocks[i].at(r, c));
        }
      }
    }
  }
  std::vector<std::byte> bytes;
  ConstArray array;
};

std::string compare_rows(const std::vector<Block>& want, const Floats& got) {
  std::size_t at = 0;
  for (const Block& block : want) {
    for (const float x : block.x) {
      if (std::bit_cast<std::uint32_t>(x) != std::bit_cast<std::uint32_t>(got[at])) {
        return "element " + std::to_string(at) + " is " + std::to_string(got[at]) + ", not " + std::to_string(x);
      }
      ++at;
    }
  }
  return {};
}

// Every row through fetch: in fp32, and, for 2-byte types, in the cached type as well.
void expect_rows(const Scene& s, const PlainCache& plain, const KVQuantKVCache& cache) {
  const auto count = static_cast<std::size_t>(s.all_heads() * plain.tokens * s.dim);
  Floats keys(count);
  Floats values(count);
  const auto view = [&](void* data, DType type) {
    return dense_array(data, type, {s.batch, s.heads, plain.tokens, s.dim});
  };
  cache.fetch(view(keys.data(), DType::f32), view(values.data(), DType::f32));
  ASSERT_EQ(compare_rows(plain.key_rows, keys), "");
  ASSERT_EQ(compare_rows(plain.value_rows, values), "");
  if (s.type == DType::f32) return;
  std::vector<std::uint16_t> key_bits(count);
  std::vector<std::uint16_t> value_bits(count);
  cache.fetch(view(key_bits.data(), s.type), view(value_bits.data(), s.type));
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_EQ(base::load_float(key_bits.data(), s.type, static_cast<std::int64_t>(i)), keys[i]);
    ASSERT_EQ(base::load_float(value_bits.data(), s.type, static_cast<std::int64_t>(i)), values[i]);
  }
}

void expect_state(const PlainCache& plain, const KVQuantKVCache& cache) {
  ASSERT_EQ(cache.offset(), plain.tokens);
  ASSERT_EQ(cache.outlier_count(), plain.outliers);
  ASSERT_EQ(cache.sink_kept(), plain.sink_kept);
  const Strided<const float> levels = cache.key_levels();
  ASSERT_EQ(levels.rank == 0, plain.key_levels.empty());
  std::size_t at = 0;
  for (const Block& own : plain.key_levels) {
    for (const float x : own.x) ASSERT_EQ(levels.data[at++], x);
  }
  const Strided<const float> threshold = cache.key_outlier_thresh();
  ASSERT_EQ(threshold.rank == 0, plain.threshold.empty());
  for (std::size_t c = 0; c < plain.threshold.size(); ++c) ASSERT_EQ(threshold.data[c], plain.threshold[c]);
  for (std::size_t i = 0; i < plain.value_levels.x.size(); ++i) {
    ASSERT_EQ(cache.value_levels().data[i], plain.value_levels.x[i]);
  }
}

// O1: relative error of attend against fp64 attention over the plain rows.
double attend_error(const Scene& s, const PlainCache& plain, const KVQuantKVCache& cache, std::mt19937& random) {
  const std::int64_t group = pick(random, {1, 2, 7});
  const std::int64_t rows = std::min<std::int64_t>(plain.tokens, pick(random, {1, 3}));
  ReferenceAttentionOptions options;
  options.causal = random() % 2 == 0;
  options.scale = random() % 2 == 0 ? 0.0F : 0.3F;
  options.threads = 1;
  const double scale = options.scale != 0 ? options.scale : 1.0 / std::sqrt(static_cast<double>(s.dim));
  const std::int64_t query_heads = s.heads * group;
  Floats queries(static_cast<std::size_t>(s.batch * query_heads * rows * s.dim));
  std::normal_distribution<float> normal;
  for (float& x : queries) x = normal(random);
  Floats out(queries.size());
  cache.attend(dense_array(queries.data(), DType::f32, {s.batch, query_heads, rows, s.dim}),
               dense_array(out.data(), DType::f32, {s.batch, query_heads, rows, s.dim}), options);
  double difference = 0;
  double norm = 0;
  for (std::int64_t q = 0; q < s.batch * query_heads * rows; ++q) {
    const std::int64_t head = q / rows / query_heads * s.heads + q / rows % query_heads / group;
    const Block& keys = plain.key_rows[static_cast<std::size_t>(head)];
    const Block& values = plain.value_rows[static_cast<std::size_t>(head)];
    const std::int64_t seen = options.causal ? plain.tokens - rows + q % rows + 1 : plain.tokens;
    std::vector<double> weights;
    for (std::int64_t t = 0; t < seen; ++t) {
      double dot = 0;
      for (std::int64_t c = 0; c < s.dim; ++c) {
        dot += static_cast<double>(queries[static_cast<std::size_t>(q * s.dim + c)]) * keys.at(t, c);
      }
      weights.push_back(dot * scale);
    }
    const double peak = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& w : weights) total += w = std::exp(w - peak);
    for (std::int64_t c = 0; c < s.dim; ++c) {
      double want = 0;
      for (std::int64_t t = 0; t < seen; ++t) want += weights[static_cast<std::size_t>(t)] / total * values.at(t, c);
      const double error = out[static_cast<std::size_t>(q * s.dim + c)] - want;
      difference += error * error;
      norm += want * want;
    }
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

void run_sequence(std::uint32_t seed) {
  std::mt19937 random(seed);
  const Scene s = random_scene(random);
  KVQuantKVCache cache(s.config);
  cache.set_threads(pick(random, {1, 2}));
  PlainCache plain(s.config, s.batch, s.heads, s.dim, s.type);
  const int steps = pick(random, {6, 12, 40});
  for (int step = 0; step < steps; ++step) {
    if (random() % 5 == 0) {
      const std::int64_t n = pick(random, {0, 1, 2, 7, 63, 64, 65, 1000});
      ASSERT_EQ(cache.trim(n), std::min<std::int64_t>(n, plain.tokens));
      plain.trim(n);
    } else {
      const std::int64_t rows = pick(random, {0, 1, 1, 1, 1, 2, 5, 9, 40, 64, 130});
      const std::vector<Block> keys = random_blocks(s, rows, random);
      const std::vector<Block> values = random_blocks(s, rows, random);
      cache.update(Packed(s, keys).array, Packed(s, values).array);
      plain.update(keys, values);
    }
    expect_state(plain, cache);
    if (::testing::Test::HasFatalFailure()) return;
    if (plain.tokens == 0) continue;
    expect_rows(s, plain, cache);
    if (::testing::Test::HasFatalFailure()) return;
    if (step % 4 == 0) {
      ASSERT_LT(attend_error(s, plain, cache, random), 2e-3);
    }
  }
}

TEST(KvquantRandom, SequencesAgainstAPlainList) {
  for (std::uint32_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    run_sequence(seed);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(KvquantRandom, RefusedCallsChangeNothing) {
  std::mt19937 random(3);
  Scene s;
  s.heads = 2;
  KVQuantKVCache cache(s.config);
  const std::vector<Block> keys = random_blocks(s, 20, random);
  const Packed good(s, keys);
  cache.update(good.array, good.array);
  const std::int64_t counter = cache.compressed_key_bytes();
  std::vector<Block> nan = keys;
  nan[1].at(7, 3) = std::numeric_limits<float>::quiet_NaN();
  std::vector<Block> infinite = keys;
  infinite[0].at(0, 0) = -std::numeric_limits<float>::infinity();
  Scene wide = s;
  wide.dim = 9;
  Scene other_type = s;
  other_type.type = DType::bf16;
  const auto expect_refused = [&](const Packed& k, const Packed& v, ErrorCode code) {
    try {
      cache.update(k.array, v.array);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
    EXPECT_EQ(cache.offset(), 20);
    EXPECT_EQ(cache.compressed_key_bytes(), counter);
  };
  expect_refused(Packed(s, nan), good, ErrorCode::not_finite);
  expect_refused(good, Packed(s, infinite), ErrorCode::not_finite);
  const Packed nine(wide, random_blocks(wide, 20, random));
  expect_refused(nine, nine, ErrorCode::invalid_argument);
  expect_refused(good, nine, ErrorCode::invalid_argument);
  const Packed bfloat(other_type, random_blocks(other_type, 20, random));
  expect_refused(bfloat, bfloat, ErrorCode::invalid_argument);
  EXPECT_THROW(cache.trim(-3), Error);
}

}  // namespace
}  // namespace kvant::kvquant
