#include "device.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <string>

#include "buffer.hpp"
#include "config.hpp"
#include "engine.hpp"
#include "host.hpp"
#include "say.hpp"
#include "status.hpp"

namespace kvant::llama {
namespace {

constexpr const char* kDeviceName = "KVANT0";
constexpr std::uint8_t kGuid[16] = {'k', 'v', 'a', 'n', 't', '-', 'l', 'l', 'a', 'm', 'a', '-', '0', '0', '0', '1'};

abi::Device device;
abi::Reg registry;
abi::Reg empty_registry;
abi::BufferType* buffer_type = nullptr;

Engine& engine_of(abi::Backend* backend) {
  return *static_cast<Engine*>(backend->context);
}

// ---- backend ----

const char* backend_name(abi::Backend*) {
  return kDeviceName;
}

void free_backend(abi::Backend* backend) {
  delete &engine_of(backend);
  delete backend;
}

abi::Status graph_compute(abi::Backend* backend, abi::Graph* graph) {
  try {
    return engine_of(backend).compute(graph);
  } catch (const std::exception& error) {
    say_once(std::string("a computation failed: ") + error.what());
    return abi::kFailed;
  }
}

abi::Backend* init_backend(abi::Device* owner, const char*) {
  try {
    auto backend = std::make_unique<abi::Backend>();
    backend->guid = &kGuid;
    backend->iface.get_name = backend_name;
    backend->iface.free = free_backend;
    backend->iface.graph_compute = graph_compute;
    backend->device = owner;
    backend->context = new Engine;
    return backend.release();
  } catch (const std::exception& error) {
    say(std::string("starting the backend: ") + error.what());
    return nullptr;
  }
}

// The host calls this before every evaluation, so it is also where an idle plug-in can be noticed.
void set_threads(abi::Backend* backend, int threads) {
  engine_of(backend).set_threads(threads);
  if (Ledger::instance().any_open()) return;
  const char* text = "the host keeps its cache elsewhere (-nkvo, or no layer on this device); nothing is compressed";
  Ledger::instance().note(text);
  say_once(text);
}

void set_abort(abi::Backend* backend, bool (*callback)(void*), void* data) {
  engine_of(backend).set_abort(callback, data);
}

// ---- device ----

const char* device_name(abi::Device*) {
  return kDeviceName;
}

const char* device_description(abi::Device*) {
  static const std::string text = "kvant key-value cache, " + config().recipe_text;
  return text.c_str();
}

std::size_t meminfo(const std::string& text, const std::string& key) {
  const std::size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::stoull(text.substr(at + key.size())) * 1024;
}

// The memory of the machine: hosts that plan by it would put nothing on a device without memory.
void device_memory(abi::Device*, std::size_t* free, std::size_t* total) {
  *free = 0;
  *total = 0;
  try {
    std::ifstream file("/proc/meminfo");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    *free = meminfo(text, "MemAvailable:");
    *total = meminfo(text, "MemTotal:");
  } catch (const std::exception& error) {
    say_once(std::string("reading /proc/meminfo: ") + error.what());
  }
}

std::int32_t device_type(abi::Device*) {
  return config().device_type;
}

void device_props(abi::Device* d, abi::DeviceProps* props) {
  props->name = kDeviceName;
  props->description = device_description(d);
  device_memory(d, &props->memory_free, &props->memory_total);
  props->type = config().device_type;
  props->device_id = "kvant";  // tells hosts that a second load is the same device
  props->mmap_support = true;  // without it the host stops mapping the model's weights
}

abi::BufferType* device_buffer_type(abi::Device*) {
  return buffer_type;
}

// ---- which operations run here ----

// The first look at an attention tells the head sizes of its layer, before any row is written.
void learn_heads(const abi::Tensor& op) {
  const abi::Tensor& k = *op.src[1];
  const abi::Tensor& v = *op.src[2];
  const CacheRef key = cache_ref(&k);
  const CacheRef value = cache_ref(&v);
  if (!key || key.layer->mode() != Mode::pending) return;
  if (value.layer != key.layer || value.side == key.side) {
    key.buffer->pass_through(*key.layer, "attention reads keys and values from one tensor (latent attention)");
  } else if (k.ne[2] != v.ne[2]) {
    key.buffer->pass_through(*key.layer, "keys and values have different head counts");
  } else {
    key.buffer->learn(*key.layer, {static_cast<int>(k.ne[2]), static_cast<int>(k.ne[0]), static_cast<int>(v.ne[0])});
  }
}

// Without flash attention the host stores values transposed, one element at a time.
void notice_transposed(const abi::Tensor& op) {
  const CacheRef target = cache_ref(&op);
  if (!target || op.ne[0] == target.layer->tensor(target.side).row_values) return;
  target.buffer->pass_through(*target.layer, "values are stored transposed because flash attention is off (-fa off)");
}

// How the graph rotates the keys that it writes, known before any row comes: a state may be restored first.
void notice_rotation(const abi::Tensor& op) {
  const CacheRef target = cache_ref(&op);
  if (!target || target.side != Side::key || target.layer->rotation()) return;
  if (config().turns_keys(target.layer->index())) target.layer->notice_rotation(op.src[0]);
}

// While loading, the host shows each weight in an empty buffer of ours to learn whether it may live here. It may not: a
// weight in our memory would be a copy of what is mapped from the file. (Caches are shown in empty buffers as well,
// when the host only estimates memory.)
bool is_offered_weight(const abi::Tensor* t) {
  const abi::Tensor* root = abi::root_of(t);
  return root->buffer->size == 0 && !is_cache_name(root->name);
}

bool touches_us(const abi::Tensor& op) {
  const auto ours = [](const abi::Tensor* t) { return t != nullptr && lives_here(t) && !is_offered_weight(t); };
  return ours(&op) || std::any_of(std::begin(op.src), std::end(op.src), ours);
}

// Hosts ask for every weight and every node. Whatever involves memory of this device runs here, since nobody else can
// read it; whatever does not stays on the CPU backend.
bool supports_op(abi::Device*, const abi::Tensor* op) {
  const OpNumbers& ops = host().ops;
  const std::int32_t kind = op->op;
  if (kind == ops.none || kind == ops.reshape || kind == ops.view || kind == ops.permute || kind == ops.transpose) {
    return true;
  }
  try {
    if (kind == ops.flash_attn_ext) learn_heads(*op);
    if (kind == ops.set_rows) notice_transposed(*op);
    if (kind == ops.set_rows) notice_rotation(*op);
    return touches_us(*op);
  } catch (const std::exception& error) {
    say_once(std::string("looking at a graph: ") + error.what());
    return false;
  }
}

bool supports_buft(abi::Device*, abi::BufferType* type) {
  return is_ours(type) || host().buft_is_host(type);
}

// ---- registry ----

const char* registry_name(abi::Reg*) {
  return "KVANT";
}

std::size_t device_count(abi::Reg* reg) {
  return reg == &registry ? 1 : 0;
}

abi::Device* get_device(abi::Reg*, std::size_t) {
  return &device;
}

void* get_proc_address(abi::Reg*, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void*>(set_threads);
  if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) return reinterpret_cast<void*>(set_abort);
  return nullptr;
}

void fill_registry(abi::Reg& reg) {
  reg.api_version = host().api;
  reg.get_name = registry_name;
  reg.get_device_count = device_count;
  reg.get_device = get_device;
  reg.get_proc_address = get_proc_address;
}

void fill_device() {
  device.get_name = device_name;
  device.get_description = device_description;
  device.get_memory = device_memory;
  device.get_type = device_type;
  device.get_props = device_props;
  device.init_backend = init_backend;
  device.get_buffer_type = device_buffer_type;
  device.supports_op = supports_op;
  device.supports_buft = supports_buft;
  device.reg = &registry;
}

}  // namespace

abi::Reg* make_registry() {
  if (buffer_type != nullptr) {
    fill_registry(empty_registry);
    return &empty_registry;
  }
  fill_registry(registry);
  fill_device();
  buffer_type = make_buffer_type(&device);
  return &registry;
}

}  // namespace kvant::llama
