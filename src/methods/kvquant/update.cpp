// One call of KVQuantKVCache::update: fit, code, count. numerics.md 4.4 has the order of things.
#include <algorithm>
#include <cmath>

#include "methods/kvquant/encode.hpp"
#include "methods/kvquant/fit.hpp"
#include "methods/kvquant/state.hpp"

namespace kvant::kvquant {
namespace {

// What a call decides before it touches anything.
struct Plan {
  std::int64_t tokens = 0;
  std::int64_t sinks = 0;
  bool refit = false;
  bool pending = false;  // keys stay exact: too few samples for a first fit
  FitRows fit;
};

Plan plan_call(const ConstArray& keys, std::int64_t tokens_before, std::int64_t sink_kept, std::int64_t level_count,
               bool first, std::int64_t refit_interval, std::int64_t n_sink) {
  Plan plan;
  plan.tokens = keys.extent[2];
  plan.refit = first || (refit_interval > 0 && tokens_before > 0 && tokens_before % refit_interval == 0);
  plan.sinks = tokens_before == 0 ? std::min(n_sink, plan.tokens) : 0;
  plan.fit.keys = &keys;
  plan.fit.first = plan.sinks > 0 && plan.sinks < plan.tokens ? plan.sinks : 0;
  plan.fit.rows = plan.tokens - plan.fit.first;
  if (!plan.refit) return plan;
  const std::int64_t enough = plan.fit.rows >= level_count ? level_count : 16 * level_count;
  const std::int64_t want = first ? enough : std::max(refit_interval, enough);
  if (tokens_before > 0 && plan.fit.rows < want) {
    plan.fit.stored_first = std::max(sink_kept, tokens_before - (want - plan.fit.rows));
    plan.fit.stored_rows = tokens_before - plan.fit.stored_first;
  }
  plan.pending = first && plan.fit.total() < enough;
  return plan;
}

// Bytes that the reference would charge for this call.
void charge(Counters& counters, const SideShape& shape, const Plan& plan, std::int64_t new_outliers, bool fitted) {
  const std::int64_t heads = shape.all_heads();
  const std::int64_t width = shape.channels;
  const std::int64_t coded = std::max<std::int64_t>(0, plan.tokens - plan.sinks);
  const std::int64_t code = (coded * width * shape.bits + 7) / 8;
  const std::int64_t key_code = plan.pending ? coded * width * 2 : code;
  const std::int64_t key_table = fitted ? shape.level_count() * width * 2 : 0;
  const std::int64_t value_table = shape.level_count() * coded * 2;
  const auto cells = static_cast<double>(std::max<std::int64_t>(2, std::max<std::int64_t>(1, coded) * width));
  const auto index_bits = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(std::log2(cells))));
  const double per_head = static_cast<double>(new_outliers) / static_cast<double>(std::max<std::int64_t>(1, 2 * heads));
  const auto outlier_bytes =
      static_cast<std::int64_t>(std::nearbyint(per_head * static_cast<double>(2 + (index_bits + 7) / 8)));
  const std::int64_t sink = plan.sinks * width * 2;
  counters.compressed_key += heads * (key_code + key_table + outlier_bytes + sink);
  counters.compressed_value += heads * (code + value_table + outlier_bytes + sink);
  counters.fp16_key += 2 * heads * plan.tokens * width;
  counters.fp16_value += 2 * heads * plan.tokens * width;
}

void require_all_finite(const char* name, const ConstArray& x) {
  std::vector<float> row(static_cast<std::size_t>(x.extent[3]));
  for (std::int64_t b = 0; b < x.extent[0]; ++b) {
    for (std::int64_t h = 0; h < x.extent[1]; ++h) {
      for (std::int64_t t = 0; t < x.extent[2]; ++t) {
        exact::row_of(x, b, h, t).load(row.data());
        require_finite(name, row.data(), x.extent[3]);
      }
    }
  }
}

}  // namespace

void KVQuantKVCache::update(const ConstArray& keys, const ConstArray& values) {
  State& s = *state_;
  s.check_call(keys, values);
  require_all_finite("keys", keys);
  require_all_finite("values", values);
  if (!s.has_shape) s.set_shape(keys.extent[0], keys.extent[1], keys.extent[3], keys.type);
  const SideShape& shape = s.keys.shape();
  const bool first = s.key_levels.empty();
  Plan plan = plan_call(keys, s.tokens, s.sink_kept, s.level_count(), first, s.refit_interval, s.n_sink);
  plan.fit.stored = &s.keys;
  plan.fit.stored_levels = s.key_levels.data();
  const int used_threads = threads_for(shape, plan.tokens, threads());

  // The cache counts nothing of this call before the commits at the end.
  const bool fits = plan.refit && !plan.pending;
  std::vector<float> levels;
  std::vector<float> threshold;
  if (fits) {
    const int fit_threads = threads_for(shape, plan.fit.total(), threads());
    levels = fit_key_levels(plan.fit, shape.level_count(), s.fraction, s.sweeps, fit_threads);
    threshold = fit_thresholds(plan.fit, s.fraction, fit_threads);
    s.keys.close_run(s.key_levels.data());
  }
  const std::vector<float>& own_levels = fits ? levels : s.key_levels;
  const std::vector<float>& own_threshold = fits ? threshold : s.threshold;

  const std::int64_t exact_keys = plan.pending ? plan.tokens : plan.sinks;
  const auto key_places = s.keys.reserve(exact_keys, plan.tokens - exact_keys, !plan.pending);
  const bool value_rows = s.values.shape().rows_are_smaller();
  const std::int64_t exact_values = value_rows ? plan.tokens : plan.sinks;
  const auto value_places = s.values.reserve(exact_values, plan.tokens - exact_values, !value_rows);

  std::int64_t found = shape.all_heads() * plan.tokens * s.values.shape().token_outliers;
  std::vector<std::vector<Outlier>> outliers;
  if (plan.pending) {
    copy_rows(keys, s.keys, key_places, plan.tokens);
  } else {
    KeyEncoding call{&keys, plan.sinks, own_levels.data(), nullptr, 0, used_threads};
    if (plan.tokens < 2 && s.fraction > 0 && !own_threshold.empty()) call.threshold = own_threshold.data();
    call.rank_outliers = kvquant::outlier_count(plan.tokens, s.fraction);
    outliers = encode_keys(call, s.keys, key_places, found);
  }
  std::vector<float> value_levels =
      encode_values({&values, plan.sinks, s.sweeps, used_threads}, s.values, value_places);

  s.keys.commit(key_places, outliers);
  s.values.commit(value_places, {});
  if (fits) {
    s.key_levels = std::move(levels);
    s.threshold = std::move(threshold);
  }
  s.value_levels = std::move(value_levels);
  s.value_level_tokens = plan.tokens;
  if (plan.sinks > 0) s.sink_kept = plan.sinks;
  s.tokens += plan.tokens;
  s.outliers += found;
  charge(s.counters, shape, plan, found, fits);
}

}  // namespace kvant::kvquant
