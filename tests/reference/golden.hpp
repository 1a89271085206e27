// The golden cases: index.json and the safetensors files beside it (KVANT_GOLDEN_DIR, set by CMake).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvant/array.hpp"

namespace kvant::golden {

using Json = nlohmann::json;

enum class Type { f32, f16, bf16, u8, i32, boolean };

struct Tensor {
  Type type = Type::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  std::int64_t size() const;
  std::int64_t extent(int axis) const { return shape[static_cast<std::size_t>(axis)]; }
  // A dense view; throws when the elements are not floating-point.
  ConstArray array() const;
  std::vector<float> floats() const;  // f32 elements
  const std::uint8_t* u8() const { return reinterpret_cast<const std::uint8_t*>(bytes.data()); }
  const std::int32_t* i32() const { return reinterpret_cast<const std::int32_t*>(bytes.data()); }
  const float* f32() const { return reinterpret_cast<const float*>(bytes.data()); }
};

// An owned dense array for results.
struct Buffer {
  Buffer(DType type, std::vector<std::int64_t> shape);
  Array array();
  DType type;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

// A case of index.json.
struct Case {
  Json json;
  std::string id() const { return json.at("id").get<std::string>(); }
  bool must() const { return json.at("group") == "must"; }
  std::string kind() const { return json.at("kind").get<std::string>(); }
  const Json& args() const { return json.at("args"); }

  const Tensor& tensor(const std::string& name) const;   // by the tensor's own name
  const Tensor& tensor_of(const Json& reference) const;  // by {"tensor": name}
  const Tensor& arg_tensor(const std::string& name) const { return tensor_of(args().at(name)); }
  double number(const std::string& name) const;  // an argument, {"float": "nan"} included
  std::int64_t integer(const std::string& name) const { return args().at(name).get<std::int64_t>(); }
};

// A double of the index: a number or {"float": "nan"|"inf"|"-inf"}.
double to_number(const Json& value);

// All cases of a kind ("function", "error", "cache", "accepted"); `function` is "module.function" with the last part of
// the module ("kitty.compute_running_variance"), or the class of a cache.
std::vector<Case> cases_of(const std::string& kind, const std::string& function);

// "" when got equals the expected tensor bit for bit ("close" cases too: kvant sums in the reference's order), else the
// first difference. Any NaN equals any NaN; `compare` may say signed_zero = false. Only rows first_row.. of axis 2 are
// in `got` when it has fewer rows than the shape says: pass matching buffers.
std::string difference(const Tensor& want, const void* got, const Json& compare);
inline std::string difference(const Tensor& want, const Buffer& got, const Json& compare) {
  return difference(want, got.bytes.data(), compare);
}

}  // namespace kvant::golden
