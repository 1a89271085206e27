#include "cli/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

constexpr int kMaxLayers = 4096;
constexpr int kMaxDim = 65536;
constexpr std::int64_t kMaxContext = std::int64_t{1} << 40;

// One layer in `pattern` sees everything, the others the window, where the file itself does not say.
constexpr std::array<std::pair<std::string_view, int>, 7> kWindowPatterns = {
    {{"gemma2", 2}, {"gemma3", 6}, {"gemma3n", 5}, {"cohere2", 4}, {"gpt-oss", 2}, {"exaone4", 4}, {"olmo2", 4}}};

class Keys {
 public:
  Keys(const GgufMetadata& metadata, std::string architecture)
      : metadata_(metadata), prefix_(std::move(architecture) + ".") {}

  const GgufValue* find(const std::string& key) const { return metadata_.find(prefix_ + key); }

  std::int64_t integer(const std::string& key, std::int64_t fallback, std::int64_t limit) const {
    const std::optional<double> value = metadata_.number(prefix_ + key);
    return value ? checked(key, *value, limit) : fallback;
  }

  // A number for each layer; a scalar holds for all of them.
  std::vector<std::int64_t> per_layer(const std::string& key, std::size_t layers,
                                      std::vector<std::int64_t> fallback) const {
    const GgufValue* value = find(key);
    if (value == nullptr) return fallback;
    if (value->numbers.empty() || (value->array && value->numbers.size() < layers)) {
      throw CliError(Exit::bad_input, fmt::format("{}{} has {} numbers, the model {} layers", prefix_, key,
                                                  value->numbers.size(), layers));
    }
    for (std::size_t i = 0; i < layers; ++i) {
      fallback[i] = checked(key, value->numbers[value->array ? i : 0], kMaxDim);
    }
    return fallback;
  }

 private:
  std::int64_t checked(const std::string& key, double value, std::int64_t limit) const {
    if (!(value >= 0 && value <= static_cast<double>(limit) && value == std::floor(value))) {
      throw CliError(Exit::bad_input, fmt::format("{}{} is {}, expected 0..{}", prefix_, key, value, limit));
    }
    return static_cast<std::int64_t>(value);
  }

  const GgufMetadata& metadata_;
  std::string prefix_;
};

// True for each layer that sees only the sliding window.
std::vector<bool> windowed_layers(const Keys& keys, ModelShape& model, std::size_t layers) {
  std::vector<bool> windowed(layers, false);
  const GgufValue* given = keys.find("attention.sliding_window_pattern");
  if (given != nullptr && given->array) {
    for (std::size_t i = 0; i < std::min(layers, given->numbers.size()); ++i) windowed[i] = given->numbers[i] != 0;
    return windowed;
  }
  const auto* known = std::find_if(kWindowPatterns.begin(), kWindowPatterns.end(),
                                   [&](const auto& entry) { return entry.first == model.architecture; });
  const std::int64_t fallback = known == kWindowPatterns.end() ? 0 : known->second;
  const std::int64_t pattern = keys.integer("attention.sliding_window_pattern", fallback, kMaxLayers);
  if (pattern == 0) {
    model.notes.push_back(
        fmt::format("which layers of '{}' have a sliding window is not known; all count as full", model.architecture));
    return windowed;
  }
  for (std::size_t i = 0; i < layers; ++i) windowed[i] = static_cast<std::int64_t>(i) % pattern < pattern - 1;
  return windowed;
}

// Layers behind this one reuse the cache of earlier layers, or only draft tokens.
std::size_t layers_with_cache(const Keys& keys, std::size_t layers) {
  const auto shared = static_cast<std::size_t>(keys.integer("attention.shared_kv_layers", 0, kMaxLayers));
  const auto draft = static_cast<std::size_t>(keys.integer("nextn_predict_layers", 0, kMaxLayers));
  return layers - std::min(layers, shared + draft);
}

struct HeadDims {
  int key;
  int value;
};

