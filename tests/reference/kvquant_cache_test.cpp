// KVQuantKVCache on the reference's vectors: rows, counters, levels and thresholds bit for bit.
#include <gtest/gtest.h>

#include "kvant/error.hpp"
#include "kvant/kvquant.hpp"
#include "reference/cache_cases.hpp"

namespace kvant::kvquant {
namespace {

using golden::Case;
using golden::Json;

Json property(const KVQuantKVCache& cache, const std::string& name) {
  if (name == "nuq_bits") return cache.nuq_bits();
  if (name == "outlier_fraction") return cache.outlier_fraction();
  if (name == "outlier_count") return cache.outlier_count();
  if (name == "n_sink") return cache.n_sink();
  if (name == "sink_kept") return cache.sink_kept();
  if (name == "compressed_key_bytes") return cache.compressed_key_bytes();
  if (name == "compressed_value_bytes") return cache.compressed_value_bytes();
  if (name == "fp16_key_bytes") return cache.fp16_key_bytes();
  if (name == "fp16_value_bytes") return cache.fp16_value_bytes();
  if (name == "effective_bits") return cache.effective_bits();
  throw std::runtime_error("no property " + name);
}

std::string check_array(const Case& c, const char* name, const Json& want, const Strided<const float>& got) {
  if (want.is_null()) return got.rank == 0 ? "" : std::string(name) + " should be None";
  if (got.rank == 0) return std::string(name) + " is None";
  const golden::Tensor& tensor = c.tensor_of(want);
  if (static_cast<int>(tensor.shape.size()) != got.rank) return std::string(name) + " has another rank";
  for (int axis = 0; axis < got.rank; ++axis) {
    if (tensor.extent(axis) != got.extent[static_cast<std::size_t>(axis)]) return std::string(name) + ": other shape";
  }
  const std::string error = golden::difference(tensor, got.data, want.at("compare"));
  return error.empty() ? "" : std::string(name) + ": " + error;
}

std::string check_state(const Case& c, const KVQuantKVCache& cache, const Json& step) {
  if (!step.contains("state")) return {};
  for (const auto& [name, want] : step.at("state").items()) {
    std::string error;
    if (name == "key_levels") error = check_array(c, "key_levels", want, cache.key_levels());
    if (name == "value_levels") error = check_array(c, "value_levels", want, cache.value_levels());
    if (name == "key_outlier_thresh") error = check_array(c, "key_outlier_thresh", want, cache.key_outlier_thresh());
    if (!error.empty()) return error;
  }
  return {};
}

std::string run(const Case& c) {
  KVQuantKVCache cache(golden::config_of(c));
  return golden::run_cache_case(
      c, cache, [&](const std::string& name) { return property(cache, name); },
      [&](const Json& step) { return check_state(c, cache, step); });
}

// Quirks that are refused; src/methods/kvquant/README.md says why.
bool is_refused(const Case& c) {
  const std::string note = c.json.value("note", "");
  return note == "negative trim" || note == "values must have the keys' head size" || note == "NaN and inf, fp32";
}

TEST(KvquantCache, Golden) {
  int count = 0;
  for (const Case& c : golden::cases_of("cache", "KVQuantKVCache")) {
    ++count;
    if (is_refused(c)) {
      EXPECT_FALSE(c.must()) << c.id();
      EXPECT_THROW(run(c), Error) << c.id();
    } else {
      EXPECT_EQ(run(c), "") << c.id() << " " << c.json.value("note", "");
    }
  }
  EXPECT_GE(count, 44) << "47, of which the copy in this repository leaves out three";
}

TEST(KvquantCache, GoldenConstruction) {
  for (const Case& c : golden::cases_of("error", "KVQuantKVCache")) {
    if (!c.json.contains("config")) continue;  // merge is hidden in Python; C++ has no such member
    EXPECT_TRUE(c.must());
    EXPECT_THROW(KVQuantKVCache(golden::config_of(c)), Error) << c.id();
  }
  for (const Case& c : golden::cases_of("accepted", "KVQuantKVCache")) {
    const KVCacheConfig config = golden::config_of(c);
    if (config.kvquant_outlier_fraction == 7.0) {
      EXPECT_NO_THROW(KVQuantKVCache{config}) << c.id();
    } else {
      EXPECT_THROW(KVQuantKVCache{config}, Error) << c.id();
    }
  }
}

}  // namespace
}  // namespace kvant::kvquant
