#include "support/counting.hpp"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> left{-1};  // calls before the one that fails

// Buffers that malloc maps one by one are rounded up to whole memory pages; whether it does depends on what was freed
// before, so tests would depend on each other.
[[maybe_unused]] const int heap_only = mallopt(M_MMAP_THRESHOLD, 1 << 30);

void* counted(void* data) {
  if (data == nullptr) throw std::bad_alloc();
  if (left >= 0 && left-- == 0) {
    std::free(data);
    throw std::bad_alloc();
  }
  live += static_cast<std::int64_t>(malloc_usable_size(data));
  return data;
}
void release(void* data) {
  if (data != nullptr) live -= static_cast<std::int64_t>(malloc_usable_size(data));
  std::free(data);
}

}  // namespace

// Every form is replaced: a sanitizer's own ones would hand memory to these deletes.
void* operator new(std::size_t size) {
  return counted(std::malloc(size));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return ::operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto boundary = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(boundary, (size + boundary - 1) / boundary * boundary));
}
void* operator new[](std::size_t size) {
  return ::operator new(size);
}
void* operator new[](std::size_t size, const std::nothrow_t& tag) noexcept {
  return ::operator new(size, tag);
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return ::operator new(size, alignment);
}
void operator delete(void* data) noexcept {
  release(data);
}
void operator delete(void* data, std::size_t) noexcept {
  release(data);
}
void operator delete(void* data, const std::nothrow_t&) noexcept {
  release(data);
}
void operator delete(void* data, std::align_val_t) noexcept {
  release(data);
}
void operator delete(void* data, std::size_t, std::align_val_t) noexcept {
  release(data);
}
void operator delete[](void* data) noexcept {
  release(data);
}
void operator delete[](void* data, std::size_t) noexcept {
  release(data);
}
void operator delete[](void* data, const std::nothrow_t&) noexcept {
  release(data);
}
void operator delete[](void* data, std::align_val_t) noexcept {
  release(data);
}
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept {
  release(data);
}

namespace kvant::testing {

std::int64_t live_bytes() {
  return live;
}
void fail_allocation_after(std::int64_t count) {
  left = count;
}

}  // namespace kvant::testing
