// The part of ggml's binary interface that a backend lives on, written down once more with our own names, because hosts
// do not install it as a header. Layouts: backend API 2 as it is since set_tensor_2d exists, and API 3.
//
// host.cpp checks these layouts against the running host before anything relies on them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvant::llama::abi {

inline constexpr int kMaxDims = 4;
inline constexpr int kMaxSources = 10;
inline constexpr int kOpParams = 16;

struct Backend;
struct Buffer;
struct BufferType;  // differs between API 2 and 3, so it is only ever handled by address
struct Device;
struct Graph;
struct Context;
struct Reg;
struct Tensor;

// ggml's element types by their number, which model files fix for ever.
enum Type : std::int32_t { kF32 = 0, kF16 = 1, kI32 = 26, kI64 = 27, kBF16 = 30 };

enum Status : std::int32_t { kAllocFailed = -2, kFailed = -1, kSuccess = 0, kAborted = 1 };

enum DeviceType : std::int32_t { kCpu = 0, kGpu = 1, kIgpu = 2, kAccel = 3 };

// Set on nodes that the host wants computed; the others only describe the graph.
inline constexpr std::int32_t kFlagCompute = 16;

// Nothing after `name` may be used: hosts are compiled with different name lengths, so what follows moves.
struct Tensor {
  std::int32_t type;
  Buffer* buffer;
  std::int64_t ne[kMaxDims];
  std::size_t nb[kMaxDims];
  std::int32_t op;
  std::int32_t op_params[kOpParams];
  std::int32_t flags;
  Tensor* src[kMaxSources];
  Tensor* view_src;
  std::size_t view_offs;
  void* data;
  char name[64];
};
inline constexpr std::size_t kBytesAfterName = 16;
inline constexpr std::size_t kContextObjectBytes = 32;  // what a ggml context adds in front of every tensor

static_assert(offsetof(Tensor, buffer) == 8);
static_assert(offsetof(Tensor, ne) == 16);
static_assert(offsetof(Tensor, nb) == 48);
static_assert(offsetof(Tensor, op) == 80);
static_assert(offsetof(Tensor, flags) == 148);
static_assert(offsetof(Tensor, src) == 152);
static_assert(offsetof(Tensor, view_src) == 232);
static_assert(offsetof(Tensor, data) == 248);
static_assert(offsetof(Tensor, name) == 256);

struct InitParams {
  std::size_t mem_size;
  void* mem_buffer;
  bool no_alloc;
};

struct TypeTraits {
  const char* type_name;
  std::int64_t block_values;
  std::int64_t block_interleave;
  std::size_t block_bytes;
  bool is_quantized;
  void (*to_float)(const void* from, float* to, std::int64_t count);
  void (*from_float)(const float* from, void* to, std::int64_t count);
};
static_assert(offsetof(TypeTraits, to_float) == 40);

struct BufferInterface {
  void (*free_buffer)(Buffer*);
  void* (*get_base)(Buffer*);
  Status (*init_tensor)(Buffer*, Tensor*);
  void (*memset_tensor)(Buffer*, Tensor*, std::uint8_t value, std::size_t offset, std::size_t size);
  void (*set_tensor)(Buffer*, Tensor*, const void* data, std::size_t offset, std::size_t size);
  void (*get_tensor)(Buffer*, const Tensor*, void* data, std::size_t offset, std::size_t size);
  void (*set_tensor_2d)(Buffer*, Tensor*, const void*, std::size_t, std::size_t, std::size_t, std::size_t, std::size_t);
  void (*get_tensor_2d)(Buffer*, const Tensor*, void*, std::size_t, std::size_t, std::size_t, std::size_t, std::size_t);
  bool (*copy_tensor)(Buffer*, const Tensor* source, Tensor* target);
  void (*clear)(Buffer*, std::uint8_t value);
  void (*reset)(Buffer*);
};

