#include "positions.hpp"

#include "rotation.hpp"
#include "status.hpp"

namespace kvant::llama {

std::span<const std::int64_t> Positions::of_keys(const abi::Tensor* rows, int layer, std::int64_t count) {
  const abi::Tensor* rope = find_rope(rows);
  const abi::Tensor* input = rope != nullptr ? rope->src[1] : nullptr;
  const bool same_evaluation = layer > last_layer_ && input == input_;
  last_layer_ = layer;
  if (input == nullptr) {
    Ledger::instance().note("positions of some keys are not in the graph: sinks go by cell number there");
    return {};
  }
  const bool fits = values_.empty() || static_cast<std::int64_t>(values_.size()) == count;
  if (same_evaluation && fits) return values_;
  input_ = input;
  if (!copy_from(input, count)) {
    values_.clear();
    Ledger::instance().note("positions of some keys were not plausible: sinks go by cell number there");
  }
  return values_;
}

bool Positions::copy_from(const abi::Tensor* input, std::int64_t count) {
  // Models with several position components per token (M-RoPE) list the first component of all tokens first.
  if (input->type != abi::kI32 || input->data == nullptr || input->ne[0] < count) return false;
  const auto* data = static_cast<const std::int32_t*>(input->data);
  values_.assign(data, data + count);
  for (const std::int64_t value : values_) {
    if (value < 0) return false;
  }
  return true;
}

}  // namespace kvant::llama
