// Delegate: the host's own CPU backend, for operations on plain memory, and Scratch: plain tensors made for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ggml_abi.hpp"

namespace kvant::llama {

class Delegate {
 public:
  Delegate();
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  void set_threads(int threads);
  // Computes the nodes in order. Throws std::runtime_error when the host reports a failure.
  void run(std::span<abi::Tensor* const> nodes);
  void run(abi::Tensor* node) { run(std::span<abi::Tensor* const>(&node, 1)); }

 private:
  abi::Backend* cpu_ = nullptr;
  int threads_ = 0;
};

// Tensors in memory of our own, gone with this object.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // A dense tensor of zeros.
  abi::Tensor* tensor(std::int32_t type, const std::int64_t (&ne)[abi::kMaxDims]);
  // A node that computes what `node` does, into the same memory and from the same sources.
  abi::Tensor* clone(const abi::Tensor& node);
  // The same, into a dense tensor of zeros of another type.
  abi::Tensor* clone(const abi::Tensor& node, std::int32_t type, const std::int64_t (&ne)[abi::kMaxDims]);

 private:
  abi::Context* context_ = nullptr;
  std::vector<std::vector<std::byte>> memory_;
};

}  // namespace kvant::llama
