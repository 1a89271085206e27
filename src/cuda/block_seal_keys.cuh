// Keys of block pages: one thread block per page, KV head and key tile. Its rows lie in shared memory by channel, those
// of left out tokens left out; a warp has a channel, eight threads where sums of least squares have the CPU's order.
#pragma once

#include "cuda/block_seal_turn.cuh"
#include "cuda/seal_widths.cuh"

namespace kvant::cuda {

template <bool Bfloat>
class BlockKeySeal {
 public:
  __device__ BlockKeySeal(const BlockSealPage& page, int head, bool rest, std::uint8_t* memory)
      : page_(page),
        args_(page.args),
        tile_(rest ? page.args.format.rest : page.args.format.key),
        head_(head),
        block_(page.block(head)),
        shared_(*reinterpret_cast<BlockKeyShared*>(memory)),
        keys_(reinterpret_cast<std::uint16_t*>(memory + sizeof(BlockKeyShared))),
        codes_(memory + sizeof(BlockKeyShared) + BlockKeyShared::keys_bytes(tile_.depth)),
        stride_(BlockKeyShared::code_stride(tile_.depth)) {}

  __device__ void run() {
    list_tokens();
    load();
    __syncthreads();
    if (shared_.count == 0) return;  // only left out tokens: all zeros
    if (args_.format.turns.pairs > 0) {
      turn_keys_back<Bfloat>(args_.format.turns, keys_, BlockKeyShared::kKeyStride, shared_.count, [&](int i) {
        return page_.job.position + page_.token(head_, tile_.first + shared_.kept[i]);
      });
      __syncthreads();
    }
    measure();
    __syncthreads();
    place();
    __syncthreads();
    if (args_.key_least_squares != 0) {
      fit();
      __syncthreads();
    }
    encode();
    __syncthreads();
    const auto* words = reinterpret_cast<const std::uint32_t*>(codes_);
    PackTurns turns(false);
    for (const BlockPlane& plane : shared_.planes) {
      if (plane.fours > 0) pack_fours(plane, row_tiles(), 0, plane.fours, words, stride_ / kFour, 0, block_, turns);
    }
  }

 private:
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int warp() const { return thread() / 32; }
  __device__ int lane() const { return thread() % 32; }
  __device__ int row_tiles() const { return (tile_.rows + kTile - 1) / kTile; }
  __device__ const std::uint16_t* channel(int c) const { return keys_ + c * BlockKeyShared::kKeyStride; }
  __device__ int levels(int place) const { return levels_at(tile_, shared_.planes, place); }

  // The tile's coded tokens in the order of its rows; codes of the others are 0.
  __device__ void list_tokens() {
    for (int i = thread(); i < kPage; i += kBlockSealThreads) shared_.position[i] = 255;
    for (int i = thread(); i < row_tiles() * kTile * stride_ / 4; i += kBlockSealThreads) {
      reinterpret_cast<std::uint32_t*>(codes_)[i] = 0;
    }
    for (int i = thread(); i <= kTableStepsOnDevice; i += kBlockSealThreads) shared_.nearest[i] = args_.key_nearest[i];
    __syncthreads();
    if (warp() > 0) return;
    int count = 0;
    for (int first = 0; first < tile_.rows; first += 32) {
      const int row = first + lane();
      const int token = row < tile_.rows ? page_.token(head_, tile_.first + row) : 0;
      const bool kept = row < tile_.rows && token >= page_.job.skip;
      const unsigned all = __ballot_sync(0xFFFFFFFFU, kept);
      const int at = count + __popc(all & ((1U << lane()) - 1U));
      if (kept) {
        shared_.kept[at] = static_cast<std::uint8_t>(row);
        shared_.position[token] = static_cast<std::uint8_t>(at);
      }
      count += __popc(all);
    }
    if (lane() == 0) shared_.count = count;
  }

