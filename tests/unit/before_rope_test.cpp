// Recipes with rope=before: pages hold keys as they were before the rotation, everything else sees them rotated.
#include <gtest/gtest.h>
#include <xxhash.h>

#include "support/model.hpp"
#include "support/rope.hpp"

namespace kvant {
namespace {

using testing::make_rows;
using testing::ropes;
using testing::Rows;

constexpr const char* kRecipe = "kvquant:k=4,v=4,rope=before,page=32,window=0,sink=3";

// Rows whose keys a host has rotated, at positions of its own.
struct Turned {
  Rows plain;
  Rows rows;
  std::vector<std::int64_t> positions;

  Turned(const RopeParameters& rope, const CacheShape& shape, std::vector<std::int64_t> at, std::uint32_t seed = 1)
      : plain(make_rows(shape, static_cast<std::int64_t>(at.size()), seed)), rows(plain), positions(std::move(at)) {
    rows.queries.clear();
    rows.keys = testing::rope_rows(rope, positions, shape.kv_heads, shape.key_dim, plain.keys);
  }
  void append_to(Cache& cache, std::int64_t first, std::int64_t count) const {
    cache.append(rows.key_view(first, count), rows.value_view(first, count), {},
                 std::span(positions).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
  }
};

// With a gap, a run that goes back, and every third one.
std::vector<std::int64_t> broken_positions(std::int64_t count) {
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < count; ++i) positions.push_back(i < 40 ? i : (i < 75 ? i + 1000 : 3 * i));
  return positions;
}

Cache filled(const char* recipe, const RopeParameters& rope, const Turned& data) {
  Cache cache(parse_recipe(recipe), data.rows.shape);
  cache.set_key_rotation(make_rotation(rope));
  data.append_to(cache, 0, data.rows.tokens);
  return cache;
}

// The keys of a sealed page as its block has them, before the rotation, [token][head][channel].
std::vector<float> stored_keys(const PageStore& store, std::int64_t page) {
  const CacheShape& shape = store.shape();
  const int tokens = store.recipe().page;
  std::vector<float> result(static_cast<std::size_t>(tokens * shape.kv_heads * shape.key_dim));
  std::vector<float> head(static_cast<std::size_t>(tokens * shape.key_dim));
  for (int h = 0; h < shape.kv_heads; ++h) {
    cache::decode_keys(store.layout(), shape.dtype, store.sealed_block(page).data(), h, {}, head.data());
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < shape.key_dim; ++d) {
        result[static_cast<std::size_t>((t * shape.kv_heads + h) * shape.key_dim + d)] =
            head[static_cast<std::size_t>(d * tokens + t)];
      }
    }
  }
  return result;
}

double distance(const std::vector<float>& a, const std::vector<float>& b, std::size_t first, std::size_t count) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

// Channels that are constant before the rotation cost nothing, whatever the positions; after it they would.
TEST(BeforeRope, PagesHoldTheKeysBeforeTheRotation) {
  for (const auto& [name, rope] : ropes()) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      const CacheShape shape{2, 26, 16, dtype};
      Turned data(rope, shape, broken_positions(128));
      for (std::size_t i = 0; i < data.plain.keys.size(); ++i) data.plain.keys[i] = data.plain.keys[i % 52];
      data.rows.keys = testing::rope_rows(rope, data.positions, 2, 26, data.plain.keys);
      const Cache cache = filled("kvquant:k=2,v=2,outliers=0,rope=before,page=32,window=0,sink=0", rope, data);
      ASSERT_EQ(cache.counts().sealed_pages, 4);
      const double precision = dtype == DType::f32 ? 1e-6 : (dtype == DType::f16 ? 1e-3 : 8e-3);
      for (std::int64_t page = 0; page < 4; ++page) {
        const auto keys = stored_keys(cache.store(), page);
        EXPECT_LT(distance(keys, data.plain.keys, 0, keys.size()), precision) << name << " " << name_of(dtype);
      }
      const auto keys = testing::read_all(cache.store(), Side::key, 128);
      EXPECT_LT(distance(keys, data.rows.keys, 0, keys.size()), precision) << name << " " << name_of(dtype);
      const Cache after = testing::filled("kvquant:k=2,v=2,outliers=0,page=32,window=0,sink=0", data.rows);
      EXPECT_GT(distance(testing::read_all(after.store(), Side::key, 128), data.rows.keys, 0, keys.size()), 0.05);
    }
  }
}

