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
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Words [vector][quad][2]: the high bytes of a quad's four integers, then the low bytes; value = 256 * high + low with
// signed bytes, so low is the lowest byte of value itself. A narrow x has its byte in the first word and 0 in the
// second.
template <class D, class V>
HWY_INLINE void StoreQuads(D di, V value, bool wide, std::int32_t* word) {
  const hn::Repartition<std::int16_t, D> d16;
  const hn::Repartition<std::uint8_t, D> d8;
  const hn::Repartition<std::uint64_t, D> d64;
  // Bytes 0 and 2 of each integer: low and high.
  const auto high = hn::ShiftLeft<8>(hn::Add(value, hn::Set(di, 128)));
  const auto both =
      wide ? hn::OddEven(hn::BitCast(d16, high), hn::BitCast(d16, value)) : hn::BitCast(d16, hn::ShiftLeft<16>(value));
  alignas(16) static constexpr std::uint8_t kOrder[16] = {2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12};
  const auto quads = hn::TableLookupBytes(hn::BitCast(d8, both), hn::LoadDup128(d8, kOrder));
  const auto packed = hn::LowerHalf(hn::ConcatEven(d64, hn::BitCast(d64, quads), hn::BitCast(d64, quads)));
  const hn::Half<D> half;
  hn::StoreU(hn::BitCast(half, packed), half, word);
}

// v at the tile's channels, in the order of the index list; padding is 0.
inline const float* Gather(const PackArgs& a, const float* v, int padded) {
  for (int i = 0; i < a.depth; ++i) a.scratch[i] = v[a.index[i]];
  for (int i = a.depth; i < padded; ++i) a.scratch[i] = 0.0F;
  return a.scratch;
}

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

// Rounds v * step / scale and returns the sum of mid * rounding error. Depth indices past `depth` become 0.
inline float RoundVector(const PackArgs& a, const float* v, const float* step, int padded, float scale, float inverse,
                         std::int32_t* words) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto unit = hn::Set(d, scale);
  const auto factor = hn::Set(d, inverse);
  auto error = hn::Zero(d);
  const auto round = [&](auto value, int i) HWY_ATTR {
    const auto rounded = hn::NearestInt(hn::Mul(value, factor));
    StoreQuads(di, rounded, a.wide, words + i / 2);
    if (a.mid == nullptr) return;
    error = hn::MulAdd(hn::LoadU(d, a.mid + i), hn::NegMulAdd(hn::ConvertTo(d, rounded), unit, value), error);
  };
  int i = 0;
  for (; i + lanes <= a.depth; i += lanes) round(hn::Mul(hn::LoadU(d, v + i), hn::LoadU(d, step + i)), i);
  for (; i < padded; i += lanes) {
    alignas(64) float rest[16] = {};
    for (int j = i; j < std::min(i + lanes, a.depth); ++j) rest[j - i] = v[j] * step[j];
    round(hn::Load(d, rest), i);
  }
  return hn::GetLane(hn::SumOfLanes(d, error));
}

void PackX(const PackArgs& a) {
  const int padded = base::round_up(a.depth, kDepthPad);
  const float limit = a.wide ? kWideMax : kNarrowMax;
  float listed[kMaxDepth];
  const float* step = a.step;
  if (a.index != nullptr) {
    for (int i = 0; i < a.depth; ++i) listed[i] = a.step[a.index[i]];
    step = listed;
  }
  const auto vector = [&](int n) HWY_ATTR {
    const float* v = a.v + n * a.v_stride;
    return a.index != nullptr ? Gather(a, v, padded) : v;
  };
  // All peaks first: the reductions and divisions of several vectors overlap.
  for (int n = 0; n < a.vectors; ++n) {
    const std::int32_t bits = Peak(vector(n), step, a.depth);
    float peak = 0;
    std::memcpy(&peak, &bits, sizeof peak);
    a.scale[n] = bits < 0x7F800000 ? std::max(peak, limit * kFinestX) / limit : std::numeric_limits<float>::quiet_NaN();
  }
  std::int32_t* words = a.x;
  for (int n = 0; n < a.vectors; ++n, words += vector_words(a.depth)) {
    if (std::isnan(a.scale[n])) {  // the scale makes the product NaN
      std::memset(words, 0, static_cast<std::size_t>(vector_words(a.depth)) * sizeof *words);
      a.bias[n] = a.scale[n];
      continue;
    }
    a.bias[n] += RoundVector(a, vector(n), step, padded, a.scale[n], 1.0F / a.scale[n], words);
  }
}

void FillPack(Kernels& k) {
  k.pack_x = PackX;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillPack);
void fill_pack(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillPack)(k);
}
}  // namespace kvant::tiles
#endif
