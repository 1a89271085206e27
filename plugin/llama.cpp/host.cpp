#include "host.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvant::llama {
namespace {

constexpr int kOldestMinor = 20;
constexpr int kNewestMinor = 26;
// A probe symbol of libggml; looking it up through libggml's handle also reaches the libraries libggml links to.
constexpr const char* kProbe = "ggml_backend_init_by_type";

std::unique_ptr<Host> attached;

// Gathers the loaded files in the order in which they were loaded.
int collect_name(dl_phdr_info* info, std::size_t, void* names) {
  if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
    static_cast<std::vector<std::string>*>(names)->emplace_back(info->dlpi_name);
  }
  return 0;
}

void* open_if_loaded(const char* path) {
  void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr && dlsym(handle, kProbe) == nullptr) {
    dlclose(handle);
    return nullptr;
  }
  return handle;
}

// Python loads libraries into local scopes and may hold two copies of ggml, so the caller's own file comes first and
// the global scope last.
void* find_handle(const void* caller) {
  Dl_info info{};
  if (dladdr(caller, &info) != 0 && info.dli_fname != nullptr) {
    if (void* handle = open_if_loaded(info.dli_fname)) return handle;
  }
  std::vector<std::string> names;
  dl_iterate_phdr(collect_name, &names);
  for (const std::string& name : names) {
    if (void* handle = open_if_loaded(name.c_str())) return handle;
  }
  if (dlsym(RTLD_DEFAULT, kProbe) != nullptr) return RTLD_DEFAULT;
  throw std::runtime_error("no ggml with exported symbols was found in this process");
}

template <typename Function>
void resolve(void* handle, const char* name, Function& slot) {
  slot = reinterpret_cast<Function>(dlsym(handle, name));
  if (slot == nullptr) throw std::runtime_error(std::string("this ggml does not export ") + name);
}

void resolve_all(void* handle, Host& h) {
  resolve(handle, "ggml_tensor_overhead", h.tensor_overhead);
  resolve(handle, "ggml_op_name", h.op_name);
  resolve(handle, "ggml_init", h.init);
  resolve(handle, "ggml_free", h.free);
  resolve(handle, "ggml_new_tensor", h.new_tensor);
  resolve(handle, "ggml_new_graph_custom", h.new_graph_custom);
  resolve(handle, "ggml_graph_overhead_custom", h.graph_overhead_custom);
  resolve(handle, "ggml_graph_add_node", h.graph_add_node);
  resolve(handle, "ggml_graph_n_nodes", h.graph_n_nodes);
  resolve(handle, "ggml_graph_node", h.graph_node);
  resolve(handle, "ggml_get_type_traits", h.type_traits);
  resolve(handle, "ggml_nbytes", h.nbytes);
  resolve(handle, "ggml_backend_cpu_buffer_type", h.cpu_buffer_type);
  resolve(handle, "ggml_backend_buft_alloc_buffer", h.buft_alloc_buffer);
  resolve(handle, "ggml_backend_buft_is_host", h.buft_is_host);
  resolve(handle, "ggml_backend_buft_name", h.buft_name);
  resolve(handle, "ggml_backend_buft_get_device", h.buft_get_device);
  resolve(handle, "ggml_backend_buffer_init", h.buffer_init);
  resolve(handle, "ggml_backend_buffer_get_size", h.buffer_get_size);
  resolve(handle, "ggml_backend_buffer_free", h.buffer_free);
  resolve(handle, "ggml_backend_graph_compute", h.graph_compute);
  resolve(handle, "ggml_backend_free", h.backend_free);
  resolve(handle, "ggml_backend_get_device", h.get_device);
  resolve(handle, "ggml_backend_dev_backend_reg", h.dev_backend_reg);
  resolve(handle, "ggml_backend_reg_get_proc_address", h.reg_get_proc_address);
  resolve(handle, "ggml_backend_init_by_type", h.init_by_type);
  resolve(handle, "ggml_backend_reg_count", h.reg_count);
  resolve(handle, "ggml_backend_reg_get", h.reg_get);
}

void detect_version(void* handle, Host& h) {
  auto* version = reinterpret_cast<const char* (*)()>(dlsym(handle, "ggml_version"));
  h.version = version != nullptr ? version() : "unknown";
  int major = 0;
  int minor = 0;
  if (std::sscanf(h.version.c_str(), "%d.%d", &major, &minor) != 2) return;
  if (major != 0 || minor < kOldestMinor || minor > kNewestMinor) {
    throw std::runtime_error("ggml " + h.version + " is not one of the supported versions 0." +
                             std::to_string(kOldestMinor) + " to 0." + std::to_string(kNewestMinor));
  }
}

