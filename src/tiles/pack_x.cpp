// Rounds x to the integers of multiply_codes, once per instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/pack_x.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "tiles/kernels.hpp"
#include "tiles/matrix.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adding 1.5 * 2^23 rounds a float of less than 2^22 to the nearest integer and leaves it in the lowest bits.
constexpr float kRounder = 12582912.0F;

// Words [vector][quad][2]: the high bytes of a quad's four integers, then the low bytes; value = 256 * high + low with
// signed bytes, so low is the lowest byte of value itself. A narrow x has its byte in the first word and 0 in the
// second. Here: two registers of integers in the lowest 16 bits of each lane, in the order of depth.
template <class D, class V>
HWY_INLINE V MakeQuads(D di, V first, V second, bool wide) {
  const hn::Repartition<std::int16_t, D> d16;
  const hn::Repartition<std::uint8_t, D> d8;
  const hn::Repartition<std::uint64_t, D> d64;
  alignas(16) static constexpr std::uint8_t kOrder[16] = {2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12};
  const auto order = hn::LoadDup128(d8, kOrder);
  // Bytes 2 and 0 of each lane become high and low.
  const auto quads = [&](V value) HWY_ATTR {
    const auto high = hn::ShiftLeft<8>(hn::Add(value, hn::Set(di, 128)));
    const auto both = wide ? hn::OddEven(hn::BitCast(d16, high), hn::BitCast(d16, value))
                           : hn::BitCast(d16, hn::ShiftLeft<16>(value));
    return hn::BitCast(d64, hn::TableLookupBytes(hn::BitCast(d8, both), order));
  };
  return hn::BitCast(di, hn::ConcatEven(d64, quads(second), quads(first)));
}

// The same for pmaddwd, words [vector][quad][2]: integers of the even depth indices, then of the odd ones, 16 bits
// each.
template <class D, class V>
HWY_INLINE V MakePairs(D di, V first, V second) {
  const hn::Repartition<std::uint8_t, D> d8;
  const hn::Repartition<std::uint64_t, D> d64;
  alignas(16) static constexpr std::uint8_t kOrder[16] = {0, 1, 8, 9, 4, 5, 12, 13, 0, 1, 8, 9, 4, 5, 12, 13};
  const auto order = hn::LoadDup128(d8, kOrder);
  const auto pairs = [&](V value)
                         HWY_ATTR { return hn::BitCast(d64, hn::TableLookupBytes(hn::BitCast(d8, value), order)); };
  return hn::BitCast(di, hn::ConcatEven(d64, pairs(second), pairs(first)));
}

// Where the words of a vector go: two per quad, as above.
struct QuadWords {
  std::int32_t* words;
  bool wide;

  QuadWords(const PackArgs& a, int n) : words(a.x + n * vector_words(a.depth)), wide(a.wide) {}
  template <class D, class V>
  HWY_INLINE void store(D di, V first, V second, int i) const {
#if KVANT_MADD
    hn::StoreU(MakePairs(di, first, second), di, words + i / 2);
#else
    hn::StoreU(MakeQuads(di, first, second, wide), di, words + i / 2);
#endif
  }
  template <class D, class V>
  HWY_INLINE void store(D di, const V (&x)[4], int i) const {
    store(di, x[0], x[1], i);
    store(di, x[2], x[3], i + 2 * static_cast<int>(hn::Lanes(di)));
  }
};

// Rows of a matrix tile (matrix.hpp): [step of 64 depth indices][vector][high, low][16 words], no low words if narrow.
struct TileRows {
  std::int32_t* words;
  std::int64_t step;
  bool wide;

  TileRows(const PackArgs& a, int n)
      : words(a.x + n * (a.wide ? 32 : 16)), step(std::int64_t{a.vectors} * (a.wide ? 32 : 16)), wide(a.wide) {}
  template <class D, class V>
  HWY_INLINE void store(D di, V first, V second, int i) const {
    const V quads = MakeQuads(di, first, second, wide);
    const hn::Half<D> half;
    std::int32_t* to = words + i / kMatrixDepth * step + i % kMatrixDepth / kQuad;
    hn::StoreU(hn::LowerHalf(half, hn::ConcatEven(di, quads, quads)), half, to);
    if (wide) hn::StoreU(hn::LowerHalf(half, hn::ConcatOdd(di, quads, quads)), half, to + kLanes);
  }
  // Twice as many: whole rows with AVX-512, which a tile load does not have to wait for as long as for halves.
  template <class D, class V>
  HWY_INLINE void store(D di, const V (&x)[4], int i) const {
    const V low = MakeQuads(di, x[0], x[1], wide);
    const V high = MakeQuads(di, x[2], x[3], wide);
    std::int32_t* to = words + i / kMatrixDepth * step + i % kMatrixDepth / kQuad;
    hn::StoreU(hn::ConcatEven(di, high, low), di, to);
    if (wide) hn::StoreU(hn::ConcatOdd(di, high, low), di, to + kLanes);
  }
};

