#include <sys/mman.h>
#include <unistd.h>

#include <new>

#include "buffer.hpp"

namespace kvant::llama {

Reservation::Reservation(std::size_t bytes) : bytes_(bytes) {
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}

Reservation::~Reservation() {
  munmap(data_, bytes_);
}

void Reservation::protect(void* from, std::size_t bytes, int mode) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t lead = (page - reinterpret_cast<std::uintptr_t>(from) % page) % page;
  if (bytes < lead + page) return;
  // The fence is a safety net: without it everything still works, so a refusal of the kernel is not an error.
  static_cast<void>(mprotect(static_cast<std::byte*>(from) + lead, (bytes - lead) / page * page, mode));
}

void Reservation::fence(void* from, std::size_t bytes) {
  protect(from, bytes, PROT_NONE);
}

void Reservation::unfence(void* from, std::size_t bytes) {
  protect(from, bytes, PROT_READ | PROT_WRITE);
}

void Reservation::zero() {
  // Private anonymous pages that were given back read as zeros.
  if (madvise(data_, bytes_, MADV_DONTNEED) != 0) throw std::bad_alloc();
}

}  // namespace kvant::llama
