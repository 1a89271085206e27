// ZipCache in the reference's form: every golden case, to the bit.
#include "kvant/zipcache.hpp"

#include <gtest/gtest.h>

#include "kvant/error.hpp"
#include "reference/cache_cases.hpp"
#include "reference/golden.hpp"

namespace kvant::zipcache {
namespace {

using golden::Buffer;
using golden::Case;
using golden::cases_of;
using golden::Json;
using golden::Tensor;

void expect_equal(const Case& c, const Json& want, const void* got, std::size_t count) {
  EXPECT_EQ(c.tensor_of(want).size(), static_cast<std::int64_t>(count)) << c.id();
  EXPECT_EQ(golden::difference(c.tensor_of(want), got, want.at("compare")), "") << c.id();
}
template <typename T>
void expect_equal(const Case& c, const Json& want, const std::vector<T>& got) {
  expect_equal(c, want, got.data(), got.size());
}

int width(const Case& c, const char* name) {
  return static_cast<int>(c.integer(name));
}

TEST(ZipCacheGolden, Norms) {
  for (const Case& c : cases_of("function", "zipcache.token_key_norms")) {
    expect_equal(c, c.json.at("returns")[0], token_key_norms(c.arg_tensor("keys").array()));
  }
}

TEST(ZipCacheGolden, SaliencyMask) {
  for (const Case& c : cases_of("function", "zipcache.saliency_mask")) {
    expect_equal(c, c.json.at("returns")[0], saliency_mask(c.arg_tensor("norms").array(), c.number("hi_fraction")));
  }
  for (const Case& c : cases_of("error", "zipcache.saliency_mask")) {
    EXPECT_THROW(saliency_mask(c.arg_tensor("norms").array(), c.number("hi_fraction")), Error) << c.id();
  }
}

TEST(ZipCacheGolden, ChannelQuant) {
  for (const Case& c : cases_of("function", "zipcache.channel_quant")) {
    if (c.integer("bits") > 8) {  // decided: refused, codes would wrap modulo 256
      EXPECT_FALSE(c.must()) << c.id();
      EXPECT_THROW(channel_quant(c.arg_tensor("x").array(), 9, 32), Error) << c.id();
      continue;
    }
    const ChannelCodes got = channel_quant(c.arg_tensor("x").array(), width(c, "bits"), c.integer("group_size"));
    expect_equal(c, c.json.at("returns")[0], got.codes);
    expect_equal(c, c.json.at("returns")[1], got.scales);
    expect_equal(c, c.json.at("returns")[2], got.zeros);
  }
}

TEST(ZipCacheGolden, ChannelDequant) {
  for (const Case& c : cases_of("function", "zipcache.channel_dequant")) {
    const Tensor& codes = c.arg_tensor("codes");
    const Tensor& scales = c.arg_tensor("scales");
    const Tensor& zeros = c.arg_tensor("zeros");
    Buffer out(DType::f32, codes.shape);
    channel_dequant(dense_grid(codes.u8(), {codes.extent(0), codes.extent(1)}),
                    dense_grid(scales.f32(), {scales.extent(0), scales.extent(1)}),
                    dense_grid(zeros.f32(), {zeros.extent(0), zeros.extent(1)}), out.array(), c.integer("group_size"));
    expect_equal(c, c.json.at("returns")[0], out.bytes.data(), out.bytes.size() / 4);
  }
}

TEST(ZipCacheGolden, Compress) {
  for (const Case& c : cases_of("function", "zipcache.zipcache_compress")) {
    const ZipCacheState got = zipcache_compress(c.arg_tensor("x").array(), width(c, "hi_bits"), width(c, "lo_bits"),
                                                c.number("hi_fraction"), c.integer("group_size"));
    const Json& want = c.json.at("returns");
    expect_equal(c, want.at("hi_codes"), got.hi_codes);
    expect_equal(c, want.at("hi_scales"), got.hi_scales);
    expect_equal(c, want.at("hi_zeros"), got.hi_zeros);
    expect_equal(c, want.at("lo_codes"), got.lo_codes);
    expect_equal(c, want.at("lo_scales"), got.lo_scales);
    expect_equal(c, want.at("lo_zeros"), got.lo_zeros);
    expect_equal(c, want.at("hi_mask"), got.hi_mask);
    EXPECT_EQ(want.at("hi_bits").at("value"), got.hi_bits) << c.id();
    EXPECT_EQ(want.at("lo_bits").at("value"), got.lo_bits) << c.id();
    EXPECT_EQ(want.at("seq_len").at("value"), got.seq_len) << c.id();
    EXPECT_EQ(want.at("head_dim").at("value"), got.head_dim) << c.id();
    EXPECT_EQ(want.at("group_size").at("value"), got.group_size) << c.id();
  }
}

// The state that a case passes in.
ZipCacheState state_of(const Case& c) {
  const Json& fields = c.args().at("state").at("fields");
  const auto bytes = [&](const char* name) {
    const Tensor& t = c.tensor_of(fields.at(name));
    return std::vector<std::uint8_t>(t.u8(), t.u8() + t.size());
  };
  const auto floats = [&](const char* name) { return c.tensor_of(fields.at(name)).floats(); };
  const auto integer = [&](const char* name) { return fields.at(name).at("value").get<std::int64_t>(); };
  return {bytes("hi_codes"),
          floats("hi_scales"),
          floats("hi_zeros"),
          bytes("lo_codes"),
          floats("lo_scales"),
          floats("lo_zeros"),
          bytes("hi_mask"),
          static_cast<int>(integer("hi_bits")),
          static_cast<int>(integer("lo_bits")),
          integer("seq_len"),
          integer("head_dim"),
          integer("group_size")};
}

TEST(ZipCacheGolden, ReconstructAndBytes) {
  for (const Case& c : cases_of("function", "zipcache.zipcache_reconstruct")) {
    const ZipCacheState state = state_of(c);
    Buffer out(DType::f16, {state.seq_len, state.head_dim});
    zipcache_reconstruct(state, out.array());
    expect_equal(c, c.json.at("returns")[0], out.bytes.data(), out.bytes.size() / 2);
  }
  for (const Case& c : cases_of("function", "zipcache.zipcache_bytes")) {
    const Json& group = c.args().at("group_size");
    const std::int64_t got =
        group.is_null() ? zipcache_bytes(state_of(c)) : zipcache_bytes(state_of(c), group.get<std::int64_t>());
    EXPECT_EQ(c.json.at("returns")[0].at("value"), got) << c.id();
  }
}

TEST(ZipCacheGolden, QuantDequant) {
  for (const Case& c : cases_of("function", "zipcache.zipcache_quant_dequant")) {
    const Tensor& x = c.arg_tensor("x");
    Buffer out(DType::f16, x.shape);
    zipcache_quant_dequant(x.array(), out.array(), width(c, "hi_bits"), width(c, "lo_bits"), c.number("hi_fraction"),
                           c.integer("group_size"));
    expect_equal(c, c.json.at("returns")[0], out.bytes.data(), out.bytes.size() / 2);
  }
}

TEST(ZipCacheGolden, BaseOnlyBytes) {
  const auto call = [](const Case& c) {
    return base_only_bytes(c.integer("S"), c.integer("D"), width(c, "bits"), c.integer("group_size"));
  };
  for (const Case& c : cases_of("function", "zipcache.base_only_bytes")) {
    EXPECT_EQ(c.json.at("returns")[0].at("value"), call(c)) << c.id();
  }
  for (const Case& c : cases_of("error", "zipcache.base_only_bytes")) EXPECT_THROW(call(c), Error) << c.id();
}

Json property(const ZipCacheKVCache& cache, const std::string& name) {
  if (name == "compressed_key_bytes") return cache.compressed_key_bytes();
  if (name == "compressed_value_bytes") return cache.compressed_value_bytes();
  if (name == "baseline_key_bytes") return cache.baseline_key_bytes();
  if (name == "baseline_value_bytes") return cache.baseline_value_bytes();
  if (name == "fp16_key_bytes") return cache.fp16_key_bytes();
  if (name == "fp16_value_bytes") return cache.fp16_value_bytes();
  if (name == "compression_ratio") return cache.compression_ratio();
  if (name == "effective_avg_bits") return cache.effective_avg_bits();
  return "no such property";
}

std::string run(const Case& c) {
  ZipCacheKVCache cache(golden::config_of(c));
  return golden::run_cache_case(c, cache, [&](const std::string& name) { return property(cache, name); });
}

TEST(ZipCacheGolden, Cache) {
  golden::expect_histories("ZipCacheKVCache", run);
}

TEST(ZipCacheGolden, Construction) {
  golden::expect_refused_configs("ZipCacheKVCache", [](const KVCacheConfig& config) { ZipCacheKVCache cache(config); });
  for (const Case& c : cases_of("accepted", "ZipCacheKVCache")) {  // decided: 0 bits are refused when built
    EXPECT_THROW(ZipCacheKVCache(golden::config_of(c)), Error) << c.id();
  }
  for (const Case& c : cases_of("error", "")) {
    EXPECT_THROW(make_cache(golden::config_of(c)), Error) << c.id();
  }
}

}  // namespace
}  // namespace kvant::zipcache