// The largest |v * step|, as the bits of a float: as integers, magnitudes order as they do as floats, and infinities
// and NaN come last.
inline std::int32_t Peak(const float* v, const float* step, int depth) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto first = hn::Zero(di);
  auto second = hn::Zero(di);
  const auto magnitude = [&](int i) HWY_ATTR {
    return hn::BitCast(di, hn::Abs(hn::Mul(hn::LoadU(d, v + i), hn::LoadU(d, step + i))));
  };
  int i = 0;
  for (; i + 2 * lanes <= depth; i += 2 * lanes) {
    first = hn::Max(first, magnitude(i));
    second = hn::Max(second, magnitude(i + lanes));
  }
  std::int32_t peak = hn::GetLane(hn::MaxOfLanes(di, hn::Max(first, second)));
  for (; i < depth; ++i) {
    const float last = std::fabs(v[i] * step[i]);
    std::int32_t bits = 0;
    std::memcpy(&bits, &last, sizeof bits);
    peak = std::max(peak, bits);
  }
  return peak;
}

// Rounds v * step / scale and returns sum v * middle - scale * sum mid * integer. Integers past `depth` are 0.
template <class Words>
float RoundVector(const PackArgs& a, const float* v, int padded, float scale, Words words) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  using V = hn::VFromD<decltype(d)>;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto factor = hn::Set(d, 1.0F / scale);
  const auto rounder = hn::Set(d, kRounder);
  const float* step = a.step;
  const float* middle = a.middle;
  const float* mid = a.mid;
  // Two sums of each kind: one would wait for itself.
  V exact[2] = {hn::Zero(d), hn::Zero(d)};
  V integers[2] = {hn::Zero(d), hn::Zero(d)};
  const auto round = [&](const float* vs, const float* steps, const float* middles, int i, int sum) HWY_ATTR {
    const auto x = hn::LoadU(d, vs);
    const auto rounded = hn::MulAdd(hn::Mul(x, hn::LoadU(d, steps)), factor, rounder);
    exact[sum] = hn::MulAdd(x, hn::LoadU(d, middles), exact[sum]);
    integers[sum] = hn::MulAdd(hn::LoadU(d, mid + i), hn::Sub(rounded, rounder), integers[sum]);
    return hn::BitCast(di, rounded);
  };
  const auto at = [&](int i, int sum) HWY_ATTR { return round(v + i, step + i, middle + i, i, sum); };
  int i = 0;
  for (; i + 4 * lanes <= a.depth; i += 4 * lanes) {
    const hn::VFromD<decltype(di)> x[4] = {at(i, 0), at(i + lanes, 1), at(i + 2 * lanes, 0), at(i + 3 * lanes, 1)};
    words.store(di, x, i);
  }
  for (; i + 2 * lanes <= a.depth; i += 2 * lanes) {
    const auto first = at(i, 0);
    words.store(di, first, at(i + lanes, 1), i);
  }
  for (; i < padded; i += 2 * lanes) {
    alignas(64) float rest[3][32] = {};
    for (int j = i; j < std::min(i + 2 * lanes, a.depth); ++j) {
      rest[0][j - i] = v[j];
      rest[1][j - i] = step[j];
      rest[2][j - i] = middle[j];
    }
    const auto first = round(rest[0], rest[1], rest[2], i, 0);
    words.store(di, first, round(rest[0] + lanes, rest[1] + lanes, rest[2] + lanes, i + lanes, 1), i);
  }
  const auto unit = hn::Set(d, scale);
  return hn::GetLane(
      hn::SumOfLanes(d, hn::NegMulAdd(hn::Add(integers[0], integers[1]), unit, hn::Add(exact[0], exact[1]))));
}

template <class Words>
void PackVectors(const PackArgs& a) {
  const int padded = base::round_up(a.depth, kDepthPad);
  const float limit = a.wide ? kWideMax : kNarrowMax;
  // All peaks first: the reductions and divisions of several vectors overlap.
  for (int n = 0; n < a.vectors; ++n) {
    const std::int32_t bits = Peak(a.v + n * a.v_stride, a.step, a.depth);
    float peak = 0;
    std::memcpy(&peak, &bits, sizeof peak);
    a.scale[n] = bits < 0x7F800000 ? std::max(peak, limit * kFinestX) / limit : std::numeric_limits<float>::quiet_NaN();
  }
  for (int n = 0; n < a.vectors; ++n) {
    const Words words(a, n);
    if (std::isnan(a.scale[n])) {  // the scale makes the product NaN, whatever the integers
      const hn::CappedTag<std::int32_t, 16> di;
      for (int i = 0; i < padded; i += 2 * static_cast<int>(hn::Lanes(di)))
        words.store(di, hn::Zero(di), hn::Zero(di), i);
      a.bias[n] = a.scale[n];
      continue;
    }
    a.bias[n] = RoundVector(a, a.v + n * a.v_stride, padded, a.scale[n], words);
  }
}

void PackX(const PackArgs& a) {
  PackVectors<QuadWords>(a);
}

void PackTileRows(const PackArgs& a) {
  if (a.vectors < kMatrixVectors) return PackX(a);
  PackVectors<TileRows>(a);
}

void FillPack(Kernels& k) {
  k.pack_x = PackX;
}

void FillMatrixPack(Kernels& k) {
  k.pack_x = PackTileRows;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillPack);
void fill_pack(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillPack)(k);
}
HWY_EXPORT(FillMatrixPack);
void fill_matrix_pack(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillMatrixPack)(k);
}
}  // namespace kvant::tiles
#endif