struct Buffer {
  BufferInterface iface;
  BufferType* type;
  void* context;
  std::size_t size;
  std::int32_t usage;
};
static_assert(offsetof(Buffer, type) == 88);
static_assert(offsetof(Buffer, size) == 104);

struct BufferTypeApi2 {
  const char* (*get_name)(BufferType*);
  Buffer* (*alloc_buffer)(BufferType*, std::size_t size);
  std::size_t (*get_alignment)(BufferType*);
  std::size_t (*get_max_size)(BufferType*);
  std::size_t (*get_alloc_size)(BufferType*, const Tensor*);
  bool (*is_host)(BufferType*);
  Device* device;
  void* context;
};
static_assert(offsetof(BufferTypeApi2, device) == 48);

struct BufferTypeApi3 {
  const char* (*get_name)(BufferType*);
  Buffer* (*alloc_buffer)(BufferType*, std::size_t size);
  void* alloc_buffer_n;  // optional, left null
  std::size_t (*get_alignment)(BufferType*);
  std::size_t (*get_max_size)(BufferType*);
  std::size_t (*get_alloc_size)(BufferType*, const Tensor*);
  void* get_alloc_size_n;  // optional, left null
  bool (*is_host)(BufferType*);
  Device* device;
  void* context;
};
static_assert(offsetof(BufferTypeApi3, device) == 64);

// Slots that are void* here are optional in the host and stay null; only their place matters.
struct BackendInterface {
  const char* (*get_name)(Backend*);
  void (*free)(Backend*);
  void* set_tensor_async;
  void* get_tensor_async;
  void* set_tensor_2d_async;
  void* get_tensor_2d_async;
  void* copy_tensor_async;
  void* synchronize;
  void* graph_plan_create;
  void* graph_plan_free;
  void* graph_plan_update;
  void* graph_plan_compute;
  Status (*graph_compute)(Backend*, Graph*);
  void* event_record;
  void* event_wait;
  void* graph_optimize;
};

struct Backend {
  const std::uint8_t (*guid)[16];
  BackendInterface iface;
  Device* device;
  void* context;
};
static_assert(offsetof(Backend, device) == 136);

struct DeviceProps {
  const char* name;
  const char* description;
  std::size_t memory_free;
  std::size_t memory_total;
  std::int32_t type;
  const char* device_id;
  bool async;
  bool host_buffer;
  bool buffer_from_host_ptr;
  bool events;
  bool mmap_support;  // newer hosts only; tail padding in the others, so setting it is always safe
};
static_assert(sizeof(DeviceProps) == 56 && offsetof(DeviceProps, async) == 48);

struct Device {
  const char* (*get_name)(Device*);
  const char* (*get_description)(Device*);
  void (*get_memory)(Device*, std::size_t* free, std::size_t* total);
  std::int32_t (*get_type)(Device*);
  void (*get_props)(Device*, DeviceProps*);
  Backend* (*init_backend)(Device*, const char* params);
  BufferType* (*get_buffer_type)(Device*);
  void* get_host_buffer_type;
  void* buffer_from_host_ptr;
  bool (*supports_op)(Device*, const Tensor*);
  bool (*supports_buft)(Device*, BufferType*);
  void* offload_op;
  void* event_new;
  void* event_free;
  void* event_synchronize;
  Reg* reg;
  void* context;
};
static_assert(offsetof(Device, reg) == 120);

struct Reg {
  int api_version;
  const char* (*get_name)(Reg*);
  std::size_t (*get_device_count)(Reg*);
  Device* (*get_device)(Reg*, std::size_t index);
  void* (*get_proc_address)(Reg*, const char* name);
  void* context;
};
static_assert(offsetof(Reg, context) == 40);

// The tensor that owns the memory of t (ggml keeps view_src flat).
inline const Tensor* root_of(const Tensor* t) {
  return t->view_src != nullptr ? t->view_src : t;
}

}  // namespace kvant::llama::abi
