// The tokens that a block of query vectors sees, cut into stages of 64.
#pragma once

#include <climits>

#include "cuda/prefill.hpp"

namespace kvant::cuda {

constexpr int kStageTokens = 64;  // half a page
constexpr int kStageTiles = kStageTokens / kTile;

// 64 tokens, or what is there of them.
struct Stage {
  int position = 0;   // of the first token
  int first = 0;      // positions before it are not of this stage: sinks of a coded page
  int end = INT_MAX;  // nor are those at and after it: a page of sinks that goes on after them
  bool coded = false;
  const std::uint8_t* data = nullptr;  // the head's page, or the first of four exact tiles
};

// Sizes in bytes.
struct StageSizes {
  int head = 0;          // a head's coded page
  int exact_page = 0;    // a head's exact page
  int exact_tile = 0;    // 16 tokens of it
  bool ordered = false;  // tokens of a page lie in an order of its own: its halves are no runs of positions
};

// Coded half pages, then sinks, then the open tail.
class StageList {
 public:
  // Tokens [begin, end) are what any vector of the block sees.
  __device__ StageList(const DecodeArgs& args, const ReferenceArgs& layout, const StageSizes& sizes, int sequence,
                       int head, int begin, int end)
      : args_(args),
        table_(args.table + sequence * args.table_stride),
        exact_table_(args.exact_table + sequence * args.exact_table_stride) {
    const int coded = layout.coded_pages[sequence];
    sinks_ = layout.sinks[sequence];
    tail_begin_ = coded * kPage;
    coded0_ = max(layout.first_page[sequence] * 2, begin / kStageTokens);
    int coded_end = min(coded * 2, stages(end));
    if (sizes.ordered) {
      coded0_ &= ~1;
      coded_end = (coded_end + 1) & ~1;
    }
    coded_ = max(0, coded_end - coded0_);
    sink_ = begin < sinks_ ? stages(min(sinks_, end)) : 0;
    tail0_ = max(tail_begin_, begin / kStageTokens * kStageTokens);
    count_ = coded_ + sink_ + max(0, stages(end - tail0_));
    page_offset_ = static_cast<std::int64_t>(head) * sizes.head;
    exact_offset_ = static_cast<std::int64_t>(head) * sizes.exact_page;
    tile_bytes_ = sizes.exact_tile;
  }

  __device__ int count() const { return count_; }
  __device__ int coded() const { return coded_; }
  __device__ Stage get(int i) const {
    Stage stage;
    if (i < coded_) {
      stage.position = (coded0_ + i) * kStageTokens;
      stage.first = sinks_;
      stage.coded = true;
      stage.data = args_.pages + table_[stage.position / kPage] * args_.page_stride + page_offset_;
      return stage;
    }
    const bool sink = i < coded_ + sink_;
    int slot = 0;
    if (sink) {
      stage.position = (i - coded_) * kStageTokens;
      stage.end = sinks_;
    } else {
      stage.position = tail0_ + (i - coded_ - sink_) * kStageTokens;
      slot = 1 + (stage.position - tail_begin_) / kPage;
    }
    stage.data = args_.exact + exact_table_[slot] * args_.exact_stride + exact_offset_ +
                 stage.position % kPage / kTile * tile_bytes_;
    return stage;
  }

 private:
  __device__ static int stages(int tokens) { return (tokens + kStageTokens - 1) / kStageTokens; }

  const DecodeArgs& args_;
  const std::int32_t* table_;
  const std::int32_t* exact_table_;
  std::int64_t page_offset_ = 0, exact_offset_ = 0;
  int tile_bytes_ = 0;
  int sinks_ = 0, tail_begin_ = 0, coded0_ = 0, tail0_ = 0;
  int coded_ = 0, sink_ = 0, count_ = 0;  // stages
};

}  // namespace kvant::cuda
