// The ggml that loaded us: its functions, found at run time so that this library imports none, and its layout.
#pragma once

#include <cstdint>
#include <string>

#include "ggml_abi.hpp"

namespace kvant::llama {

// ggml numbers its operations differently from release to release, so the ones we name are looked up by name.
struct OpNumbers {
  std::int32_t none = -1;
  std::int32_t reshape = -1;
  std::int32_t view = -1;
  std::int32_t permute = -1;
  std::int32_t transpose = -1;
  std::int32_t set_rows = -1;
  std::int32_t rope = -1;
  std::int32_t flash_attn_ext = -1;
};

struct Host {
  int api = 0;
  std::string version;  // "0.25.3", or "unknown" where the host exports none
  OpNumbers ops;

  std::size_t (*tensor_overhead)() = nullptr;
  const char* (*op_name)(std::int32_t) = nullptr;
  abi::Context* (*init)(abi::InitParams) = nullptr;
  void (*free)(abi::Context*) = nullptr;
  abi::Tensor* (*new_tensor)(abi::Context*, std::int32_t type, int dims, const std::int64_t* ne) = nullptr;
  abi::Graph* (*new_graph_custom)(abi::Context*, std::size_t size, bool grads) = nullptr;
  std::size_t (*graph_overhead_custom)(std::size_t size, bool grads) = nullptr;
  void (*graph_add_node)(abi::Graph*, abi::Tensor*) = nullptr;
  int (*graph_n_nodes)(abi::Graph*) = nullptr;
  abi::Tensor* (*graph_node)(abi::Graph*, int) = nullptr;
  const abi::TypeTraits* (*type_traits)(std::int32_t) = nullptr;
  std::size_t (*nbytes)(const abi::Tensor*) = nullptr;
  abi::BufferType* (*cpu_buffer_type)() = nullptr;
  abi::Buffer* (*buft_alloc_buffer)(abi::BufferType*, std::size_t) = nullptr;
  bool (*buft_is_host)(abi::BufferType*) = nullptr;
  const char* (*buft_name)(abi::BufferType*) = nullptr;
  abi::Device* (*buft_get_device)(abi::BufferType*) = nullptr;
  abi::Buffer* (*buffer_init)(abi::BufferType*, abi::BufferInterface, void* context, std::size_t) = nullptr;
  std::size_t (*buffer_get_size)(abi::Buffer*) = nullptr;
  void (*buffer_free)(abi::Buffer*) = nullptr;
  abi::Status (*graph_compute)(abi::Backend*, abi::Graph*) = nullptr;
  void (*backend_free)(abi::Backend*) = nullptr;
  abi::Device* (*get_device)(abi::Backend*) = nullptr;
  abi::Reg* (*dev_backend_reg)(abi::Device*) = nullptr;
  void* (*reg_get_proc_address)(abi::Reg*, const char*) = nullptr;
  abi::Backend* (*init_by_type)(std::int32_t type, const char* params) = nullptr;
  std::size_t (*reg_count)() = nullptr;
  abi::Reg* (*reg_get)(std::size_t) = nullptr;
};

// Finds and checks the host that called the function at `caller` (a return address); later calls give the same host.
// Throws std::runtime_error with one line that says what is unknown about it.
const Host& attach_host(const void* caller);

// The attached host. Only to be called after attach_host.
const Host& host();

}  // namespace kvant::llama
