// Values of block pages: first the grids of some tokens, a warp per token, where heads share them or sums of least
// squares take their time; then the codes of a page and KV head.
#pragma once

#include "cuda/block_seal_rows.cuh"

namespace kvant::cuda {

// Grids of the depth indices part * grid_tokens and following, of all heads where they share them; and of lists of
// outliers that heads share, where each head's begin.
template <bool Bfloat>
class BlockGridSeal {
 public:
  __device__ BlockGridSeal(const BlockSealPage& page, int grid, int part, std::uint8_t* memory)
      : page_(page),
        args_(page.args),
        tile_(page.args.format.value),
        heads_(tile_.shared_grid != 0 ? args_.format.kv_heads : 1),
        first_head_(grid * heads_),
        first_(part * args_.grid_tokens),
        width_(heads_ * tile_.rows),
        shared_(*reinterpret_cast<BlockGridShared*>(memory)),
        rows_(reinterpret_cast<float*>(memory + sizeof(BlockGridShared))),
        counts_(reinterpret_cast<int*>(rows_ + args_.grid_tokens * BlockGridShared::row_stride(width_))) {}

  __device__ void run() {
    const bool listed = tile_.outliers.slots > 0;
    if (listed) {
      for (int h = thread(); h < heads_; h += kBlockSealThreads) counts_[h] = 0;
      __syncthreads();
    }
    for (int i = thread() / 32; i < args_.grid_tokens; i += kBlockSealWarps) {
      if (token(i) < page_.job.skip) continue;  // ends 0: never read, always the same bytes
      const Ends ends = measure(i);
      if (listed) count_outliers(row(i), ends);
    }
    __syncthreads();
    if (args_.value_least_squares != 0) {
      fit();
      __syncthreads();
    }
    store();
    if (!listed) return;
    auto* starts = reinterpret_cast<std::uint32_t*>(page_.page() + tile_.outliers.start_offset);
    for (int h = thread(); h < heads_; h += kBlockSealThreads) {
      std::uint32_t before = 0;
      for (int k = 0; k <= h; ++k) before += static_cast<std::uint32_t>(counts_[k]);
      atomicAdd(starts + h + 1, before);
      if (page_.list_counts(h) != nullptr) {
        atomicAdd(page_.list_counts(h) + first_ / kBlockSealPlaces, static_cast<std::uint32_t>(counts_[h]));
      }
    }
  }

 private:
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ float* row(int i) const { return rows_ + i * BlockGridShared::row_stride(width_); }
  // Grids that heads share lie by token.
  __device__ int token(int i) const {
    return tile_.shared_grid != 0 ? first_ + i : page_.token(first_head_, first_ + i);
  }

  __device__ Ends measure(int i) {
    for (int h = 0; h < heads_; ++h) load_values<Bfloat>(page_, first_head_ + h, token(i), row(i) + h * tile_.rows);
    const int outside = min(tile_.outliers.per_vector / 2, (width_ - 1) / 2);
    Ends range = inner_range(FloatRow{row(i)}, width_, outside, shared_.lists[thread() / 32]);
    range = {range_end<Bfloat>(range.min), range_end<Bfloat>(range.max)};
    if (thread() % 32 == 0) {
      shared_.ends[i][0] = range.min;
      shared_.ends[i][1] = range.max;
    }
    return range;
  }

  __device__ void count_outliers(const float* x, Ends ends) {
    for (int h = 0; h < heads_; ++h, x += tile_.rows) {
      int count = 0;
#pragma unroll 4
      for (int c = thread() % 32; c < tile_.rows; c += 32) count += is_outlier(x[c], ends) ? 1 : 0;
      count = __reduce_add_sync(0xFFFFFFFFU, count);
      if (thread() % 32 == 0 && count > 0) atomicAdd(counts_ + h, count);
    }
  }

