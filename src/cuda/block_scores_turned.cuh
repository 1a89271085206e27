// Scores of a block page whose keys are those before RoPE, for few query vectors: keys are turned in registers on their
// way from codes to the matrix instruction, which takes them in half precision. All before is binary32: products of
// half precision took a seventh less time, but twice as wrong they left the tolerance; angles of half precision took
// as long.
//
// A token's angle is that of the page's first token, by which the queries are turned back once a page, plus that of its
// place in the page, from a table that all pages share (BlockTurns::places). A lane has both channels of its pairs, so
// they turn without a shuffle. Whatever scale a pair's keys have goes to its queries: keys are numbers up to 1, queries
// two halves each, their rest in a column of its own.
#pragma once

#include "cuda/block_angles.cuh"
#include "cuda/block_scores.cuh"

namespace kvant::cuda {

// Rows g and g + 8 of one four of channels: registers 0 and 1 of a row tile.
struct TwoRowWords {
  static constexpr int four(int /*r*/) { return 0; }
  static constexpr int row(int r) { return r % 2 * 8; }
  static constexpr int single_group(int /*r*/) { return 0; }
  static __device__ __forceinline__ int single_shift(int first_four, int /*r*/) { return 4 * (first_four & 1); }
  static constexpr bool paired = true;
  static __device__ __forceinline__ std::uint32_t keep(std::uint32_t x) { return x; }
};

template <class C>
class BlockTurnedScores : public BlockScores<C> {
 public:
  using BlockScores<C>::BlockScores;

  // Of the page whose keys are here, in units of log2, into shared memory. position: of its first token.
  __device__ void score(int position) {
    const float factor = prepare(position);
    with_kind([&](const auto kind, const auto adjacent) {
#pragma unroll 1
      for (int chunk = 0; chunk < kPage / 64; ++chunk) {
        score_chunk<decltype(kind)::value, decltype(adjacent)::value>(chunk, factor);
      }
    });
    __syncwarp();
  }

 protected:
  using Scores = BlockScores<C>;
  using Scores::clear;
  using Scores::f_;
  using Scores::fixed_product;
  using Scores::fixed_scores;
  using Scores::key_unit_;
  using Scores::kFixedRange;
  using Scores::lane_;
  using Scores::largest_magnitude;
  using Scores::own_;
  using Scores::owner_;
  using Scores::query;
  using Scores::raw;
  using Scores::scale_;
  using Scores::scores;
  using Scores::widen;

 private:
  static_assert(C::team == 1);
  static constexpr int kPairs = C::key.dim / 2;
  static constexpr int kRounds = (kPairs + 31) / 32;
  static constexpr float kHeadroom = 0.0625F;  // turned queries times keys of bfloat16 next to its limit stay finite

  // Queries of a unit as B fragments: of each lane two matrix instructions.
  __device__ uint4* query_fragments() const {
    return reinterpret_cast<uint4*>(own_ + C::x_offset);
  }
  // Of a unit, t and pair: the grid's step and its value at -2^15 steps, of the first channel, then of the second.
  __device__ float4* grids() const {
    return reinterpret_cast<float4*>(own_ + C::x_offset + C::steps * C::turned_query_bytes);
  }
  static __device__ __forceinline__ void store_half(uint4* to, int word, int half, std::uint16_t x) {
    reinterpret_cast<std::uint16_t*>(to)[2 * word + half] = x;
  }

  template <class Body>
  __device__ __forceinline__ void with_kind(const Body& body) const {
    const auto with_codes = [&](const auto adjacent) {
      switch (f_.key.codes) {
        case BlockCodes::table2:
          return body(std::integral_constant<BlockCodes, BlockCodes::table2>(), adjacent);
        case BlockCodes::table3:
          return body(std::integral_constant<BlockCodes, BlockCodes::table3>(), adjacent);
        default:
          return body(std::integral_constant<BlockCodes, BlockCodes::table4>(), adjacent);
      }
    };
    f_.turns.adjacent() ? with_codes(std::true_type()) : with_codes(std::false_type());
  }

