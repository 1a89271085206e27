// Scratch memory of attention: one grow-only arena per thread plus the partial results that threads merge.
#pragma once

#include <cstddef>
#include <vector>

#include "base/aligned.hpp"
#include "base/checked.hpp"

namespace kvant {

class Workspace {
 public:
  // A bump allocator over one buffer; everything handed out lives until the next reset.
  class Arena {
   public:
    void reset(std::size_t bytes) {
      if (bytes > capacity_) {
        buffer_ = base::allocate_aligned(bytes);
        capacity_ = bytes;
      }
      used_ = 0;
    }
    template <typename T>
    T* take(std::size_t count) {
      T* result = reinterpret_cast<T*>(buffer_.get() + used_);
      used_ += padded<T>(count);
      return result;
    }
    template <typename T>
    static constexpr std::size_t padded(std::size_t count) {
      return base::round_up(count * sizeof(T), base::kAlignment);
    }
    std::size_t capacity() const { return capacity_; }

   private:
    base::AlignedBytes buffer_;
    std::size_t capacity_ = 0;
    std::size_t used_ = 0;
  };

  std::vector<Arena> threads;
  Arena partials;
};

}  // namespace kvant
