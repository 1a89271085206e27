#include "reference/golden.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "base/half.hpp"

namespace kvant::golden {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("golden file " + path.string() + " cannot be read (set KVANT_GOLDEN_DIR)");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Type type_from(const std::string& name) {
  static const std::map<std::string, Type> types = {{"F32", Type::f32}, {"F16", Type::f16}, {"BF16", Type::bf16},
                                                    {"U8", Type::u8},   {"I32", Type::i32}, {"BOOL", Type::boolean}};
  return types.at(name);
}

using Tensors = std::map<std::string, Tensor>;

// safetensors: 8 bytes of header length, a JSON header, then the data.
Tensors read_safetensors(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const Json header = Json::parse(file.begin() + 8, file.begin() + 8 + static_cast<std::ptrdiff_t>(header_bytes));
  const char* data = file.data() + 8 + header_bytes;
  Tensors tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    Tensor tensor;
    tensor.type = type_from(entry.at("dtype").get<std::string>());
    tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto first = entry.at("data_offsets")[0].get<std::size_t>();
    const auto last = entry.at("data_offsets")[1].get<std::size_t>();
    tensor.bytes.resize(last - first);
    if (last > first) std::memcpy(tensor.bytes.data(), data + first, last - first);
    tensors.emplace(name, std::move(tensor));
  }
  return tensors;
}

const Tensors& tensors_of(const std::string& file) {
  static std::map<std::string, Tensors> files;
  auto found = files.find(file);
  if (found == files.end()) {
    found = files.emplace(file, read_safetensors(std::filesystem::path(KVANT_GOLDEN_DIR) / file)).first;
  }
  return found->second;
}

const Json& index() {
  static const Json json = Json::parse(read_file(std::filesystem::path(KVANT_GOLDEN_DIR) / "index.json"));
  return json;
}

// The element as float and its bits with every NaN made one.
double element(const Tensor& tensor, const void* data, std::int64_t i) {
  const auto* bytes = static_cast<const std::byte*>(data);
  if (tensor.type == Type::u8 || tensor.type == Type::boolean) return static_cast<double>(bytes[i]);
  if (tensor.type == Type::i32) return static_cast<const std::int32_t*>(data)[i];
  const DType type = tensor.type == Type::f32 ? DType::f32 : (tensor.type == Type::f16 ? DType::f16 : DType::bf16);
  return base::load_float(data, type, i);
}

bool equal(double want, double got, bool signed_zero) {
  if (std::isnan(want)) return std::isnan(got);
  if (signed_zero && want == 0 && std::signbit(want) != std::signbit(got)) return false;
  return want == got;
}

std::string function_name(const Json& json) {
  if (json.contains("class")) return json.at("class").get<std::string>();
  const auto module = json.at("module").get<std::string>();
  return module.substr(module.rfind('.') + 1) + "." + json.at("function").get<std::string>();
}

}  // namespace

std::int64_t Tensor::size() const {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

namespace {
Extents extents_of(const std::vector<std::int64_t>& shape) {
  Extents extents{};
  for (std::size_t i = 0; i < shape.size(); ++i) extents[i] = shape[i];
  return extents;
}
}  // namespace

ConstArray Tensor::array() const {
  if (type != Type::f32 && type != Type::f16 && type != Type::bf16) throw std::runtime_error("not a float tensor");
  const DType dtype = type == Type::f32 ? DType::f32 : (type == Type::f16 ? DType::f16 : DType::bf16);
  const int rank = static_cast<int>(shape.size());
  const Extents extents = extents_of(shape);
  return {bytes.data(), dtype, rank, extents, dense_strides(rank, extents)};
}

std::vector<float> Tensor::floats() const {
  if (type != Type::f32) throw std::runtime_error("not an f32 tensor");
  return {f32(), f32() + size()};
}

Buffer::Buffer(DType buffer_type, std::vector<std::int64_t> buffer_shape)
    : type(buffer_type), shape(std::move(buffer_shape)) {
  std::size_t count = size_of(type);
  for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
  bytes.assign(count, std::byte{0xA5});
}

Array Buffer::array() {
  const int rank = static_cast<int>(shape.size());
  const Extents extents = extents_of(shape);
  return {bytes.data(), type, rank, extents, dense_strides(rank, extents)};
}

const Tensor& Case::tensor(const std::string& name) const {
  return tensors_of(json.at("file").get<std::string>()).at(name);
}

const Tensor& Case::tensor_of(const Json& reference) const {
  return tensor(reference.at("tensor").get<std::string>());
}

double Case::number(const std::string& name) const {
  return to_number(args().at(name));
}

double to_number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  const auto text = value.at("float").get<std::string>();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? std::numeric_limits<double>::infinity() : -std::numeric_limits<double>::infinity();
}

std::vector<Case> cases_of(const std::string& kind, const std::string& function) {
  std::vector<Case> cases;
  for (const Json& json : index().at("cases")) {
    if (json.at("kind") == kind && function_name(json) == function) cases.push_back({json});
  }
  if (cases.empty()) throw std::runtime_error("no golden cases of " + kind + " " + function);
  return cases;
}

std::string difference(const Tensor& want, const void* got, const Json& compare) {
  const bool signed_zero = compare.value("signed_zero", true);
  for (std::int64_t i = 0; i < want.size(); ++i) {
    const double expected = element(want, want.bytes.data(), i);
    const double actual = element(want, got, i);
    if (!equal(expected, actual, signed_zero)) {
      return "element " + std::to_string(i) + " is " + std::to_string(actual) + ", expected " +
             std::to_string(expected);
    }
  }
  return {};
}

}  // namespace kvant::golden