  __device__ void load() {
    __syncthreads();
    const ExactFormat format = page_.exact_format();
    const std::uint8_t* exact = page_.exact(head_);
    const int per_tile = tile_.depth * 2;  // 16 bytes each
    for (int i = thread(); i < kPage / kTile * per_tile; i += kBlockSealThreads) {
      const int token_tile = i / per_tile;
      const int at = i % per_tile;
      const uint4 data = *reinterpret_cast<const uint4*>(exact + token_tile * format.tile_bytes() + at * 16);
      const std::uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int position = shared_.position[token_tile * kTile + at % 32 / 4 + 8 * (r & 1)];
        if (position == 255) continue;
        std::uint16_t* to =
            keys_ + (at / 32 * kTile + at % 4 * 2 + 8 * (r >> 1)) * BlockKeyShared::kKeyStride + position;
        to[0] = static_cast<std::uint16_t>(words[r]);
        to[BlockKeyShared::kKeyStride] = static_cast<std::uint16_t>(words[r] >> 16);
      }
    }
  }

  // A calibrated range, or an empty one.
  __device__ Ends given(int c) const {
    if (args_.key_ranges == nullptr) return {0, 0};
    const std::uint16_t* ends = args_.key_ranges + (head_ * tile_.depth + c) * 2;
    return {ptx::widen2<Bfloat>(ends[0]).x, ptx::widen2<Bfloat>(ends[1]).x};
  }

  __device__ void measure() {
    const int n = shared_.count;
    const int outside = min(tile_.outliers.per_vector / 2, (n - 1) / 2);
    for (int c = warp(); c < tile_.depth; c += kBlockSealWarps) {
      Ends range = given(c);
      if (!(range.max > range.min)) range = inner_range(HalfRow<Bfloat>{channel(c)}, n, outside);
      if (lane() != 0) continue;
      shared_.low[c] = range_end<Bfloat>(range.min);
      shared_.high[c] = range_end<Bfloat>(range.max);
    }
  }

  // What ranks a channel, summed in the order of its rows.
  __device__ double energy(int c) const {
    const std::uint16_t* x = channel(c);
    const int n = shared_.count;
    const auto value = [&](int i) { return static_cast<double>(ptx::widen2<Bfloat>(x[i]).x); };
    double sum = 0;
    if (args_.rank == KeyRank::magnitude) {
      for (int i = 0; i < n; ++i) sum = __dadd_rn(sum, fabs(value(i)));
    } else if (args_.rank == KeyRank::variance) {
      for (int i = 0; i < n; ++i) sum = __dadd_rn(sum, value(i));
      const double mean = __ddiv_rn(sum, n);
      sum = 0;
      for (int i = 0; i < n; ++i) {
        const double difference = __dsub_rn(value(i), mean);
        sum = __dadd_rn(sum, __dmul_rn(difference, difference));
      }
    } else {
      const double range = __dsub_rn(shared_.high[c], shared_.low[c]);
      sum = __dmul_rn(range, range);
    }
    return sum;
  }

  // Places of the channels, and the planes that follow from their widths.
  __device__ void place() {
    WidthShared<kMostDim>& widths = shared_.widths;
    const int depth = tile_.depth;
    const int c = thread();
    if (args_.rank == KeyRank::none) {
      if (c < depth) shared_.order[c] = static_cast<std::uint8_t>(c);
    } else {
      if (c < depth) widths.energy[c] = energy(c);
      __syncthreads();
      if (args_.rank == KeyRank::widths) {
        choose_widths(widths, depth, kBlockSealThreads, args_.low, args_.high, args_.budget);
      } else {
        rank_channels(widths, depth, kBlockSealThreads);
        __syncthreads();
        const int boosted = args_.boosted;
        place_channels(widths, depth, [&](int channel) { return widths.ranks[channel] < boosted ? 4 : 2; });
        __syncthreads();
      }
      if (c < depth) {
        const int at = widths.places[c];
        shared_.order[at] = static_cast<std::uint8_t>(c);
        block_[tile_.order_offset + at] = static_cast<std::uint8_t>(c);
      }
      if (tile_.counts_offset >= 0 && c < 6) {
        reinterpret_cast<std::uint16_t*>(block_ + tile_.counts_offset)[c] =
            static_cast<std::uint16_t>(widths.counts[c]);
      }
      __syncthreads();
    }
    if (thread() == 0) block_planes(tile_, block_, shared_.planes);
  }

