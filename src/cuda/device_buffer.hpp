// Device and pinned memory with an owner.
#pragma once

#include <cstddef>
#include <utility>

#include "cuda/check.hpp"

namespace kvant::cuda {

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    if (count == 0) return;
    void* data = nullptr;
    check(cudaMalloc(&data, base::checked_multiply(count, sizeof(T))), "device memory");
    data_ = static_cast<T*>(data);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  T* get() const { return data_; }
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

  // Both are done when they return, on every stream.
  void fill_zero() {
    check(cudaMemset(data_, 0, bytes()), "device memory");
    settle_default_stream();
  }
  void copy_from(const T* host, std::size_t count) {
    check(cudaMemcpy(data_, host, count * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    settle_default_stream();
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace kvant::cuda
