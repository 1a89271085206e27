// Attention of some query rows over the cells of a PageStore, computed straight from the packed codes.
#pragma once

#include <cstdint>
#include <memory>

#include "kvant/page_store.hpp"
#include "kvant/types.hpp"

namespace kvant {

// An additive mask [rows, cells] (0 or -inf, or any bias); row and head strides in elements, cells contiguous.
struct Mask {
  const void* data = nullptr;  // null: no mask
  DType type = DType::f16;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;  // 0: all query heads share it
};

struct AttentionOptions {
  float scale = 0.0F;            // multiplies q.k; 0 means 1/sqrt(key_dim)
  float softcap = 0.0F;          // c > 0: scores become c * tanh(score / c) before the mask
  float max_bias = 0.0F;         // ALiBi: the mask is multiplied by each head's slope (2^(-max_bias*(h+1)/n) family)
  const float* sinks = nullptr;  // learned sink logit per query head; joins the softmax denominator only
  Mask mask;
  // Causal and sliding visibility by cell number, for stores whose cell numbers are positions (Cache). first_position
  // is the position of query row 0; -1 turns both off. Row i sees cells p-window+1..p where p = first_position + i.
  // With max_bias > 0 and no mask, the ALiBi distance is cell - p.
  std::int64_t first_position = -1;
  std::int64_t sliding_window = 0;  // 0: unlimited
  int threads = 0;                  // 0: OpenMP's default
};

// Scratch memory reused between calls; grows to what the largest call needed. One call at a time may use it.
class Workspace;
std::shared_ptr<Workspace> make_workspace();
std::size_t bytes_of(const Workspace& workspace);

// out = softmax(scale * q k^T + mask) v over cells 0..n_cells-1.
//   queries: [rows, query_heads, key_dim], query_heads a multiple of kv_heads (query head h reads KV head h / group)
//   out:     [rows, query_heads, value_dim]
//   lse:     null, or [rows, query_heads] float32: log of the softmax denominator (sinks included), -inf if nothing is
//            visible; such rows are zeros in out.
// Unwritten cells are never visible. Throws Error for shapes that do not fit; out is then untouched.
void attend(const PageStore& store, std::int64_t n_cells, const ConstView& queries, const View& out,
            const AttentionOptions& options, Workspace& workspace, float* lse = nullptr);

}  // namespace kvant