  // The better grid of each channel in place of its range.
  __device__ void fit() {
    for (int at = thread() / kRowLanes; at < tile_.depth; at += kBlockSealThreads / kRowLanes) {
      const int c = shared_.order[at];
      const int row_lane = thread() % kRowLanes;
      const RowValues<HalfRow<Bfloat>> values{
          {channel(c) + row_lane}, kRowLanes, (shared_.count - row_lane + kRowLanes - 1) / kRowLanes};
      const int steps = levels(at);
      const Ends ends = fit_row<Bfloat>(values, shared_.count, steps % 2 == 0 ? steps / 2 : steps, true,
                                        {shared_.low[c], shared_.high[c]});
      if (row_lane != 0) continue;
      shared_.low[c] = ends.min;
      shared_.high[c] = ends.max;
    }
  }
  __device__ void encode() {
    const int n = shared_.count;
    for (int at = warp(); at < tile_.depth; at += kBlockSealWarps) {
      const int c = shared_.order[at];
      const std::uint16_t* row = channel(c);
      const Ends ends{shared_.low[c], shared_.high[c]};
      const BlockCoder coder(tile_, shared_.nearest, true, ends, levels(at));
      float x[4];
      std::uint32_t codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = ptx::widen2<Bfloat>(row[min(32 * j + lane(), n - 1)]).x;
      coder.code(x, codes);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 32 * j + lane();
        if (i < n) codes_[shared_.kept[i] * stride_ + at] = static_cast<std::uint8_t>(codes[j]);
      }
      if (lane() == 0) {
        auto* grid = reinterpret_cast<std::uint16_t*>(block_);
        grid[tile_.min_offset / 2 + at] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(ends.min, 0));
        grid[tile_.max_offset / 2 + at] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(ends.max, 0));
      }
      if (tile_.outliers.per_vector > 0) store_outliers(at, row, ends, x);
    }
  }

  // The slots of a channel: outliers by row, then unused ones. Under a calibrated range there may be more than slots:
  // then those farthest beyond it, of equal ones the first.
  __device__ void store_outliers(int at, const std::uint16_t* row, Ends ends, const float (&x)[4]) {
    const BlockOutliers& list = tile_.outliers;
    const int n = shared_.count;
    bool mine[4];
    int count = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      mine[j] = 32 * j + lane() < n && is_outlier(x[j], ends);
      count += __popc(__ballot_sync(0xFFFFFFFFU, mine[j]));
    }
    if (count > list.per_vector) {
#pragma unroll 1
      for (int j = 0; j < 4; ++j) mine[j] = mine[j] && farther(32 * j + lane(), row, ends) < list.per_vector;
    }
    auto* values = reinterpret_cast<std::uint16_t*>(block_ + list.value_offset) + at * list.per_vector;
    std::uint8_t* rows = block_ + list.row_offset + at * list.per_vector;
    int used = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned all = __ballot_sync(0xFFFFFFFFU, mine[j]);
      const int slot = used + __popc(all & ((1U << lane()) - 1U));
      if (mine[j]) {
        values[slot] = row[32 * j + lane()];
        rows[slot] = shared_.kept[32 * j + lane()];
      }
      used += __popc(all);
    }
    for (int slot = used + lane(); slot < list.per_vector; slot += 32) {
      values[slot] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(ends.max, 0));
    }
  }
  // How many outliers come before value i by their distance.
  __device__ int farther(int i, const std::uint16_t* row, Ends ends) const {
    const auto distance = [&](int k) {
      const float x = ptx::widen2<Bfloat>(row[k]).x;
      return fmaxf(__fsub_rn(ends.min, x), __fsub_rn(x, ends.max));
    };
    const float own = distance(i);
    int before = 0;
    for (int k = 0; k < shared_.count; ++k) {
      const float other = distance(k);
      before += other > own || (other == own && k < i) ? 1 : 0;
    }
    return before;
  }

  const BlockSealPage& page_;
  const BlockSealArgs& args_;
  const BlockTile& tile_;
  int head_;
  std::uint8_t* block_;
  BlockKeyShared& shared_;
  std::uint16_t* keys_;
  std::uint8_t* codes_;
  int stride_;
};

}  // namespace kvant::cuda
