// The file that keeps a calibration, and those that were read.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>

#include "base/byte_io.hpp"
#include "kvant/calibration.hpp"

namespace kvant {
namespace {

constexpr char kMagic[8] = {'K', 'V', 'A', 'N', 'T', 'C', 'A', 'L'};
// 2 is written where keys are those before RoPE; all else is the same, so that files of version 1 keep their digest.
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kVersionBeforeRope = 2;
constexpr int kMostExtent = 1024;
constexpr int kMostLayer = 9999;
constexpr std::uintmax_t kMostBytes = std::uintmax_t{1} << 28;

bool is_ascending(const std::array<std::uint8_t, 16>& levels, std::size_t count) {
  const auto* end = levels.data() + count;
  return std::adjacent_find(levels.data(), end, std::greater_equal<>()) == end && *(end - 1) <= 254 &&
         std::all_of(end, levels.data() + levels.size(), [](std::uint8_t level) { return level == 0; });
}

bool are_ascending(const LevelTables& tables) {
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::size_t count = std::size_t{4} << t;
    if (!is_ascending(tables[t].levels, count) || !is_ascending(tables[t].normed, count)) return false;
  }
  return true;
}

LayerCalibration read_layer(base::ByteReader& in) {
  LayerCalibration layer;
  for (int* field : {&layer.layer, &layer.kv_heads, &layer.key_dim, &layer.value_dim}) *field = in.get<std::int32_t>();
  if (layer.layer < 0 || layer.layer > kMostLayer) in.bad("a layer has number " + std::to_string(layer.layer));
  for (const int extent : {layer.kv_heads, layer.key_dim, layer.value_dim}) {
    if (extent < 1 || extent > kMostExtent) in.bad("a layer has heads of an impossible size");
  }
  layer.keys = in.get<LevelTables>();
  layer.values = in.get<LevelTables>();
  if (!are_ascending(layer.keys) || !are_ascending(layer.values)) in.bad("levels are not ascending");
  const auto channels = static_cast<std::size_t>(layer.kv_heads) * static_cast<std::size_t>(layer.key_dim);
  for (std::vector<float>* ends : {&layer.key_min, &layer.key_max}) {
    const std::byte* data = in.take(channels * sizeof(float));
    ends->resize(channels);
    std::memcpy(ends->data(), data, channels * sizeof(float));
  }
  for (std::size_t i = 0; i < channels; ++i) {
    if (!(layer.key_min[i] <= layer.key_max[i]) || !std::isfinite(layer.key_min[i]) ||
        !std::isfinite(layer.key_max[i])) {
      in.bad("a key channel has an impossible range");
    }
  }
  return layer;
}

// Calibrations by digest. They stay: recipes name them for as long as the process lives.
struct Registry {
  std::mutex mutex;
  std::map<std::uint64_t, std::shared_ptr<const Calibration>> known;
};

Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

std::string hex(std::uint64_t digest) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[digest >> shift & 15U];
  return text;
}

std::vector<char> read_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    base::fail(ErrorCode::invalid_argument, "calibration file '" + path + "' " + why);
  };
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) refuse("does not exist or is no file");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMostBytes) refuse("is too large: more than " + std::to_string(kMostBytes) + " bytes");
  std::ifstream file(path, std::ios::binary);
  std::vector<char> data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad() || data.size() != size) refuse("cannot be read");
  return data;
}

}  // namespace

const LayerCalibration& Calibration::at(int layer) const {
  for (const LayerCalibration& found : layers) {
    if (found.layer == layer) return found;
  }
  base::fail(ErrorCode::invalid_argument, "calibration of '" + model + "' has no layer " + std::to_string(layer) +
                                              "; it has " + std::to_string(layers.size()) + " layers");
}

std::vector<std::byte> to_bytes(const Calibration& calibration) {
  base::ByteWriter out;
  out.put(kMagic);
  out.put(calibration.before_rope ? kVersionBeforeRope : kVersion);
  for (const std::string* text : {&calibration.model, &calibration.architecture, &calibration.text}) {
    out.put_text(*text);
  }
  out.put(calibration.outliers);
  out.put(calibration.tokens);
  out.put(static_cast<std::uint8_t>(calibration.weighted));
  out.put(static_cast<std::uint32_t>(calibration.layers.size()));
  for (const LayerCalibration& layer : calibration.layers) {
    for (const int field : {layer.layer, layer.kv_heads, layer.key_dim, layer.value_dim}) {
      out.put(static_cast<std::int32_t>(field));
    }
    out.put(layer.keys);
    out.put(layer.values);
    for (const std::vector<float>* ends : {&layer.key_min, &layer.key_max}) {
      out.put_bytes(reinterpret_cast<const std::byte*>(ends->data()), ends->size() * sizeof(float));
    }
  }
  return out.finish();
}

Calibration read_calibration(std::span<const std::byte> bytes) {
  base::ByteReader in(bytes, "calibration file");
  if (std::memcmp(in.take(sizeof kMagic), kMagic, sizeof kMagic) != 0) in.bad("does not start with KVANTCAL");
  const auto version = in.get<std::uint32_t>();
  if (version != kVersion && version != kVersionBeforeRope) {
    in.bad("is version " + std::to_string(version) + "; this build reads versions 1 and 2");
  }
  in.check_hash(bytes);
  Calibration calibration;
  calibration.before_rope = version == kVersionBeforeRope;
  for (std::string* text : {&calibration.model, &calibration.architecture, &calibration.text}) {
    *text = in.get_text(4096);
  }
  calibration.outliers = in.get<double>();
  if (!(calibration.outliers >= 0 && calibration.outliers < 1)) in.bad("has an impossible share of outliers");
  calibration.tokens = in.get<std::int64_t>();
  const auto weighted = in.get<std::uint8_t>();
  if (weighted > 1) in.bad("does not say whether it is weighted");
  calibration.weighted = weighted == 1;
  const auto count = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) {
    calibration.layers.push_back(read_layer(in));
    if (i > 0 && calibration.layers[i].layer <= calibration.layers[i - 1].layer) in.bad("layers are not ascending");
  }
  if (in.left() != 0) in.bad("has " + std::to_string(in.left()) + " bytes too many");
  return calibration;
}

std::uint64_t calibration_digest(const Calibration& calibration) {
  const std::vector<std::byte> bytes = to_bytes(calibration);
  return XXH64(bytes.data(), bytes.size(), 0);
}

std::shared_ptr<const Calibration> load_calibration(const std::string& path) {
  const std::vector<char> data = read_file(path);
  std::shared_ptr<const Calibration> calibration;
  try {
    calibration = std::make_shared<const Calibration>(read_calibration(std::as_bytes(std::span(data))));
  } catch (const Error& error) {
    base::fail(ErrorCode::invalid_argument, std::string(error.what()) + " ('" + path + "')");
  }
  const std::uint64_t digest = XXH64(data.data(), data.size(), 0);
  const std::lock_guard lock(registry().mutex);
  return registry().known.try_emplace(digest, std::move(calibration)).first->second;
}

std::shared_ptr<const Calibration> load_calibration(const std::string& path, std::uint64_t digest) {
  {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().known.find(digest);
    if (found != registry().known.end()) return found->second;
  }
  auto calibration = load_calibration(path);
  const std::uint64_t actual = calibration_digest(*calibration);
  if (actual == digest) return calibration;
  base::fail(ErrorCode::invalid_argument,
             "calibration file '" + path + "' has digest " + hex(actual) + "; the recipe was made with " + hex(digest));
}

}  // namespace kvant
