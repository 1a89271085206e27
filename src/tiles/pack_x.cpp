// Rounds x to the integers of multiply_codes, once per instruction set.
#include <algorithm>
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

// scratch[d] = v * step at the tile's channels, zero-padded; returns the bits of the largest magnitude: as integers,
// magnitudes order as they do as floats, and infinities and NaN come last.
inline std::int32_t ScaleVector(const PackArgs& a, const float* v, int padded) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto peak = hn::Zero(di);
  int i = 0;
  if (a.index == nullptr) {
    for (; i + lanes <= a.depth; i += lanes) {
      const auto value = hn::Mul(hn::LoadU(d, v + i), hn::LoadU(d, a.step + i));
      hn::StoreU(value, d, a.scratch + i);
      peak = hn::Max(peak, hn::BitCast(di, hn::Abs(value)));
    }
  }
  const int rest = i;
  for (; i < a.depth; ++i) {
    const int channel = a.index != nullptr ? a.index[i] : i;
    a.scratch[i] = v[channel] * a.step[channel];
  }
  for (; i < padded; ++i) a.scratch[i] = 0.0F;
  for (i = rest; i < padded; i += lanes) peak = hn::Max(peak, hn::BitCast(di, hn::Abs(hn::LoadU(d, a.scratch + i))));
  return hn::GetLane(hn::MaxOfLanes(di, peak));
}

void PackX(const PackArgs& a) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int padded = base::round_up(a.depth, kDepthPad);
  const float limit = a.wide ? kWideMax : kNarrowMax;
  std::int32_t* words = a.x;
  for (int n = 0; n < a.vectors; ++n) {
    const std::int32_t bits = ScaleVector(a, a.v + n * a.v_stride, padded);
    const bool finite = bits < 0x7F800000;
    float peak = 0;
    std::memcpy(&peak, &bits, sizeof peak);
    peak = std::max(peak, limit * kFinestX);
    a.scale[n] = finite ? peak / limit : std::numeric_limits<float>::quiet_NaN();
    if (!finite) {  // the scale makes the product NaN
      std::memset(words, 0, static_cast<std::size_t>(vector_words(a.depth)) * sizeof *words);
      words += vector_words(a.depth);
      a.bias[n] = a.scale[n];
      continue;
    }
    const auto scale = hn::Set(d, a.scale[n]);
    const auto factor = hn::Set(d, limit / peak);
    auto error = hn::Zero(d);
    for (int i = 0; i < padded; i += lanes, words += lanes / 2) {
      const auto value = hn::LoadU(d, a.scratch + i);
      const auto rounded = hn::NearestInt(hn::Mul(value, factor));
      StoreQuads(di, rounded, a.wide, words);
      if (a.mid != nullptr) {
        const auto lost = hn::NegMulAdd(hn::ConvertTo(d, rounded), scale, value);
        error = hn::MulAdd(hn::LoadU(d, a.mid + i), lost, error);
      }
    }
    if (a.mid != nullptr) a.bias[n] += hn::GetLane(hn::SumOfLanes(d, error));
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