class BeforeRopeSets : public ::testing::TestWithParam<tiles::Kernels> {};
INSTANTIATE_TEST_SUITE_P(Sets, BeforeRopeSets, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

// O1: attention in double over what the blocks hold, rotated by the test's own RoPE.
TEST_P(BeforeRopeSets, AttentionIsThatOfTheRotatedKeys) {
  const testing::ForcedKernel forced(GetParam().name);
  for (const char* recipe :
       {"kvquant:k=2,v=4,rope=before,page=32,window=0,sink=3",
        "kvquant:k=3,v=3,rope=before,outliers=0.1,page=64,window=0,sink=0",
        "kvquant:k=4,v=4,rope=before,outliers=0,window=16,sink=1", "k=kvquant:4,v=kivi:4,rope=before,page=128,window=0",
        "k=kvquant:4,v=zipcache,saliency=norm,rope=before,page=32,window=0,sink=2"}) {
    for (const auto& [name, rope] : ropes()) {
      for (const bool broken : {false, true}) {
        const CacheShape shape{2, 26, 20, DType::f16};
        const std::int64_t tokens = 200;
        const Turned data(rope, shape, broken ? broken_positions(tokens) : testing::cell_numbers(0, tokens));
        const Cache cache = filled(recipe, rope, data);
        const int page = cache.recipe().page;
        ASSERT_GT(cache.counts().sealed_pages, 0);
        auto keys = testing::read_all(cache.store(), Side::key, tokens);
        for (std::int64_t number = 0; (number + 1) * page <= tokens; ++number) {
          if (!cache.store().is_sealed(number)) continue;
          const std::int64_t first = std::max<std::int64_t>(number * page, cache.recipe().sink);
          const auto at =
              std::vector(data.positions.begin() + number * page, data.positions.begin() + (number + 1) * page);
          const auto turned = testing::rope_rows(rope, at, 2, 26, stored_keys(cache.store(), number));
          std::copy(turned.begin() + (first - number * page) * 52, turned.end(), keys.begin() + first * 52);
        }
        for (const std::int64_t rows : {1, 7, 60}) {
          const auto queries = testing::random_queries(rows, 6, 26);
          const auto got = testing::attend(cache, queries, rows, 6);
          const auto want =
              testing::attend_fp64(shape, 3, tokens, rows, keys, testing::read_all(cache.store(), Side::value, tokens),
                                   queries, 1 / std::sqrt(26.0), 0, testing::causal_bias(6, tokens, rows, 0));
          EXPECT_LT(testing::relative_error(got.out, want.out), testing::kTolerance)
              << recipe << " " << name << " " << broken << " " << rows;
          for (std::size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(got.lse[i], want.lse[i], 5e-3) << recipe << name;
        }
      }
    }
  }
}

// A list of tokens: what a cache must give back, sealed or not, after any operation.
struct Model {
  RopeParameters rope;
  CacheShape shape;
  std::vector<float> keys, values;
  std::int64_t tokens() const { return static_cast<std::int64_t>(keys.size()) / (shape.kv_heads * shape.key_dim); }

  void check(const Cache& cache) const {
    ASSERT_EQ(cache.length(), tokens());
    const auto got = testing::read_all(cache.store(), Side::key, tokens());
    const auto width = static_cast<std::size_t>(shape.kv_heads * shape.key_dim);
    for (std::int64_t t = 0; t < tokens(); ++t) {
      const std::size_t first = static_cast<std::size_t>(t) * width;
      const bool exact = t < cache.recipe().sink;
      // 4 bits of a channel's range, once more for each time a page was reopened; a wrong angle is an error of 1.
      ASSERT_LT(distance(got, keys, first, width), exact ? 1e-3 : 0.25) << t;
    }
  }
};

TEST(BeforeRope, RandomHistoriesKeepEveryTokenWhereItWas) {
  std::mt19937 generator(11);
  for (const auto& [name, rope] : ropes()) {
    const CacheShape shape{2, 24, 12, DType::f16};
    std::vector<Cache> caches;
    std::vector<Model> models;
    caches.emplace_back(parse_recipe(kRecipe), shape);
    caches.back().set_key_rotation(make_rotation(rope));
    models.push_back({rope, shape, {}, {}});
    std::int64_t next = 0;
    for (int step = 0; step < 60; ++step) {
      const std::size_t i = generator() % caches.size();
      const int kind = static_cast<int>(generator() % 8);
      if (kind < 4) {
        const auto count = static_cast<std::int64_t>(generator() % 50);
        std::vector<std::int64_t> positions;
        next += static_cast<std::int64_t>(generator() % 3) * 100;
        for (std::int64_t t = 0; t < count; ++t) positions.push_back(caches[i].length() + t < 3 ? t : 3 + next++);
        const Turned data(rope, shape, positions, static_cast<std::uint32_t>(generator()));
        data.append_to(caches[i], 0, count);
        models[i].keys.insert(models[i].keys.end(), data.rows.keys.begin(), data.rows.keys.end());
      } else if (kind == 4) {
        const auto count = static_cast<std::int64_t>(generator() % static_cast<unsigned>(caches[i].length() + 1));
        caches[i].trim(std::min<std::int64_t>(count, 20));
        models[i].keys.resize(static_cast<std::size_t>(caches[i].length() * 48));
      } else if (kind == 5 && caches.size() < 4) {
        caches.push_back(caches[i].fork());
        models.push_back(models[i]);
      } else if (kind == 6) {
        const std::vector<std::int64_t> indices = {static_cast<std::int64_t>(i), 0};
        caches = gather(caches, indices);
        models = {models[i], models[0]};
      } else {
        const auto image = caches[i].save();
        caches[i] = Cache::load(image);
        EXPECT_TRUE(caches[i].save() == image);
      }
      for (std::size_t k = 0; k < caches.size(); ++k) models[k].check(caches[k]);
      if (HasFatalFailure()) FAIL() << name << " step " << step << " kind " << kind;
    }
  }
}

// What is stored does not depend on how tokens arrived.
TEST(BeforeRope, ChunksChangeNothing) {
  const auto [name, rope] = ropes()[1];
  const Turned data(rope, {2, 24, 16, DType::f16}, broken_positions(150));
  const Cache whole = filled(kRecipe, rope, data);
  Cache parts(parse_recipe(kRecipe), data.rows.shape);
  parts.set_key_rotation(make_rotation(rope));
  for (std::int64_t first = 0; first < 150; first += 7)
    data.append_to(parts, first, std::min<std::int64_t>(7, 150 - first));
  EXPECT_TRUE(whole.save() == parts.save());
}

// A context shift: codes stay, positions and open rows move; copies of the store keep their own.
TEST(BeforeRope, ShiftsMovePositionsAndKeepCodes) {
  for (const auto& [name, rope] : ropes()) {
    const CacheShape shape{2, 24, 16, DType::f16};
    const Turned data(rope, shape, testing::cell_numbers(0, 80));
    PageStore store(parse_recipe(kRecipe), shape, 96);
    store.set_key_rotation(make_rotation(rope));
    testing::write_cells(store, data.rows, testing::cell_numbers(0, 80));
    store.seal_ready();
    ASSERT_TRUE(store.is_sealed(0) && store.is_sealed(1));
    const PageStore copy(store);
    const std::string before = testing::dump(copy);
    const auto block = store.sealed_block(1);
    const std::vector<std::byte> codes(block.begin(), block.end());
    const auto was = testing::read_all(store, Side::key, 96);

    std::vector<std::int64_t> cells = testing::cell_numbers(3, 93);
    std::vector<std::int64_t> distances(cells.size(), -7);
    distances[60] = 0;
    store.shift_keys(cells, distances);
    ASSERT_TRUE(store.is_sealed(0) && store.is_sealed(1)) << "sinks did not move";
    EXPECT_TRUE(std::equal(codes.begin(), codes.end(), store.sealed_block(1).begin()));
    const auto now = testing::read_all(store, Side::key, 96);
    RopeParameters still = rope;  // the magnitude is in the rows already
    still.attention /= make_rotation(rope).magnitude / rope.attention;
    still.attention /= rope.attention;
    std::vector<std::int64_t> by(96, 0);
    for (std::int64_t cell = 3; cell < 80; ++cell) by[static_cast<std::size_t>(cell)] = cell == 63 ? 0 : -7;
    auto want = testing::rope_rows(still, by, 2, 24, was);
    for (std::int64_t cell = 0; cell < 80; ++cell) {
      ASSERT_LT(distance(now, want, static_cast<std::size_t>(cell * 48), 48), 1e-3) << name << " " << cell;
    }
    EXPECT_EQ(testing::dump(copy), before);

    // Sinks that move are reopened, and sealed as ordinary tokens.
    store.shift_keys(testing::cell_numbers(0, 3), std::vector<std::int64_t>(3, 50));
    EXPECT_FALSE(store.is_sealed(0));
    store.seal_ready();
    ASSERT_TRUE(store.is_sealed(0));
    EXPECT_EQ(store.bytes().exact, 0U);
    by.assign(96, 50);
    want = testing::rope_rows(still, by, 2, 24, was);
    for (std::size_t cell = 0; cell < 3; ++cell)
      EXPECT_LT(distance(testing::read_all(store, Side::key, 96), want, cell * 48, 48), 0.25);
  }
}

// Cells copied between stores take their positions along, as whole pages and in part.
TEST(BeforeRope, CopiedCellsKeepTheirPositions) {
  const auto [name, rope] = ropes()[0];
  const CacheShape shape{2, 24, 16, DType::f16};
  const Turned data(rope, shape, broken_positions(96));
  PageStore store(parse_recipe(kRecipe), shape, 96);
  store.set_key_rotation(make_rotation(rope));
  const auto cells = testing::cell_numbers(0, 96);
  store.write(Side::key, cells, data.rows.key_view(0, 96), data.positions);
  store.write(Side::value, cells, data.rows.value_view(0, 96), data.positions);
  store.seal_ready();
  PageStore copy(store.recipe(), shape, 96);
  copy.copy_cells(store, 0, 0, 64);
  copy.copy_cells(store, 70, 64, 20);
  EXPECT_TRUE(copy.is_sealed(0) && copy.is_sealed(1));
  copy.copy_cells(store, 64, 84, 12);
  copy.seal_ready();
  ASSERT_TRUE(copy.is_sealed(2));
  // Turned back by the positions that they came with.
  const std::vector<float> stored = stored_keys(copy, 2);
  const std::vector<float> plain(data.plain.keys.begin() + 70 * 48, data.plain.keys.begin() + 90 * 48);
  EXPECT_LT(distance(stored, plain, 0, plain.size()), 0.25);
  const auto from = testing::read_all(store, Side::key, 96);
  const auto to = testing::read_all(copy, Side::key, 96);
  EXPECT_TRUE(std::equal(from.begin(), from.begin() + 64 * 48, to.begin()));
  for (std::size_t cell = 64; cell < 84; ++cell) {
    const std::vector<float> row(from.begin() + static_cast<std::ptrdiff_t>(cell + 6) * 48,
                                 from.begin() + static_cast<std::ptrdiff_t>(cell + 7) * 48);
    EXPECT_LT(distance({to.begin() + static_cast<std::ptrdiff_t>(cell) * 48,
                        to.begin() + static_cast<std::ptrdiff_t>(cell + 1) * 48},
                       row, 0, 48),
              0.25)
        << cell;
  }
  PageStore other(store.recipe(), shape, 96);
  other.set_key_rotation(make_rotation(ropes()[1].parameters));
  testing::expect_error(ErrorCode::invalid_argument, {"rotation"}, [&] { other.copy_cells(store, 0, 0, 96); });
}

// Keys near the type's limit that the rotation had made small: turned back, both products of a channel are infinite.
TEST(BeforeRope, KeysBeyondTheTypesRangeEndAtItsLimit) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    const CacheShape shape{2, 32, 32, type};
    const Turned data(ropes()[0].parameters, shape, testing::cell_numbers(0, 70));
    const float large = type == DType::f16 ? 6e4F : 1.6e38F;
    std::vector<float> keys(data.rows.keys);
    for (float& key : keys) key = std::copysign(large, key);
    const std::vector<float> values(keys.size(), 1.0F);
    KeyRotation rotation = make_rotation(ropes()[0].parameters);
    rotation.magnitude = 1.0 / 1024;
    Cache cache(parse_recipe(kRecipe), shape);
    cache.set_key_rotation(rotation);
    cache.append(dense_view(std::as_const(keys).data(), DType::f32, 70, 2, 32),
                 dense_view(values.data(), DType::f32, 70, 2, 32));
    ASSERT_EQ(cache.counts().sealed_pages, 2);
    for (const float key : stored_keys(cache.store(), 0)) EXPECT_TRUE(std::isfinite(key));
    const std::vector<float> queries(static_cast<std::size_t>(4 * 32), 0.01F);
    std::vector<float> out(queries.size());
    cache.attend(dense_view(queries.data(), DType::f32, 1, 4, 32), dense_view(out.data(), DType::f32, 1, 4, 32));
    for (const float output : out) EXPECT_NEAR(output, 1, 1e-3);
  }
}

