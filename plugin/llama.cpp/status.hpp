// The ledger of everything the plug-in holds in this process, and the JSON status made from it.
//
// A session is a stretch of time in which at least one cache buffer lives: usually one context of the host (a model
// with sliding-window layers has two buffers per context). When its last buffer is freed the session is reported. A
// status file keeps the session with the most cached values, so that short warm-up contexts do not overwrite the one
// that matters; stderr gets one line per session.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvant/page_store.hpp"

namespace kvant::llama {

struct LayerReport {
  std::string name;
  std::string recipe;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  std::int64_t cells = 0;
  std::int64_t cells_written = 0;
  StoreCounts counts;
  StoreBytes bytes;
  double asymptotic_bits = 0;
};

struct PassedReport {
  std::string tensor;
  std::size_t bytes = 0;
  std::string reason;
};

struct BufferReport {
  std::vector<LayerReport> layers;
  std::vector<PassedReport> passed_through;
};

// A cache buffer, as the ledger sees it.
class StatusSource {
 public:
  virtual ~StatusSource() = default;
  virtual BufferReport report() const = 0;
};

// What the stores of a buffer hold.
struct Holdings {
  std::int64_t bytes = 0;  // stores and recycled pages
  std::int64_t cells = 0;  // written, summed over layers
  std::int64_t values = 0;
};

class Ledger {
 public:
  static Ledger& instance();

  void open(const StatusSource* source);
  // Takes the source's last report and what it held; when it was the last one open, ends the session.
  void close(const StatusSource* source, const Holdings& held);
  // A buffer now holds `now` where it held `before`.
  void change(const Holdings& before, const Holdings& now);
  void set_threads(int threads);
  void set_workspace(std::size_t bytes);
  void note(const std::string& text);

  bool any_open() const;
  // Reports what is still open when the process exits.
  void finish();

 private:
  struct State;
  Ledger();
  State* state_;  // never freed: contexts may outlive static destruction
};

}  // namespace kvant::llama