  // {step, lowest value} of a channel's grid.
  __device__ __forceinline__ float2 grid_of(int channel) const {
    const float low = widen(raw() + f_.key.min_offset + 2 * channel);
    return {(widen(raw() + f_.key.max_offset + 2 * channel) - low) * f_.key.rate, low};
  }

  // Queries turned back by the angle of the page's first token, grids, and what outliers add to scores. Returns what
  // makes sums of products scores of vector t.
  __device__ __forceinline__ float prepare(int position) {
    const float outlier_factor = start_outliers();
    float turned[kRounds][C::vectors][2];
    float peak[4] = {1e-30F, 1e-30F, 1e-30F, 1e-30F};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int pair = min(32 * round + lane_, kPairs - 1);
      const bool live = 32 * round + lane_ < kPairs;
      const TurnPlace place = f_.turns.place(pair);
      float2 angle{1, 0};
      if (pair < f_.turns.pairs) {
        angle = sincos_of_turns(__dmul_rn(position, f_.turns.turns[pair]));
        angle = {angle.x * f_.turns.magnitude, angle.y * f_.turns.magnitude};
      }
      const float4 a = query(place.first);
      const float4 b = query(place.second);
      const float firsts[4] = {a.x, a.y, a.z, a.w};
      const float seconds[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int k = 0; k < C::vectors; ++k) {
        turned[round][k][0] = firsts[k] * angle.x + seconds[k] * angle.y;
        turned[round][k][1] = seconds[k] * angle.x - firsts[k] * angle.y;
      }
      if (outlier_factor != 0 && live) add_outliers(place, turned[round], outlier_factor);

      const float2 first = grid_of(place.first);
      const float2 second = grid_of(place.second);
      constexpr float steps = kTableStepsOnDevice;
      const float most = fmaxf(fmaxf(fmaxf(fabsf(first.y), fabsf(fmaf(first.x, steps, first.y))), 1e-30F),
                               fmaxf(fabsf(second.y), fabsf(fmaf(second.x, steps, second.y))));
      const float down = 1.0F / most;
#pragma unroll
      for (int k = 0; k < C::vectors; ++k) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          turned[round][k][side] *= kHeadroom * most;
          peak[k] = fmaxf(peak[k], fabsf(turned[round][k][side]));
        }
      }
      if (live) store_grid(place, first, second, down);
    }
    const float top = combine_lanes(peak, [](float x, float y) { return fmaxf(x, y); });
    const float up = ptx::reciprocal(top);
