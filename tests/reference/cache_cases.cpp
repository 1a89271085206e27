#include "reference/cache_cases.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "kvant/error.hpp"

namespace kvant::golden {
namespace {

// Rows of every head of a [B, H, n, D] buffer, from token `first` on.
std::vector<std::byte> rows_of(const Buffer& buffer, std::int64_t first) {
  const std::int64_t heads = buffer.shape[0] * buffer.shape[1];
  const std::size_t row = static_cast<std::size_t>(buffer.shape[3]) * size_of(buffer.type);
  const auto tokens = static_cast<std::size_t>(buffer.shape[2]);
  const auto skip = static_cast<std::size_t>(first);
  std::vector<std::byte> result;
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::byte* head = buffer.bytes.data() + static_cast<std::size_t>(h) * tokens * row;
    result.insert(result.end(), head + skip * row, head + tokens * row);
  }
  return result;
}

std::string check_properties(const Json& want, const Property& property) {
  for (const auto& [name, value] : want.items()) {
    const Json got = property(name);
    const bool same =
        value.is_number_float() || got.is_number_float() ? to_number(value) == got.get<double>() : value == got;
    if (!same) return name + " is " + got.dump() + ", expected " + value.dump();
  }
  return {};
}

std::string check_rows(const Case& c, const char* side, const Json& want, const Buffer& got, const Buffer* earlier) {
  const auto first = want.at("token_range")[0].get<std::int64_t>();
  const std::vector<std::byte> rows = rows_of(got, first);
  const std::string error = difference(c.tensor_of(want), rows.data(), want.at("compare"));
  if (!error.empty()) return std::string(side) + ": " + error;
  if (first == 0 || earlier == nullptr || earlier->shape[2] < first) return {};
  // Rows before the range are what the call before returned.
  for (std::int64_t h = 0; h < got.shape[0] * got.shape[1]; ++h) {
    const std::size_t row = static_cast<std::size_t>(got.shape[3]) * size_of(got.type);
    const std::byte* now = got.bytes.data() + static_cast<std::size_t>(h * got.shape[2]) * row;
    const std::byte* then = earlier->bytes.data() + static_cast<std::size_t>(h * earlier->shape[2]) * row;
    if (std::memcmp(now, then, static_cast<std::size_t>(first) * row) != 0)
      return std::string(side) + ": older rows moved";
  }
  return {};
}

struct Returned {
  std::vector<Buffer> keys;  // none or one
  std::vector<Buffer> values;
};

std::string run_update(const Case& c, const Json& step, ReferenceCache& cache, Returned& last) {
  const Tensor& keys = c.tensor(step.at("inputs").at("keys").get<std::string>());
  const Tensor& values = c.tensor(step.at("inputs").at("values").get<std::string>());
  std::vector<std::int64_t> key_shape = keys.shape;
  std::vector<std::int64_t> value_shape = values.shape;
  key_shape[2] = value_shape[2] = cache.offset() + keys.shape[2];
  Buffer out_keys(keys.array().type, key_shape);
  Buffer out_values(values.array().type, value_shape);
  cache.update_and_fetch(keys.array(), values.array(), out_keys.array(), out_values.array());
  const Json& outputs = step.at("outputs");
  std::string error = check_rows(c, "keys", outputs.at("keys"), out_keys, last.keys.empty() ? nullptr : &last.keys[0]);
  if (error.empty()) {
    error = check_rows(c, "values", outputs.at("values"), out_values, last.values.empty() ? nullptr : &last.values[0]);
  }
  last = {{out_keys}, {out_values}};
  return error;
}

std::string run_step(const Case& c, const Json& step, ReferenceCache& cache, Returned& last) {
  if (step.at("op") == "trim") {
    const std::int64_t dropped = cache.trim(step.at("n").get<std::int64_t>());
    const auto want = step.at("returns").get<std::int64_t>();
    return dropped == want ? "" : "trim returned " + std::to_string(dropped) + ", expected " + std::to_string(want);
  }
  return run_update(c, step, cache, last);
}

}  // namespace

KVCacheConfig config_of(const Case& c) {
  const Json& json = c.json.at("config");
  KVCacheConfig config;
  const auto integer = [&](const char* name, std::int64_t& field) {
    if (json.contains(name)) field = json.at(name).get<std::int64_t>();
  };
  const auto number = [&](const char* name, double& field) {
    if (json.contains(name)) field = to_number(json.at(name));
  };
  if (json.contains("method")) config.method = json.at("method").get<std::string>();
  integer("head_dim", config.head_dim);
  number("kitty_hi_fraction", config.kitty_hi_fraction);
  integer("kitty_hi_bit", config.kitty_hi_bit);
  integer("kitty_lo_bit", config.kitty_lo_bit);
  integer("kitty_group_size", config.kitty_group_size);
  integer("kvquant_bits", config.kvquant_bits);
  number("kvquant_outlier_fraction", config.kvquant_outlier_fraction);
  integer("kvquant_group_size", config.kvquant_group_size);
  integer("kvquant_lloyd_iters", config.kvquant_lloyd_iters);
  integer("kvquant_refit_interval", config.kvquant_refit_interval);
  integer("kvquant_n_sink", config.kvquant_n_sink);
  integer("zipcache_hi_bits", config.zipcache_hi_bits);
  integer("zipcache_lo_bits", config.zipcache_lo_bits);
  number("zipcache_hi_fraction", config.zipcache_hi_fraction);
  integer("zipcache_group_size", config.zipcache_group_size);
  if (json.contains("zipcache_quantize_values")) {
    config.zipcache_quantize_values = json.at("zipcache_quantize_values").get<bool>();
  }
  return config;
}

std::string run_cache_case(const Case& c, ReferenceCache& cache, const Property& property, const AfterStep& after) {
  std::string error = check_properties(c.json.at("initial_properties"), property);
  if (error.empty()) error = check_properties(c.json.at("constant_properties"), property);
  if (!error.empty()) return "before step 0: " + error;
  Returned last;
  int number = 0;
  for (const Json& step : c.json.at("steps")) {
    error = run_step(c, step, cache, last);
    if (error.empty() && cache.offset() != step.at("offset").get<std::int64_t>()) {
      error = "offset is " + std::to_string(cache.offset()) + ", expected " + step.at("offset").dump();
    }
    if (error.empty()) error = check_properties(step.at("properties"), property);
    if (error.empty() && after) error = after(step);
    if (!error.empty()) return "step " + std::to_string(number) + ": " + error;
    ++number;
  }
  return {};
}

void expect_histories(const std::string& class_name, const std::function<std::string(const Case&)>& run) {
  int refused = 0;
  for (const Case& c : cases_of("cache", class_name)) {
    if (c.json.value("note", "").starts_with("negative trim")) {
      EXPECT_THROW(run(c), Error) << c.id();
      ++refused;
    } else {
      EXPECT_EQ(run(c), "") << c.id();
    }
  }
  EXPECT_EQ(refused, 1);
}

void expect_refused_configs(const std::string& class_name, const std::function<void(const KVCacheConfig&)>& construct) {
  for (const Case& c : cases_of("error", class_name)) {
    if (!c.json.contains("config")) continue;
    try {
      construct(config_of(c));
      ADD_FAILURE() << c.id() << " was accepted";
    } catch (const Error& error) {
      for (const Json& name : c.json.at("names")) {
        EXPECT_NE(std::string(error.what()).find(name.get<std::string>()), std::string::npos) << error.what();
      }
    }
  }
}

}  // namespace kvant::golden