  // Whole warps, also where fewer than four tokens are here: some rows are then fitted twice.
  __device__ void fit() {
    const int most = max(args_.grid_tokens * kRowLanes, 32);
    const int i = thread() / kRowLanes % args_.grid_tokens;
    Ends ends{0, 0};
    if (thread() < most) {
      const int levels = levels_at(tile_, tile_.planes, 0);
      // Rows of tokens that are left out were not loaded: one row is as good as another there.
      const bool live = token(i) >= page_.job.skip;
      const RowValues<FloatRow> values{{row(i) + thread() % kRowLanes}, kRowLanes, live ? width_ / kRowLanes : 0};
      ends = fit_row<Bfloat>(values, width_, levels, true,
                             live ? Ends{shared_.ends[i][0], shared_.ends[i][1]} : Ends{0, 0});
    }
    __syncthreads();
    if (thread() < args_.grid_tokens * kRowLanes && thread() % kRowLanes == 0) {
      shared_.ends[i][0] = ends.min;
      shared_.ends[i][1] = ends.max;
    }
  }

  __device__ void store() {
    const int i = thread();
    if (i >= args_.grid_tokens || token(i) < page_.job.skip) return;
    std::uint8_t* base = tile_.shared_grid != 0 ? page_.page() : page_.block(first_head_);
    auto* grid = reinterpret_cast<std::uint16_t*>(base);
    grid[tile_.min_offset / 2 + first_ + i] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(shared_.ends[i][0], 0));
    grid[tile_.max_offset / 2 + first_ + i] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(shared_.ends[i][1], 0));
  }

  const BlockSealPage& page_;
  const BlockSealArgs& args_;
  const BlockTile& tile_;
  int heads_;
  int first_head_;
  int first_;  // depth index
  int width_;  // values under one grid
  BlockGridShared& shared_;
  float* rows_;
  int* counts_;
};

// Codes and outliers of the values of one head.
template <bool Bfloat>
class BlockValueSeal {
 public:
  __device__ BlockValueSeal(const BlockSealPage& page, int head, std::uint8_t* memory)
      : page_(page),
        args_(page.args),
        tile_(page.args.format.value),
        head_(head),
        block_(page.block(head)),
        shared_(*reinterpret_cast<BlockValueShared*>(memory)),
        rows_(reinterpret_cast<float*>(memory + sizeof(BlockValueShared))),
        codes_(memory + sizeof(BlockValueShared) + kBlockSealWarps * tile_.rows * 4) {}

  // Steps first, first + stride.. of 16 places.
  __device__ void run(int first, int stride) {
    for (int i = thread(); i <= kTableStepsOnDevice; i += kBlockSealThreads) {
      shared_.nearest[i] = args_.value_nearest[i];
    }
    const BlockOutliers& list = tile_.outliers;
    int slot = 0;
    if (list.slots > 0) {
      slot = static_cast<int>(reinterpret_cast<const std::uint32_t*>(page_.page() + list.start_offset)[head_]);
      for (int step = 0; step < first; ++step) slot += static_cast<int>(page_.list_counts(head_)[step]);
    }
    for (int step = first; step < kPage / kBlockSealPlaces; step += stride) {
      const int first_place = step * kBlockSealPlaces;
      __syncthreads();
      for (int i = thread() / 32; i < kBlockSealPlaces; i += kBlockSealWarps) encode(first_place, i);
      __syncthreads();
      const auto* words = reinterpret_cast<const std::uint32_t*>(codes_);
      constexpr int fours = kBlockSealPlaces / kFour;
      PackTurns turns(true);
      for (const BlockPlane& plane : tile_.planes) {
        const int end = min((step + 1) * fours, static_cast<int>(plane.fours));
        if (step * fours >= end) continue;
        pack_fours(plane, tile_.rows / kTile, step * fours, end, words, BlockValueShared::kCodeStride / kFour,
                   step * fours, block_, turns);
      }
      if (list.slots > 0) slot = store_outliers(first_place, slot);
    }
  }

 private:
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int lane() const { return thread() % 32; }
  __device__ float* row() const { return rows_ + thread() / 32 * tile_.rows; }

