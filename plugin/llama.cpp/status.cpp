#include "status.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "config.hpp"
#include "host.hpp"
#include "kvant/runtime.hpp"
#include "say.hpp"

namespace kvant::llama {

using Json = nlohmann::ordered_json;

struct Ledger::State {
  mutable std::mutex mutex;
  std::vector<const StatusSource*> open;
  std::vector<BufferReport> closed;
  Holdings held;
  Holdings left;  // by closed sources: still in the last report of the session, gone once another source goes on
  std::int64_t peak_bytes = 0;
  Holdings fullest;  // at the moment when the most cells were written
  int threads = 0;
  std::size_t workspace = 0;
  std::vector<std::string> notes;
  std::int64_t best_values = -1;  // of the session that the status file shows

  void reset_session();
  Json make_status() const;
  void report_session();
};

namespace {

Json to_json(const LayerReport& r) {
  return {{"name", r.name},
          {"recipe", r.recipe},
          {"remark", remark(parse_recipe(r.recipe))},
          {"kv_heads", r.kv_heads},
          {"key_dim", r.key_dim},
          {"value_dim", r.value_dim},
          {"cells", r.cells},
          {"cells_written", r.cells_written},
          {"sealed_pages", r.counts.sealed_pages},
          {"open_pages", r.counts.open_pages},
          {"sealed_bytes", r.bytes.sealed},
          {"open_bytes", r.bytes.open},
          {"exact_bytes", r.bytes.exact},
          {"table_bytes", r.bytes.tables},
          {"seals", r.counts.seals},
          {"blind_seals", r.counts.blind_seals},
          {"reopens", r.counts.reopens}};
}

// Readers see the old file or the new one, never a part.
void write_file(const std::string& path, const std::string& text) {
  const std::string draft = path + ".tmp" + std::to_string(getpid());
  {
    std::ofstream file(draft, std::ios::binary | std::ios::trunc);
    file << text << '\n';
    file.close();
    if (file.good() && std::rename(draft.c_str(), path.c_str()) == 0) return;
  }
  std::remove(draft.c_str());
  say("KVANT_STATUS: cannot write '" + path + "'");
}

double per_value(double bits, double values) {
  return values > 0 ? bits / values : 0.0;
}

void add(Holdings& sum, const Holdings& part, std::int64_t sign) {
  sum.bytes += sign * part.bytes;
  sum.cells += sign * part.cells;
  sum.values += sign * part.values;
}

// Totals over layers that follow from their shapes alone.
struct Capacity {
  double bits_times_values = 0;
  double values_per_cell = 0;
  std::int64_t f16_bytes = 0;

  void add(const LayerReport& r) {
    const double width = static_cast<double>(r.kv_heads) * (r.key_dim + r.value_dim);
    bits_times_values += r.asymptotic_bits * width;
    values_per_cell += width;
    f16_bytes += 2 * r.cells * r.kv_heads * (r.key_dim + r.value_dim);
  }
};

}  // namespace

void Ledger::State::reset_session() {
  closed.clear();
  held = {};
  left = {};
  peak_bytes = 0;
  fullest = {};
  workspace = 0;
  notes.clear();
}

Json Ledger::State::make_status() const {
  std::vector<BufferReport> reports = closed;
  for (const StatusSource* source : open) reports.push_back(source->report());
  Json layers = Json::array();
  Json passed = Json::array();
  Capacity capacity;
  for (const BufferReport& report : reports) {
    for (const LayerReport& r : report.layers) {
      layers.push_back(to_json(r));
      capacity.add(r);
    }
    for (const PassedReport& p : report.passed_through) {
      passed.push_back({{"tensor", p.tensor}, {"bytes", p.bytes}, {"reason", p.reason}});
    }
  }
  Json status;
  status["kvant"] = version();
  status["recipe"] = config().recipe_text;
  status["kernel"] = active_kernel();
  status["host"] = {{"ggml", host().version}, {"api", host().api}};
  status["threads"] = threads;
  status["kv_bytes"] = held.bytes;
  status["kv_bytes_peak"] = peak_bytes;
  status["kv_bytes_at_peak_cells"] = fullest.bytes;
  status["cells_written"] = fullest.cells;
  status["values"] = fullest.values;
  status["bits_per_value"] = per_value(8.0 * static_cast<double>(fullest.bytes), static_cast<double>(fullest.values));
  status["bits_asymptotic"] = per_value(capacity.bits_times_values, capacity.values_per_cell);
  status["f16_bytes"] = capacity.f16_bytes;
  status["workspace_bytes"] = workspace;
  status["layers"] = std::move(layers);
  status["passed_through"] = std::move(passed);
  status["notes"] = notes;
  return status;
}

void Ledger::State::report_session() {
  const std::string& where = config().status;
  if (where.empty()) return;
  const bool to_stderr = where == "stderr";
  if (!to_stderr && fullest.values < best_values) return;
  best_values = fullest.values;
  const std::string text = make_status().dump(-1, ' ', false, Json::error_handler_t::replace);
  if (to_stderr) {
    std::fprintf(stderr, "%s\n", text.c_str());
  } else {
    write_file(where, text);
  }
}

Ledger::Ledger() : state_(new State) {}

Ledger& Ledger::instance() {
  static auto* ledger = new Ledger;
  return *ledger;
}

void Ledger::open(const StatusSource* source) {
  const std::lock_guard lock(state_->mutex);
  if (std::find(state_->open.begin(), state_->open.end(), source) != state_->open.end()) return;
  state_->open.push_back(source);
}

void Ledger::close(const StatusSource* source, const Holdings& held) {
  const std::lock_guard lock(state_->mutex);
  const auto at = std::find(state_->open.begin(), state_->open.end(), source);
  if (at == state_->open.end()) return;
  state_->open.erase(at);
  state_->closed.push_back(source->report());
  add(state_->left, held, 1);
  if (!state_->open.empty()) return;
  state_->report_session();
  state_->reset_session();
}

void Ledger::change(const Holdings& before, const Holdings& now) {
  const std::lock_guard lock(state_->mutex);
  Holdings& held = state_->held;
  add(held, state_->left, -1);
  state_->left = {};
  add(held, now, 1);
  add(held, before, -1);
  state_->peak_bytes = std::max(state_->peak_bytes, held.bytes);
  // ">=" follows the bytes down again when pages are sealed after the last cell was written.
  if (held.cells >= state_->fullest.cells) state_->fullest = held;
}

void Ledger::set_threads(int threads) {
  const std::lock_guard lock(state_->mutex);
  state_->threads = threads;
}

void Ledger::set_workspace(std::size_t bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->workspace = std::max(state_->workspace, bytes);
}

void Ledger::note(const std::string& text) {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::string>& notes = state_->notes;
  if (std::find(notes.begin(), notes.end(), text) == notes.end()) notes.push_back(text);
}

bool Ledger::any_open() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->open.empty();
}

void Ledger::finish() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->open.empty() || state_->best_values < 0) state_->report_session();
}

}  // namespace kvant::llama
