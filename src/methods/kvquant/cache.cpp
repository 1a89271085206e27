// KVQuantKVCache apart from update and attend: settings, counters, fetch, trim.
#include <algorithm>
#include <cmath>
#include <string>

#include "base/threads.hpp"
#include "methods/kvquant/arguments.hpp"
#include "methods/kvquant/matrix.hpp"
#include "methods/kvquant/state.hpp"

namespace kvant::kvquant {
namespace {

std::int64_t scaled(std::int64_t counter, double ratio) {
  return static_cast<std::int64_t>(static_cast<double>(counter) * ratio);
}

void require_same(const char* name, int axis, std::int64_t value, std::int64_t cached) {
  if (value == cached) return;
  base::fail(ErrorCode::invalid_argument, std::string(name) + " has extent " + std::to_string(value) + " on axis " +
                                              std::to_string(axis) + "; this cache holds " + std::to_string(cached));
}

void require_type(const char* name, DType type, DType cached) {
  if (type == cached) return;
  base::fail(ErrorCode::invalid_argument,
             std::string(name) + " is " + name_of(type) + "; this cache holds " + name_of(cached));
}

}  // namespace

void Counters::scale(std::int64_t kept, std::int64_t before) {
  const double ratio = static_cast<double>(kept) / static_cast<double>(before);
  for (std::int64_t* counter : {&compressed_key, &compressed_value, &fp16_key, &fp16_value}) {
    *counter = scaled(*counter, ratio);
  }
}

// ---- state

KVQuantKVCache::State::State(const KVCacheConfig& settings)
    : config(settings),
      fraction(config.kvquant_outlier_fraction),
      sweeps(config.kvquant_lloyd_iters),
      refit_interval(config.kvquant_refit_interval),
      n_sink(config.kvquant_n_sink) {
  exact::require_bits("kvquant_bits", config.kvquant_bits);
  require_fraction("kvquant_outlier_fraction", config.kvquant_outlier_fraction);
  if (n_sink < 0) {
    base::fail(ErrorCode::invalid_argument, "kvquant_n_sink = " + std::to_string(n_sink) + " must be at least 0");
  }
  if (config.head_dim < 1) {
    base::fail(ErrorCode::invalid_argument, "head_dim = " + std::to_string(config.head_dim) + " must be at least 1");
  }
  bits = static_cast<int>(config.kvquant_bits);
  config.method = "kvquant";
}

void KVQuantKVCache::State::check_call(const ConstArray& keys_in, const ConstArray& values_in) const {
  exact::require_rank("keys", keys_in.rank, 4);
  exact::require_rank("values", values_in.rank, 4);
  exact::require_between("extent of keys on axis 0", keys_in.extent[0], 1, 1 << 20);
  exact::require_between("extent of keys on axis 1", keys_in.extent[1], 1, 1 << 20);
  exact::require_between("extent of keys on axis 3", keys_in.extent[3], 1, kMaxChannels);
  for (int axis = 0; axis < 4; ++axis) {
    exact::require_extent("values", axis, values_in.extent[exact::at(axis)], keys_in.extent[exact::at(axis)]);
  }
  if (!has_shape) {
    require_type("values", values_in.type, keys_in.type);
    return;
  }
  const SideShape& shape = keys.shape();
  require_same("keys", 0, keys_in.extent[0], shape.batch);
  require_same("keys", 1, keys_in.extent[1], shape.heads);
  require_same("keys", 3, keys_in.extent[3], shape.channels);
  require_type("keys", keys_in.type, shape.type);
  require_type("values", values_in.type, shape.type);
}

void KVQuantKVCache::State::set_shape(std::int64_t batch, std::int64_t heads, std::int64_t channels, DType type) {
  SideShape shape{batch, heads, channels, bits, type, false, 0};
  keys.reset(shape);
  shape.per_token = true;
  shape.token_outliers = kvquant::outlier_count(shape.channels, fraction);
  values.reset(shape);
  has_shape = true;
}

void KVQuantKVCache::State::forget() {
  keys.reset(SideShape(keys.shape()));
  values.reset(SideShape(values.shape()));
  for (std::vector<float>* table : {&key_levels, &threshold, &value_levels}) std::vector<float>().swap(*table);
  value_level_tokens = -1;
  tokens = sink_kept = outliers = 0;
  counters = {};
}

// ---- cache

KVQuantKVCache::KVQuantKVCache(const KVCacheConfig& config) : state_(std::make_unique<State>(config)) {}
KVQuantKVCache::~KVQuantKVCache() = default;
KVQuantKVCache::KVQuantKVCache(KVQuantKVCache&&) noexcept = default;
KVQuantKVCache& KVQuantKVCache::operator=(KVQuantKVCache&&) noexcept = default;

namespace {

// Rows of one head straight into `out` where its type and layout allow, else through float.
void fetch_head(const PackedSide& side, const float* live, const Array& out, std::int64_t head, std::int64_t first) {
  const SideShape& shape = side.shape();
  const std::int64_t n = out.extent[2];
  const std::int64_t start = exact::row_start(out, head / shape.heads, head % shape.heads, 0);
  if (out.type == shape.type && out.stride[3] == 1) {
    if (shape.type == DType::f32) {
      side.decode(head, first, n, live, static_cast<std::uint32_t*>(out.data) + start, out.stride[2]);
    } else {
      side.decode(head, first, n, live, static_cast<std::uint16_t*>(out.data) + start, out.stride[2]);
    }
    return;
  }
  std::vector<float> rows(static_cast<std::size_t>(kPageTokens * shape.channels));
  for (std::int64_t done = 0; done < n; done += kPageTokens) {
    const std::int64_t count = std::min<std::int64_t>(kPageTokens, n - done);
    side.decode_float(head, first + done, count, live, rows.data(), shape.channels);
    for (std::int64_t i = 0; i < count; ++i) {
      exact::row_of(out, head / shape.heads, head % shape.heads, done + i).store(rows.data() + i * shape.channels);
    }
  }
}

}  // namespace

void KVQuantKVCache::fetch(const Array& keys, const Array& values, std::int64_t first) const {
  const State& s = *state_;
  const SideShape& shape = s.keys.shape();
  for (const auto& [name, out] : {std::pair{"keys", &keys}, std::pair{"values", &values}}) {
    exact::require_rank(name, out->rank, 4);
    exact::require_extent(name, 0, out->extent[0], shape.batch);
    exact::require_extent(name, 1, out->extent[1], shape.heads);
    exact::require_extent(name, 2, out->extent[2], keys.extent[2]);
    exact::require_extent(name, 3, out->extent[3], shape.channels);
  }
  exact::require_between("first", first, 0, s.tokens - keys.extent[2]);
  base::parallel_for(2 * shape.all_heads(), threads_for(shape, keys.extent[2], threads()), [&](std::int64_t item, int) {
    const std::int64_t head = item / 2;
    if (item % 2 == 0) {
      fetch_head(s.keys, s.key_levels.data(), keys, head, first);
    } else {
      fetch_head(s.values, nullptr, values, head, first);
    }
  });
}

std::int64_t KVQuantKVCache::trim(std::int64_t n) {
  State& s = *state_;
  if (n < 0) base::fail(ErrorCode::invalid_argument, "n = " + std::to_string(n) + " must be at least 0");
  const std::int64_t dropped = std::min(n, s.tokens);
  if (dropped == 0) return 0;
  const std::int64_t kept = s.tokens - dropped;
  if (kept == 0) {
    s.forget();
    return dropped;
  }
  s.keys.truncate(kept);
  s.values.truncate(kept);
  s.counters.scale(kept, s.tokens);
  s.sink_kept = std::min(s.sink_kept, kept);
  s.tokens = kept;
  return dropped;
}

// ---- properties

ReferenceShape KVQuantKVCache::shape() const {
  if (!state_->has_shape) return {};
  const SideShape& s = state_->keys.shape();
  return {s.batch, s.heads, s.channels, s.channels, s.type, s.type};
}
const KVCacheConfig& KVQuantKVCache::config() const {
  return state_->config;
}
std::int64_t KVQuantKVCache::offset() const {
  return state_->tokens;
}
std::int64_t KVQuantKVCache::nuq_bits() const {
  return state_->bits;
}
double KVQuantKVCache::outlier_fraction() const {
  return state_->fraction;
}
std::int64_t KVQuantKVCache::outlier_count() const {
  return state_->outliers;
}
std::int64_t KVQuantKVCache::n_sink() const {
  return state_->n_sink;
}
std::int64_t KVQuantKVCache::sink_kept() const {
  return state_->sink_kept;
}
std::int64_t KVQuantKVCache::compressed_key_bytes() const {
  return state_->counters.compressed_key;
}
std::int64_t KVQuantKVCache::compressed_value_bytes() const {
  return state_->counters.compressed_value;
}
std::int64_t KVQuantKVCache::fp16_key_bytes() const {
  return state_->counters.fp16_key;
}
std::int64_t KVQuantKVCache::fp16_value_bytes() const {
  return state_->counters.fp16_value;
}

double KVQuantKVCache::effective_bits() const {
  const Counters& counters = state_->counters;
  if (counters.fp16_key == 0) return static_cast<double>(state_->bits);
  return 16.0 * static_cast<double>(counters.compressed_key) / static_cast<double>(counters.fp16_key);
}

std::size_t KVQuantKVCache::key_nbytes() const {
  return sizeof(State) + state_->keys.bytes() +
         sizeof(float) * (state_->key_levels.capacity() + state_->threshold.capacity());
}

std::size_t KVQuantKVCache::value_nbytes() const {
  return state_->values.bytes() + sizeof(float) * state_->value_levels.capacity();
}

Strided<const float> KVQuantKVCache::key_outlier_thresh() const {
  if (state_->threshold.empty()) return {};
  return dense_grid(static_cast<const float*>(state_->threshold.data()), {1, state_->keys.shape().channels});
}

Strided<const float> KVQuantKVCache::key_levels() const {
  if (state_->key_levels.empty()) return {};
  const SideShape& shape = state_->keys.shape();
  return dense_grid(static_cast<const float*>(state_->key_levels.data()),
                    {shape.heads, state_->level_count(), shape.channels});
}

Strided<const float> KVQuantKVCache::value_levels() const {
  if (state_->value_level_tokens < 0) return {};
  return dense_grid(static_cast<const float*>(state_->value_levels.data()),
                    {state_->level_count(), state_->value_level_tokens});
}

}  // namespace kvant::kvquant