  __device__ Ends grid_of(int place, int token) const {
    const std::uint8_t* base = tile_.shared_grid != 0 ? page_.page() : block_;
    const int at = tile_.shared_grid != 0 ? token : place;
    const auto* grid = reinterpret_cast<const std::uint16_t*>(base);
    return {ptx::widen2<Bfloat>(grid[tile_.min_offset / 2 + at]).x,
            ptx::widen2<Bfloat>(grid[tile_.max_offset / 2 + at]).x};
  }

  __device__ Ends measure(int place, bool live) const {
    if (!live) return {0, 0};
    Ends range = inner_range(FloatRow{row()}, tile_.rows, 0);
    range = {range_end<Bfloat>(range.min), range_end<Bfloat>(range.max)};
    auto* grid = reinterpret_cast<std::uint16_t*>(block_);
    if (lane() == 0) {
      grid[tile_.min_offset / 2 + place] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(range.min, 0));
      grid[tile_.max_offset / 2 + place] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(range.max, 0));
    }
    return range;
  }

  // A warp: place first + i of the page.
  __device__ void encode(int first, int i) {
    const int token = page_.token(head_, first + i);
    const bool live = token >= page_.job.skip;
    if (live) load_values<Bfloat>(page_, head_, token, row());
    const Ends ends = args_.grid_tokens > 0 ? grid_of(first + i, token) : measure(first + i, live);
    const BlockCoder coder(tile_, shared_.nearest, false, ends, levels_at(tile_, tile_.planes, first + i));
    for (int c = lane(); c < tile_.rows; c += 128) {
      float x[4] = {};
      std::uint32_t codes[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (live && c + 32 * j < tile_.rows) x[j] = row()[c + 32 * j];
      }
      if (live) coder.code(x, codes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (c + 32 * j >= tile_.rows) break;
        codes_[(c + 32 * j) * BlockValueShared::kCodeStride + i] = static_cast<std::uint8_t>(codes[j]);
        if (tile_.outliers.slots == 0) continue;
        const unsigned all = __ballot_sync(0xFFFFFFFFU, live && is_outlier(x[j], ends));
        if (lane() == 0) shared_.outliers[i][c / 32 + j] = all;
      }
    }
    __syncwarp();
  }

  // Slots from `slot` on, by place, then channel; returns the next free one.
  __device__ int store_outliers(int first, int slot) {
    const BlockOutliers& list = tile_.outliers;
    const int words = tile_.rows / 32;  // of a place; threads of whole warps have one each
    const bool mine = thread() < kBlockSealPlaces * words;
    const std::uint32_t own = mine ? shared_.outliers[thread() / words][thread() % words] : 0;
    int before = __popc(own);
#pragma unroll
    for (int span = 1; span < 32; span *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFU, before, span);
      if (lane() >= span) before += other;
    }
    if (lane() == 31) shared_.counts[thread() / 32] = before;
    before -= __popc(own);
    __syncthreads();
    int all = 0;
    for (int warp = 0; warp < kBlockSealWarps; ++warp) {
      if (warp == thread() / 32) before += all;
      all += shared_.counts[warp];
    }
    if (mine) {
      std::uint8_t* base = page_.page();
      const int place = first + thread() / words;
      int to = slot + before;
      for (std::uint32_t left = own; left != 0; left &= left - 1, ++to) {
        const int channel = thread() % words * 32 + __ffs(static_cast<int>(left)) - 1;
        reinterpret_cast<std::uint16_t*>(base + list.value_offset)[to] = value_at(place, channel);
        base[list.row_offset + to] = static_cast<std::uint8_t>(channel);
        base[list.depth_offset + to] = static_cast<std::uint8_t>(place);
      }
    }
    return slot + all;
  }
  __device__ std::uint16_t value_at(int place, int channel) const {
    const std::uint8_t* exact = page_.exact(head_) + page_.exact_format().value_at(page_.token(head_, place), channel);
    return *reinterpret_cast<const std::uint16_t*>(exact);
  }

  const BlockSealPage& page_;
  const BlockSealArgs& args_;
  const BlockTile& tile_;
  int head_;
  std::uint8_t* block_;
  BlockValueShared& shared_;
  float* rows_;
  std::uint8_t* codes_;
};

}  // namespace kvant::cuda