TEST(BeforeRope, MistakesAreNamedAndChangeNothing) {
  const auto [name, rope] = ropes()[0];
  const CacheShape shape{2, 24, 16, DType::f16};
  const Turned data(rope, shape, testing::cell_numbers(0, 64));
  Cache cache(parse_recipe(kRecipe), shape);
  ASSERT_TRUE(cache.store().needs_rotation());
  const auto append = [&](std::vector<std::int64_t> positions) {
    cache.append(data.rows.key_view(0, 64), data.rows.value_view(0, 64), {}, positions);
  };
  testing::expect_error(ErrorCode::invalid_argument, {"rope=before", "set_key_rotation"}, [&] { append({}); });
  EXPECT_EQ(cache.length(), 0);
  const auto refused = [&](const KeyRotation& rotation, const char* part) {
    testing::expect_error(ErrorCode::invalid_argument, {"key rotation", part},
                          [&] { cache.set_key_rotation(rotation); });
  };
  refused({RotaryPairs::halves, {}, 1}, "1 to 12");
  refused({RotaryPairs::halves, std::vector<double>(13, 1.0), 1}, "1 to 12");
  refused({RotaryPairs::halves, {1, INFINITY}, 1}, "frequency is inf");
  refused({RotaryPairs::halves, {1}, 0}, "magnitude");
  cache.set_key_rotation(make_rotation(rope));
  testing::expect_error(ErrorCode::invalid_argument, {"positions", "3", "64"}, [&] { append({1, 2, 3}); });
  std::vector<std::int64_t> far = data.positions;
  far[63] = std::int64_t{1} << 31;
  testing::expect_error(ErrorCode::out_of_range, {"position", "2147483648"}, [&] { append(far); });
  EXPECT_EQ(cache.length(), 0);
  append({});
  const auto image = cache.save();
  cache.set_key_rotation(make_rotation(rope));  // the same again
  refused(make_rotation(ropes()[1].parameters), "not that of the keys");
  EXPECT_TRUE(cache.save() == image);

  PageStore store = cache.store();
  const std::string before = testing::dump(store);
  const std::vector<std::int64_t> cells = {5, 6};
  testing::expect_error(ErrorCode::invalid_argument, {"distances"},
                        [&] { store.shift_keys(cells, std::vector<std::int64_t>{1}); });
  testing::expect_error(ErrorCode::out_of_range, {"position"}, [&] {
    store.shift_keys(cells, std::vector<std::int64_t>{1, 0x7FFFFFFF});
  });
  testing::expect_error(ErrorCode::out_of_range, {"cell 64"}, [&] {
    store.shift_keys(std::vector<std::int64_t>{5, 64}, std::vector<std::int64_t>{1, 1});
  });
  EXPECT_EQ(testing::dump(store), before);
  PageStore after(parse_recipe("kvquant"), shape, 64);
  EXPECT_FALSE(after.needs_rotation());
  after.set_key_rotation({});  // of no interest to it
  testing::expect_error(ErrorCode::invalid_argument, {"rope=before"}, [&] { after.shift_keys({}, {}); });
}

