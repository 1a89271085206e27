// The rotation (ROPE) of keys, read off the graph that writes them.
#pragma once

#include "ggml_abi.hpp"
#include "kvant/rotation.hpp"

namespace kvant::llama {

// The ROPE node that made t; null if there is none between t and it but views.
const abi::Tensor* find_rope(const abi::Tensor* t);

// What a ROPE node does to heads. Throws std::runtime_error saying what of it kvant cannot undo (sections, as in
// M-RoPE), or that its frequency factors are not in memory yet.
KeyRotation read_rotation(const abi::Tensor& rope);

// The rotation of the keys that `rows` (the source of a SET_ROWS) holds. Throws as read_rotation, and when no ROPE of
// whole heads of `dim` channels is the last thing that happened to them.
KeyRotation rotation_of_keys(const abi::Tensor* rows, int dim);

}  // namespace kvant::llama
