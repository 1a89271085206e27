#include "buffer.hpp"

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "config.hpp"
#include "host.hpp"
#include "say.hpp"

namespace kvant::llama {
namespace {

constexpr const char* kCachePrefix = "cache_";

CacheTensor describe(const abi::Tensor& t) {
  CacheTensor d;
  d.name = t.name;
  d.data = t.data;
  d.bytes = host().nbytes(&t);
  d.codec = RowCodec(t.type);
  d.row_values = t.ne[0];
  d.row_bytes = t.nb[1];
  d.cells = t.ne[1];
  d.streams = t.ne[2] * t.ne[3];
  return d;
}

}  // namespace

bool is_cache_name(const char* name) {
  return std::strncmp(name, kCachePrefix, std::strlen(kCachePrefix)) == 0;
}

bool parse_cache_name(const char* name, int* layer, Side* side) {
  char letter = 0;
  int used = 0;
  if (std::sscanf(name, "cache_%c_l%d%n", &letter, layer, &used) != 2 || name[used] != '\0') return false;
  if (letter != 'k' && letter != 'v') return false;
  *side = letter == 'k' ? Side::key : Side::value;
  return true;
}

CacheBuffer::CacheBuffer(std::size_t bytes) : memory_(bytes), pool_(make_page_pool()) {}

CacheBuffer::~CacheBuffer() {
  Holdings held{idle_, 0, 0};
  for (const auto& [layer, part] : held_) {
    held.bytes += part.bytes;
    held.cells += part.cells;
    held.values += part.values;
  }
  Ledger::instance().close(this, held);
}

void CacheBuffer::add(const abi::Tensor& t) {
  if (t.view_src != nullptr || !is_cache_name(t.name)) return;
  if (by_address_.contains(t.data) || plain_.contains(t.data)) return;
  Ledger::instance().open(this);
  int index = 0;
  Side side = Side::key;
  if (t.op != host().ops.none || !parse_cache_name(t.name, &index, &side)) {
    plain_[t.data] = {t.name, t.data, host().nbytes(&t)};
    return;
  }
  Layer& layer = layers_.try_emplace(index, index).first->second;
  layer.add(side, describe(t));
  memory_.fence(t.data, layer.tensor(side).bytes);
  by_address_[t.data] = {this, &layer, side};
}

CacheRef CacheBuffer::find(const abi::Tensor* t) {
  const auto at = by_address_.find(abi::root_of(t)->data);
  return at != by_address_.end() ? at->second : CacheRef{};
}

void CacheBuffer::learn(Layer& layer, const Heads& heads) {
  if (layer.mode() != Mode::pending) return;
  try {
    layer.pack(config().recipes.at(layer.index()), heads, pool_);
    account(layer);
  } catch (const std::exception& error) {
    pass_through(layer, error.what());
  }
}

void CacheBuffer::pass_through(Layer& layer, const std::string& reason) {
  if (layer.mode() != Mode::pending) return;
  for (const Side side : {Side::key, Side::value}) {
    if (layer.has(side)) memory_.unfence(layer.tensor(side).data, layer.tensor(side).bytes);
  }
  layer.pass_through(reason);
  say_once("cache tensors are passed through uncompressed: " + reason);
}

void CacheBuffer::settle(const CacheRef& ref, const char* what) {
  if (ref && ref.layer->mode() == Mode::pending) pass_through(*ref.layer, what);
}

void CacheBuffer::check() const {
  if (spoilt_by_ == nullptr) return;
  throw std::runtime_error(std::string(spoilt_by_) + " failed before; the cache is incomplete until it is cleared");
}

void CacheBuffer::clear(std::uint8_t value) {
  memory_.zero();
  for (auto& [index, layer] : layers_) {
    layer.clear();
    if (layer.mode() == Mode::packed) account(layer);
    for (const Side side : {Side::key, Side::value}) {
      if (value == 0 || layer.mode() != Mode::raw || !layer.has(side)) continue;
      std::memset(layer.tensor(side).data, value, layer.tensor(side).bytes);
    }
  }
  spoilt_by_ = nullptr;
  if (value == 0) return;
  for (const auto& [address, tensor] : plain_) std::memset(tensor.data, value, tensor.bytes);
}

void CacheBuffer::account(const Layer& layer) {
  const auto idle = static_cast<std::int64_t>(idle_bytes(*pool_));
  Holdings& last = held_[&layer];
  Holdings before = last;
  last.bytes = static_cast<std::int64_t>(layer.bytes().total());
  last.cells = layer.cells_written();
  last.values = last.cells * layer.values_per_cell();
  Holdings now = last;
  before.bytes += idle_;
  now.bytes += idle;
  idle_ = idle;
  Ledger::instance().change(before, now);
}

BufferReport CacheBuffer::report() const {
  BufferReport report;
  for (const auto& [index, layer] : layers_) {
    if (layer.mode() == Mode::packed) {
      report.layers.push_back(layer.report());
      continue;
    }
    const std::string reason = layer.mode() == Mode::raw ? layer.reason() : "no attention read it";
    for (const Side side : {Side::key, Side::value}) {
      if (layer.has(side)) report.passed_through.push_back({layer.tensor(side).name, layer.tensor(side).bytes, reason});
    }
  }
  for (const auto& [address, tensor] : plain_) {
    report.passed_through.push_back({tensor.name, tensor.bytes, "not keys or values of attention"});
  }
  return report;
}

}  // namespace kvant::llama