TEST(BeforeRope, ForgedImagesAreRefused) {
  const auto [name, rope] = ropes()[0];
  const Turned data(rope, {2, 24, 16, DType::f16}, testing::cell_numbers(0, 40));
  const std::vector<std::byte> image = filled(kRecipe, rope, data).save();
  EXPECT_EQ(std::to_integer<int>(image[8]), 3);
  const std::size_t text = 12 + 4 + to_text(parse_recipe(kRecipe)).size();
  const std::size_t rotation = text + 3 * 4 + 1 + 8;
  const auto forged = [&](std::size_t at, std::vector<std::uint8_t> bytes, const char* part) {
    std::vector<std::byte> copy = image;
    std::memcpy(copy.data() + at, bytes.data(), bytes.size());
    const std::uint64_t checksum = XXH64(copy.data(), copy.size() - 8, 0);
    std::memcpy(copy.data() + copy.size() - 8, &checksum, sizeof checksum);
    testing::expect_error(ErrorCode::bad_format, {part}, [&] { Cache::load(copy); });
  };
  forged(8, {2}, "version 3");
  forged(rotation, {0}, "no rotation");
  forged(rotation + 1, {2}, "kind");
  forged(rotation + 2, {0, 0, 0, 0, 0, 0, 0, 0}, "magnitude");
  forged(rotation + 10, {200, 0, 0, 0}, "too many pairs");
  forged(rotation + 10, {0, 0, 0, 0}, "pairs");
  forged(rotation + 14, {0, 0, 0, 0, 0, 0, 0xF0, 0x7F}, "frequency");
  for (std::size_t length = 0; length < image.size(); length += 13) {
    testing::expect_error(ErrorCode::bad_format, {}, [&] { Cache::load(std::span(image).first(length)); });
  }
  const Cache empty(parse_recipe(kRecipe), data.rows.shape);
  EXPECT_EQ(Cache::load(empty.save()).length(), 0);
}

// README.md of the method: 32 bits per token more.
TEST(BeforeRope, PositionsAreInTheBits) {
  const CacheShape shape{3, 64, 64, DType::f16};
  const PageLayout after = make_layout(parse_recipe("kvquant"), shape);
  const PageLayout before = make_layout(parse_recipe("kvquant:rope=before"), shape);
  EXPECT_EQ(before.page_bytes, after.page_bytes);
  EXPECT_NEAR(before.bits_per_value - after.bits_per_value, 32.0 / (3 * 128), 1e-12);
}

}  // namespace
}  // namespace kvant
