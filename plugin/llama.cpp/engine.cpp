#include "engine.hpp"

#include <algorithm>
#include <optional>

#include "host.hpp"
#include "status.hpp"
#include "view_image.hpp"

namespace kvant::llama {
namespace {

bool is_view_only(std::int32_t op) {
  const OpNumbers& ops = host().ops;
  return op == ops.none || op == ops.reshape || op == ops.view || op == ops.permute || op == ops.transpose;
}

}  // namespace

void Engine::set_threads(int threads) {
  threads_ = threads;
  delegate_.set_threads(threads);
  Ledger::instance().set_threads(threads);
}

void Engine::set_abort(bool (*callback)(void*), void* data) {
  abort_ = callback;
  abort_data_ = data;
}

abi::Status Engine::compute(abi::Graph* graph) {
  plain_.clear();
  const int count = host().graph_n_nodes(graph);
  for (int i = 0; i < count; ++i) {
    if (abort_ != nullptr && abort_(abort_data_)) return abi::kAborted;
    abi::Tensor* node = host().graph_node(graph, i);
    if (!is_view_only(node->op) && (node->flags & abi::kFlagCompute) != 0) compute_node(node);
  }
  flush_plain();
  // Keys and values whose attention is not in this graph wait for nothing.
  while (!unsealed_.empty()) {
    const Unsealed last = unsealed_.back();
    seal_and_account(*last.layer, *last.buffer);
  }
  return abi::kSuccess;
}

void Engine::compute_node(abi::Tensor* node) {
  const CacheRef target = cache_ref(node);
  bool packed = target.packed();
  if (target) target.buffer->settle(target, "the host wrote it before any attention");
  for (const abi::Tensor* source : node->src) {
    if (source == nullptr) continue;
    const CacheRef ref = cache_ref(source);
    if (!ref) continue;
    ref.buffer->check();
    ref.buffer->settle(ref, "the host read it without flash attention");
    packed = packed || ref.packed();
  }
  if (!packed) {
    plain_.push_back(node);
    return;
  }
  flush_plain();
  compute_packed(node, target);
}

void Engine::compute_packed(abi::Tensor* node, const CacheRef& target) {
  const OpNumbers& ops = host().ops;
  const bool done = (node->op == ops.set_rows && target.packed() && set_rows(*node, target)) ||
                    (node->op == ops.flash_attn_ext && attend_packed(*node)) ||
                    (node->op == ops.rope && target.packed() && shift_keys(*node, target));
  if (!done) compute_decoded(*node, target);
}

void Engine::compute_decoded(const abi::Tensor& node, const CacheRef& target) {
  // The host's attention wants the very type that it asked for; everything else takes float32 as well.
  const bool as_declared = node.op == host().ops.flash_attn_ext;
  const auto codec_for = [&](const CacheRef& ref) {
    const CacheTensor& owner = ref.layer->tensor(ref.side);
    return as_declared ? owner.codec : RowCodec(working_type(owner));
  };
  Scratch scratch;
  abi::Tensor* copy = nullptr;
  std::optional<ViewImage> image;
  if (target.packed()) {
    copy = scratch.clone(node, codec_for(target).type(), node.ne);
    image.emplace(target, node);
    image->copy_to(codec_for(target), copy->data);
  } else {
    copy = scratch.clone(node);
  }
  for (abi::Tensor*& source : copy->src) {
    if (source == nullptr) continue;
    const CacheRef ref = cache_ref(source);
    if (!ref.packed()) continue;
    abi::Tensor* plain = scratch.tensor(codec_for(ref).type(), source->ne);
    ViewImage(ref, *source).copy_to(codec_for(ref), plain->data);
    source = plain;
  }
  delegate_.run(copy);
  if (!image) return;
  image->store_changes(codec_for(target), copy->data);
  written(target);
}

void Engine::flush_plain() {
  delegate_.run(plain_);
  plain_.clear();
}

void Engine::written(const CacheRef& target) {
  const auto same = [&](const Unsealed& u) { return u.layer == target.layer; };
  if (std::none_of(unsealed_.begin(), unsealed_.end(), same)) unsealed_.push_back({target.layer, target.buffer});
}

void Engine::seal_and_account(Layer& layer, CacheBuffer& buffer) {
  std::erase_if(unsealed_, [&](const Unsealed& u) { return u.layer == &layer; });
  buffer.account(layer);  // rows that are about to be packed belong to the peak
  layer.seal(threads_);
  buffer.account(layer);
}

}  // namespace kvant::llama
