// What the host hands to the decode kernel.
#pragma once

#include <cstdint>

namespace kvant::cuda {

// A run of units of one (sequence, KV head, block of query vectors), worked on by one group of thread blocks. Units are
// pages (or half pages) in order of position, then 16-token exact tiles: sinks first, then the open tail.
struct Segment {
  std::int32_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t vector0 = 0;    // first query vector; vector v is row v / group, head v % group
  std::int32_t begin = 0;      // first unit
  std::int32_t end = 0;        // past the last unit
  std::int32_t coded_end = 0;  // units before it are coded, at and after it exact tiles
  std::int32_t part = 0;       // number of this segment among the `parts` of its vectors
  std::int32_t parts = 1;
  std::int32_t partial0 = 0;  // first partial result of these vectors in the workspace
  std::int32_t counter = 0;   // which counter the parts share
  std::int32_t sinks = 0;     // tokens kept exact at the start, 0 while the first page is open
  std::int32_t unused = 0;
};
static_assert(sizeof(Segment) == 48);

struct DecodeArgs {
  const std::uint8_t* pages = nullptr;  // page p of head h at p * page_stride + h * head_bytes
  std::int64_t page_stride = 0;
  const std::uint8_t* exact = nullptr;  // exact page e of head h at e * exact_stride + h * ExactFormat::page_bytes()
  std::int64_t exact_stride = 0;
  const std::int32_t* table = nullptr;  // [sequence][table_stride] page numbers
  std::int64_t table_stride = 0;
  const std::int32_t* exact_table = nullptr;  // [sequence][exact_table_stride]: page of the sinks, then of the tail
  std::int64_t exact_table_stride = 0;
  const std::int32_t* lengths = nullptr;  // tokens per sequence, the queries' own included

  const void* q = nullptr;  // [sequence][row][query head][key_dim], strides in elements
  std::int64_t q_sequence = 0, q_row = 0, q_head = 0;
  void* out = nullptr;  // [sequence][row][query head][value_dim]
  std::int64_t out_sequence = 0, out_row = 0, out_head = 0;
  float* lse = nullptr;          // null or dense [sequence][row][query head]
  const float* sinks = nullptr;  // null or learned logit per query head
  float scale = 1;
  float softcap = 0;        // 0: none
  float softcap_rate = 0;   // 2 / softcap
  std::int32_t window = 0;  // 0: unlimited
  std::int32_t rows = 1;    // query rows per sequence: the last rows of it
  std::int32_t group = 1;   // query heads per KV head
  std::int32_t kv_heads = 1;
  std::int32_t boosted = 0;    // boosted key channels
  std::int32_t key_bytes = 0;  // of a key tile: read where the kernel does not know it (widths per channel)

  const Segment* segments = nullptr;  // null: group g has the one segment g of the InlinePlan
  float* partials = nullptr;          // [part][vectors][value_dim + 2]
  std::uint32_t* counters = nullptr;  // zero between calls
  std::int32_t pages_settled = 0;     // 1: no page in the table is written by the predecessor in the stream
};

// The part of a plan that travels with the launch: reading it from memory would put one or two misses before the first
// page is asked for.
struct InlinePlan {
  static constexpr int kSegments = 66;  // one per group: plans of clusters
  static constexpr int kGroups = 1024;  // else where each group's run of segments begins
  union {
    Segment segments[kSegments];
    std::uint16_t first[kGroups + 1];
  };
  InlinePlan() : first{} {}
};
static_assert(sizeof(DecodeArgs) + sizeof(InlinePlan) <= 4000, "kernel parameters");

}  // namespace kvant::cuda
