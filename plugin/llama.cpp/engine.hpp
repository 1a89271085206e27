// Engine: computes the graphs that the host hands to one backend instance.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.hpp"
#include "delegate.hpp"
#include "ggml_abi.hpp"
#include "kvant/attention.hpp"
#include "positions.hpp"

namespace kvant::llama {

class Engine {
 public:
  Engine() : workspace_(make_workspace()) {}

  void set_threads(int threads);
  void set_abort(bool (*callback)(void*), void* data);

  // Throws std::exception when a node cannot be computed.
  abi::Status compute(abi::Graph* graph);

 private:
  void compute_node(abi::Tensor* node);
  void compute_packed(abi::Tensor* node, const CacheRef& target);
  // Each returns false, with nothing done, when the node has a form that it does not know.
  bool set_rows(const abi::Tensor& node, const CacheRef& target);
  bool attend_packed(const abi::Tensor& node);
  bool shift_keys(const abi::Tensor& node, const CacheRef& target);
  // Any other operation on packed tensors, on decoded copies of them.
  void compute_decoded(const abi::Tensor& node, const CacheRef& target);

  std::vector<std::int64_t> positions_for(const CacheRef& target, const abi::Tensor* source,
                                          const std::vector<std::int64_t>& rows);
  // `first`: which of the keys just written the first query row belongs to.
  void observe_queries(Layer& layer, std::int64_t stream, const ConstView& queries, std::int64_t first,
                       const QueryScores& scores);
  void record(const CacheRef& target, const std::vector<std::int64_t>& cells,
              const std::vector<std::int64_t>& positions, const float* rows, std::int64_t row_stride);
  static void move_keys(const abi::Tensor& node, Layer& layer, const std::vector<std::int64_t>& rows,
                        const std::vector<std::int32_t>& distances);
  void flush_plain();
  void written(const CacheRef& target);
  void seal_and_account(Layer& layer, CacheBuffer& buffer);

  // Layers that were written in this graph and not sealed since.
  struct Unsealed {
    Layer* layer;
    CacheBuffer* buffer;
  };
  // What the last key write said, for the values of the same tokens that follow it.
  struct KeyWrite {
    const Layer* layer = nullptr;
    std::vector<std::int64_t> rows;
    std::vector<std::int64_t> positions;
  };

  std::shared_ptr<Workspace> workspace_;
  Delegate delegate_;
  Positions positions_;
  KeyWrite last_keys_;
  std::vector<Unsealed> unsealed_;
  std::vector<abi::Tensor*> plain_;  // nodes that wait for the delegate, in order
  int threads_ = 0;
  bool (*abort_)(void*) = nullptr;
  void* abort_data_ = nullptr;
};

}  // namespace kvant::llama
