#include "reference/counting.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

namespace kvant::testing {
std::int64_t live_bytes() {
  return -1;
}
}  // namespace kvant::testing

#else

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<std::int64_t> g_live{0};

// A block starts `align` bytes after the memory of aligned_alloc; its size is kept in the 8 bytes before it.
void* allocate(std::size_t size, std::size_t align) {
  const std::size_t total = (size + align + align - 1) / align * align;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(align, total));
  if (memory == nullptr) throw std::bad_alloc();
  std::byte* block = memory + align;
  std::memcpy(block - sizeof size, &size, sizeof size);
  g_live += static_cast<std::int64_t>(size);
  return block;
}

void release(void* pointer, std::size_t align) {
  if (pointer == nullptr) return;
  auto* block = static_cast<std::byte*>(pointer);
  std::size_t size = 0;
  std::memcpy(&size, block - sizeof size, sizeof size);
  g_live -= static_cast<std::int64_t>(size);
  std::free(block - align);
}

constexpr std::size_t kPlain = 16;

}  // namespace

void* operator new(std::size_t size) {
  return allocate(size, kPlain);
}
void* operator new[](std::size_t size) {
  return allocate(size, kPlain);
}
void* operator new(std::size_t size, std::align_val_t align) {
  return allocate(size, static_cast<std::size_t>(align));
}
void* operator new[](std::size_t size, std::align_val_t align) {
  return allocate(size, static_cast<std::size_t>(align));
}
void operator delete(void* p) noexcept {
  release(p, kPlain);
}
void operator delete[](void* p) noexcept {
  release(p, kPlain);
}
void operator delete(void* p, std::size_t) noexcept {
  release(p, kPlain);
}
void operator delete[](void* p, std::size_t) noexcept {
  release(p, kPlain);
}
void operator delete(void* p, std::align_val_t align) noexcept {
  release(p, static_cast<std::size_t>(align));
}
void operator delete[](void* p, std::align_val_t align) noexcept {
  release(p, static_cast<std::size_t>(align));
}
void operator delete(void* p, std::size_t, std::align_val_t align) noexcept {
  release(p, static_cast<std::size_t>(align));
}
void operator delete[](void* p, std::size_t, std::align_val_t align) noexcept {
  release(p, static_cast<std::size_t>(align));
}

namespace kvant::testing {
std::int64_t live_bytes() {
  return g_live;
}
}  // namespace kvant::testing

#endif
