#include "rotation.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "host.hpp"

namespace kvant::llama {
namespace {

// Places of ROPE's parameters in op_params, and its modes, which ggml fixes.
constexpr int kRotated = 1;
constexpr int kMode = 2;
constexpr int kOriginalContext = 4;
constexpr int kFirstFloat = 5;  // base, scale, extrapolation, attention, fast, slow
constexpr std::int32_t kAdjacent = 0;
constexpr std::int32_t kHalves = 2;

double float_at(const abi::Tensor& rope, int place) {
  float value = 0;
  std::memcpy(&value, &rope.op_params[kFirstFloat + place], sizeof value);
  return static_cast<double>(value);
}

}  // namespace

const abi::Tensor* find_rope(const abi::Tensor* t) {
  const OpNumbers& ops = host().ops;
  constexpr int kDeepest = 8;
  for (int depth = 0; t != nullptr && depth < kDeepest; ++depth) {
    if (t->op == ops.rope) return t;
    if (t->op != ops.view && t->op != ops.reshape && t->op != ops.permute) return nullptr;
    t = t->src[0];
  }
  return nullptr;
}

KeyRotation read_rotation(const abi::Tensor& rope) {
  const std::int32_t mode = rope.op_params[kMode];
  if (mode != kAdjacent && mode != kHalves) {
    throw std::runtime_error("their RoPE is of kind " + std::to_string(mode) +
                             " (several positions per token); allowed are 0 (norm) and 2 (neox)");
  }
  RopeParameters p;
  p.pairs = mode == kHalves ? RotaryPairs::halves : RotaryPairs::adjacent;
  p.rotated = rope.op_params[kRotated];
  p.original_context = rope.op_params[kOriginalContext];
  p.base = float_at(rope, 0);
  p.scale = float_at(rope, 1);
  p.extrapolation = float_at(rope, 2);
  p.attention = float_at(rope, 3);
  p.fast = float_at(rope, 4);
  p.slow = float_at(rope, 5);
  if (const abi::Tensor* factors = rope.src[2]) {
    const std::int64_t pairs = p.rotated / 2;
    if (factors->type != abi::kF32 || factors->data == nullptr || factors->ne[0] < pairs) {
      throw std::runtime_error("the frequency factors of their RoPE cannot be read");
    }
    const auto* data = static_cast<const float*>(factors->data);
    p.factors.assign(data, data + pairs);
  }
  return make_rotation(p);
}

KeyRotation rotation_of_keys(const abi::Tensor* rows, int dim) {
  const abi::Tensor* rope = find_rope(rows);
  if (rope == nullptr) throw std::runtime_error("no RoPE is the last thing that the graph does to them");
  if (rope->ne[0] != dim) {
    throw std::runtime_error("their RoPE works on " + std::to_string(rope->ne[0]) + " channels; heads have " +
                             std::to_string(dim));
  }
  return read_rotation(*rope);
}

}  // namespace kvant::llama
