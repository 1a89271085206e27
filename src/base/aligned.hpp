// Memory on 64-byte boundaries: a cache line, and a whole word group of a plane.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace kvant::base {

constexpr std::size_t kAlignment = 64;

struct AlignedDelete {
  void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kAlignment}); }
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

// Uninitialised bytes; null for 0. Throws std::bad_alloc.
inline AlignedBytes allocate_aligned(std::size_t bytes) {
  if (bytes == 0) return {};
  return AlignedBytes(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment})));
}

inline AlignedBytes allocate_zeroed(std::size_t bytes) {
  AlignedBytes result = allocate_aligned(bytes);
  if (bytes != 0) std::memset(result.get(), 0, bytes);
  return result;
}

}  // namespace kvant::base