#pragma unroll
    for (int k = 0; k < C::vectors; ++k) {
      const float factor = __shfl_sync(0xFFFFFFFFU, up, k);
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int pair = 32 * round + lane_;
        if (pair < kPairs) store_query(f_.turns.place(pair), k, turned[round][k], factor);
      }
    }
    __syncwarp();
    return top * (scale_ * (1.0F / kHeadroom));
  }

  __device__ __forceinline__ void store_grid(const TurnPlace& place, float2 first, float2 second, float down) const {
    const float steps[2] = {first.x * down, second.x * down};
    grids()[4 * (4 * place.unit + place.lane) + place.slot] = {steps[0], fmaf(steps[0], -kRaised, first.y * down),
                                                               steps[1], fmaf(steps[1], -kRaised, second.y * down)};
  }
  // Vector k's columns: 2k, and 2k + 1 with what half precision leaves.
  __device__ __forceinline__ void store_query(const TurnPlace& place, int k, const float (&turned)[2],
                                              float factor) const {
    const float x = turned[0] * factor;
    const float y = turned[1] * factor;
    const std::uint32_t most = ptx::narrow2<false>(x, y);
    const float2 kept = ptx::widen2<false>(most);
    const std::uint32_t rest = ptx::narrow2<false>(x - kept.x, y - kept.y);
    uint4* const to = query_fragments() + 32 * place.unit + 4 * (2 * k) + place.lane;
    const int word = place.slot / 2 * 2;
    store_half(to, word, place.slot % 2, static_cast<std::uint16_t>(most));
    store_half(to, word + 1, place.slot % 2, static_cast<std::uint16_t>(most >> 16));
    store_half(to + 4, word, place.slot % 2, static_cast<std::uint16_t>(rest));
    store_half(to + 4, word + 1, place.slot % 2, static_cast<std::uint16_t>(rest >> 16));
  }

  // What makes outliers fixed point; 0: there are none. A pair of queries up to 1 is no longer than 1.5 however turned.
  __device__ __forceinline__ float start_outliers() {
    key_unit_ = 0;
    const BlockOutliers& list = f_.key.outliers;
    if (list.slots == 0) return 0;
    const float bound = 2 * largest_magnitude(raw() + f_.key.min_offset, 4 * C::key.dim + 2 * list.slots);
    if (bound == 0) return 0;
    clear(fixed_scores(0), C::vectors * C::s_stride);
    __syncwarp();
    const float longest = 1.5F * fmaxf(1.0F, f_.turns.magnitude);
    key_unit_ = bound * (scale_ * (longest / kFixedRange));
    return kFixedRange / longest * ptx::reciprocal(bound);
  }
  // Those of a pair's channels (BlockScores::add_key_outliers), turned as their tokens are. Four at a time: angles come
  // from memory.
  __device__ __forceinline__ void add_outliers(const TurnPlace& place, const float (&turned)[C::vectors][2],
                                               float factor) const {
    const BlockOutliers& list = f_.key.outliers;
    const typename Scores::CodeEnds ends[2] = {this->code_ends(place.first), this->code_ends(place.second)};
#pragma unroll 1
    for (int first = 0; first < list.per_vector; first += 2) {
      float2 angle[2][2];
      float rest[2][2];
      int rows[2][2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int slot = (side == 0 ? place.first : place.second) * list.per_vector + first;
        const float2 two =
            ptx::widen2<C::bfloat>(*reinterpret_cast<const std::uint32_t*>(raw() + list.value_offset + 2 * slot));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rows[side][i] = raw()[list.row_offset + slot + i];
          angle[side][i] = angle_in_page(rows[side][i], place);
          rest[side][i] = beyond(ends[side], i == 0 ? two.x : two.y) * factor;
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (rest[side][i] == 0) continue;
#pragma unroll
          for (int k = 0; k < C::vectors; ++k) {
            const float2 a = angle[side][i];
            const float x =
                side == 0 ? turned[k][0] * a.x + turned[k][1] * a.y : turned[k][1] * a.x - turned[k][0] * a.y;
            atomicAdd(fixed_scores(k) + rows[side][i], fixed_product(x, rest[side][i]));
          }
        }
      }
    }
  }
  // What a value has beyond what its code says: within the range nothing, as slots have that are not used.
  static __device__ __forceinline__ float beyond(const typename Scores::CodeEnds& ends, float value) {
    if (value >= ends.low && value <= ends.high) return 0;
    return value - (value > ends.high ? ends.high_code : ends.low_code);
  }
  __device__ __forceinline__ float2 angle_in_page(int row, const TurnPlace& place) const {
    const float* at = f_.turns.places + turn_entry(C::key.dim, row, place);
    return {__ldg(at), __ldg(at + 2)};
  }

  // The fours of channels that a unit's pairs have their first and their second channels in, of t = 0; where channels
  // of a pair are neighbours, those of two and two pairs.
  __device__ __forceinline__ int2 fours_of(int unit) const {
    const int whole = f_.turns.adjacent() ? 0 : f_.turns.pairs / kTile;  // units that turn
    if (unit < whole) return {4 * unit, 4 * (unit + whole)};
    return {8 * unit, 8 * unit + 4};
  }

  // Steps of row tile j in two of a four's channels, 0 and 1 or 2 and 3, or, of neighbours, 0 and 2 or 1 and 3: plus
  // kRaised, as the second byte of a float.
  static constexpr float kRaised = 0x1p15F;
  template <BlockCodes Codes, bool Adjacent>
  static __device__ __forceinline__ float2 steps_of(const StepCodes& codes, int j, int r, int which) {
    constexpr int distance = pair_distance(Codes);
    const int low = j / distance % 2 == 0 ? j : j - distance;
    const unsigned upper = low == j ? 0 : 1;
    const auto raise = [](std::uint32_t word, unsigned byte) {
      return __uint_as_float(__byte_perm(word, 0x47000000U, 0x7604U + 16 * byte));
    };
    if constexpr (Adjacent) {
      const unsigned byte = upper + 2 * static_cast<unsigned>(which);
      return {raise(codes[low][r], byte), raise(codes[low + distance][r], byte)};
    } else {
      const std::uint32_t word = codes[low + which * distance][r];
      return {raise(word, upper), raise(word, upper + 2)};
    }
  }

  // Tokens of a chunk, all channels.
  template <BlockCodes Codes, bool Adjacent>
  __device__ __forceinline__ void score_chunk(int chunk, float factor) {
    float sums[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
#pragma unroll 1
    for (int unit = 0; unit < C::steps; ++unit) {
      const int2 fours = fours_of(unit);
      StepCodes codes[2];
      load_step<Codes, kPage / kTile, TwoRowWords>(f_.key, nullptr, raw(), chunk, owner_.g, fours.x + owner_.t,
                                                   codes[0]);
      load_step<Codes, kPage / kTile, TwoRowWords>(f_.key, nullptr, raw(), chunk, owner_.g, fours.y + owner_.t,
                                                   codes[1]);
      const uint4 q = query_fragments()[32 * unit + lane_];
      const float4* const grid = grids() + 4 * (4 * unit + owner_.t);
      const float4 g[4] = {grid[0], grid[1], grid[2], grid[3]};
      const auto* angles = reinterpret_cast<const float4*>(f_.turns.places) + 128 * unit + lane_;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t keys[2][4];  // [pairs 0 and 1, 2 and 3]: an A fragment
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
          for (int two = 0; two < 2; ++two) {
            const float4 angle = __ldg(angles + 128 * C::steps * (4 * chunk + j) + 64 * row + 32 * two);
            float2 x = steps_of<Codes, Adjacent>(codes[Adjacent ? two : 0], j, row, Adjacent ? 0 : two);
            float2 y = steps_of<Codes, Adjacent>(codes[Adjacent ? two : 1], j, row, Adjacent ? 1 : two);
            x = {fmaf(x.x, g[2 * two].x, g[2 * two].y), fmaf(x.y, g[2 * two + 1].x, g[2 * two + 1].y)};
            y = {fmaf(y.x, g[2 * two].z, g[2 * two].w), fmaf(y.y, g[2 * two + 1].z, g[2 * two + 1].w)};
            keys[two][row] = ptx::narrow2<false>(x.x * angle.x - y.x * angle.z, x.y * angle.y - y.y * angle.w);
            keys[two][2 + row] = ptx::narrow2<false>(x.x * angle.z + y.x * angle.x, x.y * angle.w + y.y * angle.y);
          }
        }
        ptx::mma_half<false>(sums[j], {keys[0][0], keys[0][1], keys[0][2], keys[0][3]}, q.x, q.y);
        ptx::mma_half<false>(sums[j], {keys[1][0], keys[1][1], keys[1][2], keys[1][3]}, q.z, q.w);
      }
    }
    float s[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) s[j][e] = (sums[j][2 * e] + sums[j][2 * e + 1]) * factor;
    }
    this->store_scores(f_.key, chunk, key_unit_ != 0, s, scores(owner_.t));
  }
};

}  // namespace kvant::cuda
