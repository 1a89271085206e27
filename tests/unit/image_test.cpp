// Cache images: the stored golden image loads, and every damage is refused with bad_format.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "support/oracle.hpp"

namespace kvant {
namespace {

// Whole numbers, so that the image does not depend on any library's random generator.
Cache small_cache(const std::string& recipe, std::int64_t tokens) {
  const CacheShape shape{1, 4, 4, DType::f16};
  Cache cache(parse_recipe(recipe), shape);
  std::vector<float> keys(static_cast<std::size_t>(tokens * 4));
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<float>((i * i * 7 + i * 3) % 61) - 30.0F;
  const ConstView view = dense_view(keys.data(), DType::f32, tokens, 1, 4);
  cache.append(view, view);
  return cache;
}

ErrorCode load_error(std::vector<std::byte> image) {
  try {
    Cache::load(image);
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "a damaged image was loaded";
  return ErrorCode::invalid_argument;
}

// A forged checksum: damage must be found by the reader itself, not only by the checksum.
std::vector<std::byte> reseal(std::vector<std::byte> image) {
  const std::size_t body = image.size() - sizeof(std::uint64_t);
  const std::uint64_t checksum = XXH64(image.data(), body, 0);
  std::memcpy(image.data() + body, &checksum, sizeof checksum);
  return image;
}

const char* const kRecipe = "kitty:page=32,window=0,sink=2,boost=0.5";

TEST(Image, GoldenOfVersionOneLoads) {
  std::ifstream file(std::string(KVANT_TEST_DATA) + "/cache-v1.kvant", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  const Cache loaded = Cache::load({data, bytes.size()});
  EXPECT_EQ(loaded.length(), 70);
  EXPECT_EQ(loaded.counts().sealed_pages, 2);
  // Version 1 kept boosted channels as a list; what is loaded is what this build stores for the same tokens.
  EXPECT_TRUE(loaded.save() == small_cache(kRecipe, 70).save());
}

TEST(Image, GoldenOfVersionTwoIsWhatThisBuildWrites) {
  std::ifstream file(std::string(KVANT_TEST_DATA) + "/cache-v2.kvant", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::vector<std::byte> written = small_cache(kRecipe, 70).save();
  ASSERT_EQ(written.size(), bytes.size()) << "this build writes other bytes: a new version is due";
  EXPECT_EQ(std::memcmp(written.data(), bytes.data(), bytes.size()), 0);
  EXPECT_TRUE(Cache::load(written).save() == written);
}

TEST(Image, EveryTruncationIsRefused) {
  const std::vector<std::byte> image = small_cache(kRecipe, 70).save();
  for (std::size_t size = 0; size < image.size(); ++size) {
    EXPECT_EQ(load_error({image.begin(), image.begin() + static_cast<std::ptrdiff_t>(size)}), ErrorCode::bad_format);
    if (size > 16) {
      EXPECT_EQ(load_error(reseal({image.begin(), image.begin() + static_cast<std::ptrdiff_t>(size)})),
                ErrorCode::bad_format);
    }
  }
  std::vector<std::byte> longer = image;
  longer.push_back(std::byte{0});
  EXPECT_EQ(load_error(reseal(longer)), ErrorCode::bad_format);
}

TEST(Image, EveryFlippedByteIsRefused) {
  const std::vector<std::byte> image = small_cache(kRecipe, 70).save();
  for (std::size_t at = 0; at < image.size(); ++at) {
    std::vector<std::byte> damaged = image;
    damaged[at] ^= std::byte{0x41};
    EXPECT_EQ(load_error(damaged), ErrorCode::bad_format) << at;
  }
}

// With a valid checksum damaged content may be another valid cache; it must never crash, and what loads can be attended
// to (its numbers may be as large as the type allows).
TEST(Image, ForgedImagesAreRefusedOrUsable) {
  const std::vector<std::byte> image = small_cache(kRecipe, 70).save();
  std::mt19937 generator(7);
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::byte> damaged = image;
    for (int n = 0; n < 1 + round % 3; ++n)
      damaged[generator() % (damaged.size() - 8)] = static_cast<std::byte>(generator());
    try {
      Cache cache = Cache::load(reseal(damaged));
      std::vector<float> out(4);
      if (cache.length() == 0 || cache.shape().kv_heads != 1 || cache.shape().key_dim != 4 ||
          cache.shape().value_dim != 4)
        continue;
      cache.attend(dense_view(out.data(), DType::f32, 1, 1, 4), dense_view(out.data(), DType::f32, 1, 1, 4));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::bad_format);
      ++refused;
    }
  }
  EXPECT_GT(refused, 100);
}

// A channel that is stored twice would be decoded twice, another not at all.
TEST(Image, OrdersMustBePermutationsThatAscendWithinAWidth) {
  const Cache cache = small_cache(kRecipe, 70);
  const std::vector<std::byte> image = cache.save();
  const auto block = cache.store().sealed_block(0);
  const auto found = std::search(image.begin(), image.end(), block.begin(), block.end());
  ASSERT_NE(found, image.end());
  const TileLayout& tile = cache.store().layout().key;
  ASSERT_EQ(tile.order_entry, 1);
  ASSERT_EQ(tile.planes.at(1).depth, 2);  // two channels of four bits, then two of two
  const auto at = static_cast<std::size_t>(found - image.begin()) + tile.order_offset;
  using Order = std::array<std::uint8_t, 4>;
  for (const Order order : {Order{0, 1, 2, 2}, {1, 0, 2, 3}, {0, 1, 3, 2}, {0, 1, 2, 4}, {255, 1, 2, 3}}) {
    std::vector<std::byte> forged = image;
    std::memcpy(forged.data() + at, order.data(), sizeof order);
    EXPECT_EQ(load_error(reseal(forged)), ErrorCode::bad_format) << +order[0] << +order[1] << +order[2] << +order[3];
  }
  std::vector<std::byte> other = image;  // another valid order is another cache
  const Order swapped = {2, 3, 0, 1};
  std::memcpy(other.data() + at, swapped.data(), sizeof swapped);
  EXPECT_EQ(Cache::load(reseal(other)).length(), 70);
}

// What write refuses cannot come in through an image either.
TEST(Image, ValuesBeyondTheTypesLimitAreRefused) {
  Cache cache(parse_recipe("kivi"), {1, 4, 4, DType::f32});
  const std::vector<float> row = {1.0F, 2.0F, 3.0F, 12345.0F};
  cache.append(dense_view(row.data(), DType::f32, 1, 1, 4), dense_view(row.data(), DType::f32, 1, 1, 4));
  const std::vector<std::byte> image = cache.save();
  const auto* marker = reinterpret_cast<const std::byte*>(row.data() + 3);
  const auto found = std::search(image.begin(), image.end(), marker, marker + sizeof(float));
  ASSERT_NE(found, image.end());
  for (const float bad : {3e38F, -2e38F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<std::byte> forged = image;
    std::memcpy(forged.data() + (found - image.begin()), &bad, sizeof bad);
    EXPECT_EQ(load_error(reseal(forged)), ErrorCode::bad_format) << bad;
  }
}

TEST(Faults, D51_SizesAroundAPageSaveAndLoad) {
  for (const char* recipe : {"f16", "kivi:page=32,k=3,v=5,window=0", kRecipe}) {
    for (const std::int64_t tokens : {0, 1, 31, 32, 33, 64, 65}) {
      const Cache cache = small_cache(recipe, tokens);
      const std::vector<std::byte> image = cache.save();
      const Cache loaded = Cache::load(image);
      EXPECT_EQ(loaded.length(), tokens);
      EXPECT_TRUE(loaded.save() == image) << recipe << " " << tokens;
      EXPECT_EQ(loaded.bytes().sealed, cache.bytes().sealed);
      EXPECT_EQ(loaded.bytes().exact, cache.bytes().exact);
    }
  }
}

}  // namespace
}  // namespace kvant
