// Images of the reference caches: they go on to the bit, and forged ones are refused or hold no trap.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <random>

#include "cache_data.hpp"
#include "kvant/error.hpp"

namespace kvant::testing {
namespace {

KVCacheConfig config_of(const std::string& method) {
  KVCacheConfig config;
  config.method = method;
  config.head_dim = 12;
  config.kvquant_refit_interval = 5;
  return config;
}

// Packed blocks, rows and a cut block; for KVQuant exact, closed and open runs.
std::unique_ptr<ReferenceCache> filled(const std::string& method, DType type, std::mt19937& random) {
  auto cache = make_cache(config_of(method));
  for (const int tokens : {70, 1, 1, 40}) {
    const Rows keys = random_rows(type, 2, 2, tokens, 12, random);
    const Rows values = random_rows(type, 2, 2, tokens, 12, random);
    cache->update(keys.array(), values.array());
  }
  cache->trim(7);
  return cache;
}

std::vector<std::byte> rows_of(const ReferenceCache& cache) {
  const ReferenceShape s = cache.shape();
  Rows keys(s.key_type, s.batch, s.heads, cache.offset(), s.key_dim);
  Rows values(s.value_type, s.batch, s.heads, cache.offset(), s.value_dim);
  cache.fetch(keys.array(), values.array());
  keys.bytes.insert(keys.bytes.end(), values.bytes.begin(), values.bytes.end());
  return keys.bytes;
}

void seal(std::vector<std::byte>& image) {
  const std::size_t body = image.size() - sizeof(std::uint64_t);
  const std::uint64_t sum = XXH64(image.data(), body, 0);
  std::memcpy(image.data() + body, &sum, sizeof sum);
}

ErrorCode code_of(const std::vector<std::byte>& image) {
  try {
    load_cache(image);
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "the image was loaded";
  return ErrorCode::invalid_argument;
}

class Image : public ::testing::TestWithParam<const char*> {};

TEST_P(Image, GoesOnToTheBit) {
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    std::mt19937 random(7);
    const auto cache = filled(GetParam(), type, random);
    const auto loaded = load_cache(cache->save());
    EXPECT_EQ(loaded->config().method, GetParam());
    EXPECT_EQ(rows_of(*loaded), rows_of(*cache));
    EXPECT_EQ(loaded->save(), cache->save());
    for (const int tokens : {1, 50, 1}) {
      const Rows keys = random_rows(type, 2, 2, tokens, 12, random);
      for (ReferenceCache* each : {cache.get(), loaded.get()}) {
        each->update(keys.array(), keys.array());
        each->trim(1);
      }
      EXPECT_EQ(rows_of(*loaded), rows_of(*cache));
    }
  }
}

TEST_P(Image, DamageIsBadFormat) {
  std::mt19937 random(8);
  const std::vector<std::byte> image = filled(GetParam(), DType::f16, random)->save();
  for (std::size_t i = 0; i < image.size(); i += 1 + image.size() / 97) {
    std::vector<std::byte> changed = image;
    changed[i] ^= std::byte{8};
    EXPECT_EQ(code_of(changed), ErrorCode::bad_format) << "byte " << i;
    EXPECT_EQ(code_of({image.begin(), image.begin() + static_cast<std::ptrdiff_t>(i)}), ErrorCode::bad_format);
  }
  std::vector<std::byte> longer = image;
  longer.insert(longer.end() - 8, std::byte{0});
  seal(longer);
  EXPECT_EQ(code_of(longer), ErrorCode::bad_format);
}

// Bytes changed under a right checksum: an error of the library, or a cache whose rows can be read without a fault.
TEST_P(Image, ForgedImagesHoldNoTrap) {
  std::mt19937 random(9);
  const std::vector<std::byte> image = filled(GetParam(), DType::f16, random)->save();
  int refused = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<std::byte> forged = image;
    const std::size_t first = random() % (forged.size() - sizeof(std::uint64_t));
    const std::size_t count = std::size_t{1} << random() % 4;
    for (std::size_t i = first; i < std::min(first + count, forged.size() - sizeof(std::uint64_t)); ++i) {
      forged[i] = static_cast<std::byte>(round % 3 == 0 ? 0xFF : random());
    }
    seal(forged);
    try {
      const auto cache = load_cache(forged);
      if (cache->is_empty()) continue;
      rows_of(*cache);
      const ReferenceShape s = cache->shape();
      const Rows queries = random_rows(DType::f32, s.batch, s.heads, 1, s.key_dim, random);
      Rows out(DType::f32, s.batch, s.heads, 1, s.value_dim);
      cache->attend(queries.array(), out.array());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 20);
}

INSTANTIATE_TEST_SUITE_P(Methods, Image, ::testing::Values("kitty", "kvquant", "zipcache"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvant::testing
