#include "delegate.hpp"

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "host.hpp"

namespace kvant::llama {
namespace {

// A node has at most ten sources, itself and its result.
constexpr std::size_t kScratchTensors = abi::kMaxSources + 4;

struct FreeContext {
  void operator()(abi::Context* context) const { host().free(context); }
};
using ContextPointer = std::unique_ptr<abi::Context, FreeContext>;

// Metadata only: the data of every tensor in it lives elsewhere.
abi::Context* make_context(std::size_t bytes) {
  abi::Context* context = host().init({bytes, nullptr, true});
  if (context == nullptr) throw std::bad_alloc();
  return context;
}

void take_over(const abi::Tensor& node, abi::Tensor* copy) {
  copy->op = node.op;
  copy->flags = node.flags | abi::kFlagCompute;
  std::copy(std::begin(node.op_params), std::end(node.op_params), copy->op_params);
  std::copy(std::begin(node.src), std::end(node.src), copy->src);
}

}  // namespace

Delegate::Delegate() : cpu_(host().init_by_type(abi::kCpu, nullptr)) {
  if (cpu_ == nullptr) throw std::runtime_error("the host has no CPU backend");
}

Delegate::~Delegate() {
  host().backend_free(cpu_);
}

void Delegate::set_threads(int threads) {
  if (threads == threads_) return;
  threads_ = threads;
  abi::Reg* reg = host().dev_backend_reg(host().get_device(cpu_));
  void* function = host().reg_get_proc_address(reg, "ggml_backend_set_n_threads");
  if (function != nullptr) reinterpret_cast<void (*)(abi::Backend*, int)>(function)(cpu_, threads);
}

void Delegate::run(std::span<abi::Tensor* const> nodes) {
  if (nodes.empty()) return;
  constexpr std::size_t kSlack = 1024;
  const ContextPointer context(make_context(host().graph_overhead_custom(nodes.size(), false) + kSlack));
  abi::Graph* graph = host().new_graph_custom(context.get(), nodes.size(), false);
  for (abi::Tensor* node : nodes) host().graph_add_node(graph, node);
  const abi::Status status = host().graph_compute(cpu_, graph);
  if (status != abi::kSuccess) {
    throw std::runtime_error("the host's CPU backend failed with status " + std::to_string(status));
  }
}

Scratch::Scratch() : context_(make_context(kScratchTensors * host().tensor_overhead())) {}

Scratch::~Scratch() {
  host().free(context_);
}

abi::Tensor* Scratch::tensor(std::int32_t type, const std::int64_t (&ne)[abi::kMaxDims]) {
  abi::Tensor* t = host().new_tensor(context_, type, abi::kMaxDims, ne);
  memory_.emplace_back(host().nbytes(t));
  t->data = memory_.back().data();
  return t;
}

abi::Tensor* Scratch::clone(const abi::Tensor& node) {
  abi::Tensor* copy = host().new_tensor(context_, node.type, abi::kMaxDims, node.ne);
  std::copy(std::begin(node.nb), std::end(node.nb), copy->nb);
  copy->data = node.data;
  take_over(node, copy);
  return copy;
}

abi::Tensor* Scratch::clone(const abi::Tensor& node, std::int32_t type, const std::int64_t (&ne)[abi::kMaxDims]) {
  abi::Tensor* copy = tensor(type, ne);
  take_over(node, copy);
  return copy;
}

}  // namespace kvant::llama
