// A block of query vectors, and the tokens that it sees, cut into stages of 64.
#pragma once

#include <climits>

#include "cuda/prefill.hpp"

namespace kvant::cuda {

constexpr int kStageTokens = 64;  // half a page
constexpr int kStageTiles = kStageTokens / kTile;

// 64 tokens, or what is there of them.
struct StageRange {
  int position = 0;   // of the first token
  int first = 0;      // positions before it are not of this stage: sinks of a coded page
  int end = INT_MAX;  // nor are those at and after it: a page of sinks that goes on after them
};
struct Stage : StageRange {
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

// This part's share [begin, end) of `count` things.
struct Share {
  int begin, end;
  __device__ Share(int count, int part, int parts)
      : begin(static_cast<int>(static_cast<std::int64_t>(count) * part / parts)),
        end(static_cast<int>(static_cast<std::int64_t>(count) * (part + 1) / parts)) {}
};

// The `vectors` query vectors of a thread block. Grid: (blocks of vectors, KV heads, sequences * parts).
struct VectorBlock {
  Segment segment;
  int part, parts;
  int before;  // row r sees positions before before + r
  int fewest;  // positions that the first of its rows sees
  int most;    // and the last one
  int begin;   // the first position that any of them sees

  __device__ VectorBlock(const DecodeArgs& args, int vectors, int part_count) : parts(part_count) {
    part = static_cast<int>(blockIdx.z) % parts;
    segment.sequence = static_cast<int>(blockIdx.z) / parts;
    segment.kv_head = static_cast<int>(blockIdx.y);
    segment.vector0 = block() * vectors;
    before = args.lengths[segment.sequence] - args.rows + 1;
    fewest = row_end(args, 0);
    most = before + min(args.rows - 1, (segment.vector0 + vectors - 1) / args.group);
    begin = args.window > 0 ? max(0, fewest - args.window) : 0;
  }
  // `begin` and `most` become those of any block of the cluster: they share their stages.
  __device__ void cover_cluster(const DecodeArgs& args, int vectors, int rank, int ranks) {
    const int first = segment.vector0 - (ranks - 1 - rank) * vectors;
    begin = args.window > 0 ? max(0, before + first / args.group - args.window) : 0;
    most = before + min(args.rows - 1, (first + ranks * vectors - 1) / args.group);
  }
  // The row of vector i of the block sees positions before this.
  __device__ int row_end(const DecodeArgs& args, int i) const { return before + (segment.vector0 + i) / args.group; }
  // Whether every row sees all positions [low, high) that a stage has.
  __device__ bool sees_all(int window, const StageRange& stage, int low, int high) const {
    return high <= min(fewest, stage.end) && low >= stage.first && (window == 0 || low >= most - window);
  }
  // Number of the block among those of other sequences, heads and vectors.
  __device__ int item() const {
    return static_cast<int>((segment.sequence * gridDim.y + segment.kv_head) * gridDim.x) + block();
  }
  // Where this part's results go unfinished, `floats` of them.
  __device__ float* partial(const DecodeArgs& args, int floats) const {
    return args.partials + (static_cast<std::int64_t>(item()) * parts + part) * floats;
  }

 private:
  // Later rows see more: they start first, also in a cluster.
  static __device__ int block() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }
};

// Which half of which of a sequence's pages a stage is.
class HalfPages {
 public:
  __device__ explicit HalfPages(int first) : first_(first) {}
  __device__ int half(int i) const { return (first_ + i) & 1; }
  __device__ int number(int i) const { return (first_ + i) >> 1; }

 protected:
  int first_;  // half page of stage 0
};

// The coded pages of a block's head by stage. Everything a loop over them needs is in registers: the compiler would
// work it out from the arguments each time.
class CodedPages : public HalfPages {
 public:
  __device__ CodedPages(const std::int32_t* table, const std::uint8_t* pages, int first)
      : HalfPages(first), table_(table), pages_(pages) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(table_), "+l"(pages_), "+r"(first_));
#endif
  }
  __device__ const std::int32_t* entry_at(int i) const {
    return table_ + number(i);
  }
  __device__ std::int32_t entry(int i) const {
    return *entry_at(i);
  }
  __device__ const std::uint8_t* data(const DecodeArgs& args, std::int32_t entry) const {
    return pages_ + entry * args.page_stride;
  }

 private:
  const std::int32_t* table_;
  const std::uint8_t* pages_;
};

// Coded half pages, then sinks, then the open tail.
class StageList {
 public:
  // What any vector of the block sees.
  __device__ StageList(const DecodeArgs& args, const ReferenceArgs& layout, const StageSizes& sizes,
                       const VectorBlock& block)
      : args_(args),
        table_(args.table + block.segment.sequence * args.table_stride),
        exact_table_(args.exact_table + block.segment.sequence * args.exact_table_stride) {
    const int sequence = block.segment.sequence;
    const int head = block.segment.kv_head;
    const int begin = block.begin;
    const int end = max(0, block.most);
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
  __device__ CodedPages pages() const { return {table_, args_.pages + page_offset_, coded0_}; }
  __device__ StageRange range(int i) const {
    StageRange range;
    if (i < coded_) {
      range.position = (coded0_ + i) * kStageTokens;
      range.first = sinks_;
    } else if (i < coded_ + sink_) {
      range.position = (i - coded_) * kStageTokens;
      range.end = sinks_;
    } else {
      range.position = tail0_ + (i - coded_ - sink_) * kStageTokens;
    }
    return range;
  }
  __device__ Stage get(int i) const {
    Stage stage{range(i)};
    if (i < coded_) {
      stage.coded = true;
      stage.data = args_.pages + table_[stage.position / kPage] * args_.page_stride + page_offset_;
      return stage;
    }
    const int slot = i < coded_ + sink_ ? 0 : 1 + (stage.position - tail_begin_) / kPage;
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
