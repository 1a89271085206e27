// Positions: which position of its sequence each new key has, where the graph shows it.
//
// A cache row number says nothing about the position, but the graph that writes a key usually has the rotation (ROPE)
// that was applied to it, and with it the position. The first layer of an evaluation copies them: the memory of that
// input may be reused once the last layer's rotation is done, so later layers must not read it again.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ggml_abi.hpp"

namespace kvant::llama {

class Positions {
 public:
  // Positions of the `count` keys that `rows` (the source of a SET_ROWS of layer `layer`) holds; empty where the graph
  // does not show them.
  std::span<const std::int64_t> of_keys(const abi::Tensor* rows, int layer, std::int64_t count);

 private:
  bool copy_from(const abi::Tensor* input, std::int64_t count);

  const abi::Tensor* input_ = nullptr;
  int last_layer_ = -1;
  std::vector<std::int64_t> values_;
};

}  // namespace kvant::llama
