// The C functions that the host calls for buffers of this device. None of them lets an exception out.
#include <cstring>
#include <exception>
#include <string>

#include "buffer.hpp"
#include "host.hpp"
#include "say.hpp"

namespace kvant::llama {
namespace {

abi::BufferTypeApi2 type_api2;
abi::BufferTypeApi3 type_api3;

CacheBuffer& self(abi::Buffer* buffer) {
  return *static_cast<CacheBuffer*>(buffer->context);
}

// Where byte `offset` of a tensor or view lies in the cache tensor that owns the memory.
std::size_t root_offset(const abi::Tensor* t, std::size_t offset) {
  return (t->view_src != nullptr ? t->view_offs : 0) + offset;
}

template <typename Action>
void guarded(const char* what, Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    say(std::string(what) + ": " + error.what());
  }
}

// These functions have no result, so the host takes the cache for what it wanted to write: the next evaluation fails.
template <typename Action>
void guarded_write(abi::Buffer* buffer, const char* what, Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    say(std::string(what) + ": " + error.what());
    self(buffer).spoil(what);
  }
}

void free_buffer(abi::Buffer* buffer) {
  delete &self(buffer);
}

void* get_base(abi::Buffer* buffer) {
  return self(buffer).base();
}

abi::Status init_tensor(abi::Buffer* buffer, abi::Tensor* t) {
  try {
    self(buffer).add(*t);
    return abi::kSuccess;
  } catch (const std::exception& error) {
    say(std::string("placing ") + t->name + ": " + error.what());
    return abi::kFailed;
  }
}

void set_tensor(abi::Buffer* buffer, abi::Tensor* t, const void* data, std::size_t offset, std::size_t size) {
  guarded_write(buffer, "writing a cache tensor", [&] {
    const CacheRef ref = self(buffer).find(t);
    self(buffer).settle(ref, "the host wrote it before any attention");
    if (!ref.packed()) {
      std::memcpy(static_cast<std::byte*>(t->data) + offset, data, size);
      return;
    }
    ref.layer->set_bytes(ref.side, root_offset(t, offset), data, size);
    // The host restores all keys first: sealing them beside what the cells held before would encode them twice.
    if (ref.side == Side::value) ref.layer->seal(0);
    self(buffer).account(*ref.layer);
  });
}

void get_tensor(abi::Buffer* buffer, const abi::Tensor* t, void* data, std::size_t offset, std::size_t size) {
  guarded("reading a cache tensor", [&] {
    const CacheRef ref = self(buffer).find(t);
    if (ref && ref.layer->mode() == Mode::pending) {
      std::memset(data, 0, size);
    } else if (ref.packed()) {
      ref.layer->get_bytes(ref.side, root_offset(t, offset), data, size);
    } else {
      std::memcpy(data, static_cast<const std::byte*>(t->data) + offset, size);
    }
  });
}

void memset_tensor(abi::Buffer* buffer, abi::Tensor* t, std::uint8_t value, std::size_t offset, std::size_t size) {
  guarded_write(buffer, "filling a cache tensor", [&] {
    const CacheRef ref = self(buffer).find(t);
    self(buffer).settle(ref, "the host filled it before any attention");
    if (!ref.packed()) {
      std::memset(static_cast<std::byte*>(t->data) + offset, value, size);
      return;
    }
    const std::string bytes(size, static_cast<char>(value));
    ref.layer->set_bytes(ref.side, root_offset(t, offset), bytes.data(), size, true);
    self(buffer).account(*ref.layer);
  });
}

// True if t is all cells of one stream; that stream goes into *stream.
bool is_whole_stream(const abi::Tensor* t, const CacheTensor& owner, std::int64_t* stream) {
  const std::size_t stream_bytes = owner.row_bytes * static_cast<std::size_t>(owner.cells);
  const std::size_t offset = root_offset(t, 0);
  *stream = static_cast<std::int64_t>(offset / stream_bytes);
  return offset % stream_bytes == 0 && t->ne[0] == owner.row_values && t->ne[1] == owner.cells && t->ne[2] == 1 &&
         t->ne[3] == 1 && t->nb[1] == owner.row_bytes;
}

// Sequences are copied between streams of one cache tensor as they are stored, once for keys and once for values; the
// store copies both each time, and sharing the same pages again is cheap. The host copies everything else byte by byte.
bool copy_tensor(abi::Buffer* buffer, const abi::Tensor* source, abi::Tensor* target) {
  try {
    const CacheRef to = self(buffer).find(target);
    const CacheRef from = cache_ref(source);
    if (!to.packed()) return false;
    const CacheTensor& owner = to.layer->tensor(to.side);
    std::int64_t first = 0;
    std::int64_t second = 0;
    if (from.layer != to.layer || from.side != to.side) return false;
    if (!is_whole_stream(source, owner, &first) || !is_whole_stream(target, owner, &second)) return false;
    to.layer->copy_stream(first, second);
    to.buffer->account(*to.layer);
    return true;
  } catch (const std::exception& error) {
    say(std::string("copying a sequence: ") + error.what());
    return false;
  }
}

void clear(abi::Buffer* buffer, std::uint8_t value) {
  guarded_write(buffer, "clearing a cache buffer", [&] { self(buffer).clear(value); });
}

const char* type_name(abi::BufferType*) {
  return "KVANT";
}

abi::Buffer* alloc_buffer(abi::BufferType* type, std::size_t size) {
  abi::BufferInterface table{};
  table.free_buffer = free_buffer;
  table.get_base = get_base;
  table.init_tensor = init_tensor;
  table.memset_tensor = memset_tensor;
  table.set_tensor = set_tensor;
  table.get_tensor = get_tensor;
  table.copy_tensor = copy_tensor;
  table.clear = clear;
  try {
    // The host deletes the struct, so the host must make it.
    return host().buffer_init(type, table, new CacheBuffer(size), size);
  } catch (const std::exception& error) {
    say("a buffer of " + std::to_string(size) + " bytes: " + error.what());
    return nullptr;
  }
}

std::size_t get_alignment(abi::BufferType*) {
  return 64;
}

// Host code may follow the data pointer of host buffers, which ours do not bear.
bool is_host(abi::BufferType*) {
  return false;
}

template <typename Layout>
abi::BufferType* fill(Layout& layout, abi::Device* device) {
  layout = {};
  layout.get_name = type_name;
  layout.alloc_buffer = alloc_buffer;
  layout.get_alignment = get_alignment;
  layout.is_host = is_host;
  layout.device = device;
  return reinterpret_cast<abi::BufferType*>(&layout);
}

}  // namespace

abi::BufferType* make_buffer_type(abi::Device* device) {
  return host().api == 3 ? fill(type_api3, device) : fill(type_api2, device);
}

bool is_ours(const abi::BufferType* type) {
  const void* address = type;
  return address == &type_api2 || address == &type_api3;
}

bool lives_here(const abi::Tensor* t) {
  const abi::Buffer* buffer = abi::root_of(t)->buffer;
  return buffer != nullptr && is_ours(buffer->type);
}

CacheRef cache_ref(const abi::Tensor* t) {
  if (!lives_here(t)) return {};
  auto* holder = static_cast<CacheBuffer*>(abi::root_of(t)->buffer->context);
  return holder != nullptr ? holder->find(t) : CacheRef{};
}

}  // namespace kvant::llama
