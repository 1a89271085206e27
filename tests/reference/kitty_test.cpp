// Kitty in the reference's form: every golden case, to the bit.
#include "kvant/kitty.hpp"

#include <gtest/gtest.h>

#include "kvant/error.hpp"
#include "reference/cache_cases.hpp"
#include "reference/golden.hpp"

namespace kvant::kitty {
namespace {

using golden::Buffer;
using golden::Case;
using golden::cases_of;
using golden::Json;
using golden::Tensor;

void expect_equal(const Case& c, const Json& want, const void* got) {
  EXPECT_EQ(golden::difference(c.tensor_of(want), got, want.at("compare")), "") << c.id();
}

TEST(KittyGolden, RankChannels) {
  for (const Case& c : cases_of("function", "kitty.rank_channels_by_sensitivity")) {
    if (c.json.value("note", "") == "NaN variance") {  // decided: refused, Python's order of NaN is an accident
      EXPECT_THROW(rank_channels_by_sensitivity(c.arg_tensor("keys").array(), 0.5), Error) << c.id();
      continue;
    }
    const ChannelRanks ranks = rank_channels_by_sensitivity(c.arg_tensor("keys").array(), c.number("hi_fraction"));
    EXPECT_EQ(Json(ranks.hi), c.json.at("returns")[0].at("value")) << c.id();
    EXPECT_EQ(Json(ranks.lo), c.json.at("returns")[1].at("value")) << c.id();
  }
  for (const Case& c : cases_of("error", "kitty.rank_channels_by_sensitivity")) {
    EXPECT_THROW(rank_channels_by_sensitivity(c.arg_tensor("keys").array(), c.number("hi_fraction")), Error) << c.id();
  }
}

Buffer quantize_mixed(const Case& c) {
  const Tensor& keys = c.arg_tensor("keys");
  Buffer out(DType::f16, keys.shape);
  quantize_mixed_channels(keys.array(), c.args().at("hi_indices").get<std::vector<std::int64_t>>(),
                          c.args().at("lo_indices").get<std::vector<std::int64_t>>(), out.array(),
                          static_cast<int>(c.integer("hi_bit")), static_cast<int>(c.integer("lo_bit")),
                          c.integer("group_size"));
  return out;
}

TEST(KittyGolden, QuantizeMixedChannels) {
  for (const Case& c : cases_of("function", "kitty.quantize_mixed_channels")) {
    expect_equal(c, c.json.at("returns")[0], quantize_mixed(c).bytes.data());
  }
  for (const Case& c : cases_of("error", "kitty.quantize_mixed_channels")) {
    EXPECT_THROW(quantize_mixed(c), Error) << c.id();
  }
}

TEST(KittyGolden, RunningVariance) {
  for (const Case& c : cases_of("function", "kitty.compute_running_variance")) {
    const Tensor& sum = c.arg_tensor("key_sum");
    Buffer out(DType::f32, sum.shape);
    compute_running_variance(sum.array(), c.arg_tensor("key_sq_sum").array(), c.integer("n"), out.array());
    expect_equal(c, c.json.at("returns")[0], out.bytes.data());
  }
}

TEST(KittyGolden, HiMask) {
  for (const Case& c : cases_of("function", "kitty.hi_mask_from_variance_batched")) {
    const Tensor& variance = c.arg_tensor("variance");
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(variance.size()));
    hi_mask_from_variance_batched(variance.array(), c.number("hi_fraction"),
                                  dense_grid(mask.data(), {variance.extent(0), variance.extent(1)}));
    expect_equal(c, c.json.at("returns")[0], mask.data());
  }
}

TEST(KittyGolden, QuantizeMixedChannelsBatched) {
  for (const Case& c : cases_of("function", "kitty.quantize_mixed_channels_batched")) {
    const Tensor& keys = c.arg_tensor("keys");
    const Tensor& mask = c.arg_tensor("hi_mask");
    Buffer out(DType::f16, keys.shape);
    quantize_mixed_channels_batched(keys.array(), dense_grid(mask.u8(), {mask.extent(0), mask.extent(1)}), out.array(),
                                    static_cast<int>(c.integer("hi_bit")), static_cast<int>(c.integer("lo_bit")),
                                    c.integer("group_size"));
    expect_equal(c, c.json.at("returns")[0], out.bytes.data());
  }
}

Json property(const KittyKVCache& cache, const std::string& name) {
  if (name == "compressed_key_bytes") return cache.compressed_key_bytes();
  if (name == "fp16_key_bytes") return cache.fp16_key_bytes();
  if (name == "value_fp16_bytes") return cache.value_fp16_bytes();
  if (name == "assigned_avg_bits") return cache.assigned_avg_bits();
  if (name == "hi_fraction") return cache.hi_fraction();
  if (name == "hi_bit") return cache.hi_bit();
  if (name == "lo_bit") return cache.lo_bit();
  if (name == "group_size") return cache.group_size();
  return "no such property";
}

std::string check_vector(const Case& c, const char* name, const Json& want, const std::vector<float>& got) {
  if (want.is_null()) return got.empty() ? "" : std::string(name) + " exists";
  const Tensor& tensor = c.tensor_of(want);
  if (static_cast<std::int64_t>(got.size()) != tensor.size()) return std::string(name) + " has another size";
  const std::string error = golden::difference(tensor, got.data(), want.at("compare"));
  return error.empty() ? "" : std::string(name) + ": " + error;
}

std::string run(const Case& c) {
  KittyKVCache cache(golden::config_of(c));
  const auto after = [&](const Json& step) -> std::string {
    const Json& internal = step.at("internal");
    if (cache.n_keys() != internal.at("_n_keys")) return "n_keys is " + std::to_string(cache.n_keys());
    const std::string error = check_vector(c, "key_sum", internal.value("_key_sum", Json()), cache.key_sum());
    if (!error.empty()) return error;
    return check_vector(c, "key_sq_sum", internal.value("_key_sq_sum", Json()), cache.key_sq_sum());
  };
  return golden::run_cache_case(
      c, cache, [&](const std::string& name) { return property(cache, name); }, after);
}

TEST(KittyGolden, Cache) {
  golden::expect_histories("KittyKVCache", run);
}

TEST(KittyGolden, Construction) {
  golden::expect_refused_configs("KittyKVCache", [](const KVCacheConfig& config) { KittyKVCache cache(config); });
}

}  // namespace
}  // namespace kvant::kitty