HeadDims head_dims(const Keys& keys, const std::vector<std::int64_t>& heads) {
  const std::int64_t embedding = keys.integer("embedding_length", 0, std::int64_t{kMaxDim} * 16);
  const std::int64_t widest = heads.empty() ? 0 : *std::max_element(heads.begin(), heads.end());
  const std::int64_t fallback = widest > 0 ? std::min<std::int64_t>(embedding / widest, kMaxDim) : 0;
  return {static_cast<int>(keys.integer("attention.key_length", fallback, kMaxDim)),
          static_cast<int>(keys.integer("attention.value_length", fallback, kMaxDim))};
}

void add_layers(const Keys& keys, ModelShape& model, std::size_t layers) {
  const std::vector<std::int64_t> none(layers, 0);
  const std::vector<std::int64_t> heads = keys.per_layer("attention.head_count", layers, none);
  const std::vector<std::int64_t> kv_heads = keys.per_layer("attention.head_count_kv", layers, heads);
  const HeadDims full = head_dims(keys, heads);
  const HeadDims narrow = {static_cast<int>(keys.integer("attention.key_length_swa", full.key, kMaxDim)),
                           static_cast<int>(keys.integer("attention.value_length_swa", full.value, kMaxDim))};
  const std::int64_t window = keys.integer("attention.sliding_window", 0, kMaxContext);
  model.recurrent = keys.find("ssm.conv_kernel") != nullptr;
  const std::vector<bool> windowed =
      window > 0 ? windowed_layers(keys, model, layers) : std::vector<bool>(layers, false);
  for (std::size_t i = 0; i < layers_with_cache(keys, layers); ++i) {
    if (kv_heads[i] == 0) continue;  // recurrent layers keep a state of fixed size instead
    const HeadDims dims = windowed[i] ? narrow : full;
    if (dims.key == 0 || dims.value == 0) throw CliError(Exit::bad_input, "the head size is missing or 0");
    model.layers.push_back({static_cast<int>(kv_heads[i]), dims.key, dims.value, windowed[i] ? window : 0});
    model.numbers.push_back(static_cast<int>(i));
  }
}

}  // namespace

ModelShape model_shape(const GgufMetadata& metadata) {
  ModelShape model;
  model.architecture = metadata.text("general.architecture");
  if (model.architecture.empty()) throw CliError(Exit::bad_input, "general.architecture is missing");
  model.name = metadata.text("general.name");
  model.file_bytes = metadata.file_bytes();
  const Keys keys(metadata, model.architecture);
  if (keys.find("attention.kv_lora_rank") != nullptr) {
    throw CliError(Exit::unsupported, "latent attention (MLA) keeps no plain keys and values");
  }
  const std::int64_t layers = keys.integer("block_count", 0, kMaxLayers);
  if (layers == 0) throw CliError(Exit::bad_input, fmt::format("{}.block_count is missing or 0", model.architecture));
  model.training_context = keys.integer("context_length", 0, kMaxContext);
  const GgufValue* tokens = metadata.find("tokenizer.ggml.tokens");
  if (tokens != nullptr) model.vocabulary = tokens->count;
  if (metadata.number("split.count").value_or(1) > 1) {
    model.notes.emplace_back("the model is split into several files; the size is that of this one");
  }
  add_layers(keys, model, static_cast<std::size_t>(layers));
  if (model.layers.empty()) throw CliError(Exit::unsupported, "no layer of this model has a KV cache");
  return model;
}

ModelShape read_model(const std::string& path) {
  const GgufMetadata metadata = GgufMetadata::read(path);
  try {
    return model_shape(metadata);
  } catch (const CliError& error) {
    throw CliError(error.code(), path + ": " + error.what());
  }
}

std::int64_t layer_cells(const LayerShape& layer, std::int64_t context, std::int64_t ubatch) {
  constexpr std::int64_t kPad = 256;
  const auto padded = [](std::int64_t cells) { return (cells + kPad - 1) / kPad * kPad; };
  if (layer.window == 0) return padded(context);
  return padded(std::min(padded(context), layer.window + ubatch));
}

}  // namespace kvant::cli