// The version number of the backend interface was not raised with every change of layout, so exported functions that
// came in with a layout tell which one it is.
void detect_api(void* handle, Host& h) {
  if (dlsym(handle, "ggml_backend_tensor_set_2d") == nullptr) {
    throw std::runtime_error("ggml " + h.version + " has a backend layout older than April 2026");
  }
  h.api = dlsym(handle, "ggml_backend_buft_alloc_buffer_n") != nullptr ? 3 : 2;
  if (h.reg_count() > 0 && h.reg_get(0)->api_version != h.api) {
    throw std::runtime_error("ggml " + h.version + " has backend API " + std::to_string(h.reg_get(0)->api_version) +
                             "; supported are 2 and 3");
  }
}

// Names of ggml operations are a table without a bound, so the search must not run past its end: FLASH_ATTN_EXT is
// behind every other name that we look for.
void number_ops(Host& h) {
  struct Wanted {
    const char* name;
    std::int32_t* slot;
  };
  const Wanted wanted[] = {{"NONE", &h.ops.none},           {"RESHAPE", &h.ops.reshape},
                           {"VIEW", &h.ops.view},           {"PERMUTE", &h.ops.permute},
                           {"TRANSPOSE", &h.ops.transpose}, {"SET_ROWS", &h.ops.set_rows},
                           {"ROPE", &h.ops.rope},           {"FLASH_ATTN_EXT", &h.ops.flash_attn_ext}};
  constexpr std::int32_t kMostOps = 100;
  for (std::int32_t op = 0; op < kMostOps && h.ops.flash_attn_ext < 0; ++op) {
    const char* name = h.op_name(op);
    for (const Wanted& w : wanted) {
      if (name != nullptr && std::strcmp(name, w.name) == 0) *w.slot = op;
    }
  }
  for (const Wanted& w : wanted) {
    if (*w.slot < 0) throw std::runtime_error("ggml " + h.version + " has no operation " + w.name);
  }
}

void require(bool holds, const Host& h, const char* what) {
  if (!holds) throw std::runtime_error("ggml " + h.version + " has an unknown layout of its " + what);
}

void check_tensor(const Host& h) {
  const std::size_t fixed = abi::kContextObjectBytes + offsetof(abi::Tensor, name) + abi::kBytesAfterName;
  const std::size_t overhead = h.tensor_overhead();
  require(overhead == fixed + 64 || overhead == fixed + 128, h, "tensors");
  constexpr std::int32_t kQ8 = 8;
  const abi::TypeTraits* q8 = h.type_traits(kQ8);
  require(q8->block_values == 32 && q8->block_bytes == 34 && q8->is_quantized, h, "element types");
}

template <typename Layout>
bool matches(const Host& h, abi::BufferType* type) {
  const auto* layout = reinterpret_cast<const Layout*>(type);
  return layout->get_name(type) == h.buft_name(type) && layout->is_host != nullptr && layout->is_host(type) &&
         layout->device == h.buft_get_device(type);
}

// Fields behind the function tables sit where we expect them only if the tables have the size that we expect.
void check_buffers(const Host& h) {
  abi::BufferType* type = h.cpu_buffer_type();
  const bool known = h.api == 3 ? matches<abi::BufferTypeApi3>(h, type) : matches<abi::BufferTypeApi2>(h, type);
  require(known, h, "buffer types");
  constexpr std::size_t kBytes = 4096;
  abi::Buffer* buffer = h.buft_alloc_buffer(type, kBytes);
  require(buffer != nullptr, h, "buffers");
  const bool same = buffer->type == type && buffer->size == h.buffer_get_size(buffer) && buffer->size >= kBytes;
  h.buffer_free(buffer);
  require(same, h, "buffers");
}

void check_backend(const Host& h) {
  abi::Backend* cpu = h.init_by_type(abi::kCpu, nullptr);
  if (cpu == nullptr) throw std::runtime_error("ggml " + h.version + " has no CPU backend");
  abi::Device* device = h.get_device(cpu);
  const bool same = cpu->device == device && device->reg == h.dev_backend_reg(device);
  h.backend_free(cpu);
  require(same, h, "backends or devices");
}

}  // namespace

const Host& attach_host(const void* caller) {
  if (attached) return *attached;
  auto h = std::make_unique<Host>();
  void* handle = find_handle(caller);
  detect_version(handle, *h);
  resolve_all(handle, *h);
  detect_api(handle, *h);
  number_ops(*h);
  check_tensor(*h);
  check_buffers(*h);
  check_backend(*h);
  attached = std::move(h);
  return *attached;
}

const Host& host() {
  return *attached;
}

}  // namespace kvant::llama
