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

// Words [vector][quad][2]. VNNI: high bytes of the quad, low bytes of the quad. Elsewhere: 16-bit pairs of
// the even and of the odd depth indices, which meet the even and odd bytes of a group.

#if KVANT_VNNI
// value = 256 * high + low with signed bytes; the byte of low is the lowest byte of value itself.
HWY_INLINE void StoreQuads(__m512i value, bool wide, std::int32_t* word) {
  const __m512i rounded = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
  const __m128i high = _mm512_cvtepi32_epi8(wide ? rounded : value);
  const __m128i low = wide ? _mm512_cvtepi32_epi8(value) : _mm_setzero_si128();
  _mm_storeu_si128(reinterpret_cast<__m128i*>(word), _mm_unpacklo_epi32(high, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(word + 4), _mm_unpackhi_epi32(high, low));
}
#else
HWY_INLINE void StoreQuads(const std::int32_t* integers, std::int32_t* word) {
  for (int q = 0; q < 4; ++q, integers += 4, word += 2) {
    word[0] = static_cast<std::int32_t>((static_cast<std::uint32_t>(integers[2]) << 16) | (integers[0] & 0xFFFF));
    word[1] = static_cast<std::int32_t>((static_cast<std::uint32_t>(integers[3]) << 16) | (integers[1] & 0xFFFF));
  }
}
#endif

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
  [[maybe_unused]] const int lanes = static_cast<int>(hn::Lanes(d));
  const int padded = base::round_up(a.depth, kDepthPad);
  const float limit = a.wide ? kWideMax : kNarrowMax;
  std::int32_t* words = a.x;
  for (int n = 0; n < a.vectors; ++n) {
    const std::int32_t bits = ScaleVector(a, a.v + n * a.v_stride, padded);
    const bool finite = bits < 0x7F800000;
    float peak = 0;
    std::memcpy(&peak, &bits, sizeof peak);
    peak = std::max(peak, limit * kFinestX);
    const float inverse = finite ? limit / peak : 0.0F;
    a.scale[n] = finite ? peak / limit : std::numeric_limits<float>::quiet_NaN();
    const auto scale = hn::Set(d, a.scale[n]);
    const auto factor = hn::Set(d, inverse);
    auto error = hn::Zero(d);
    for (int i = 0; i < padded; i += 16, words += 8) {
#if KVANT_VNNI
      const auto value = hn::LoadU(d, a.scratch + i);
      const auto rounded = hn::NearestInt(hn::Mul(value, factor));
      if (a.mid != nullptr) {
        const auto lost = hn::NegMulAdd(hn::ConvertTo(d, rounded), scale, value);
        error = hn::MulAdd(hn::LoadU(d, a.mid + i), lost, error);
      }
      StoreQuads(rounded.raw, a.wide, words);
#else
      alignas(64) std::int32_t integers[16];
      for (int lane = 0; lane < 16; lane += lanes) {
        const auto value = hn::LoadU(d, a.scratch + i + lane);
        const auto rounded = hn::Round(hn::Mul(value, factor));
        if (a.mid != nullptr) {
          error = hn::MulAdd(hn::LoadU(d, a.mid + i + lane), hn::NegMulAdd(rounded, scale, value), error);
        }
        hn::StoreU(finite ? hn::ConvertTo(di, rounded) : hn::Zero(di), di, integers + lane);
      }
      StoreQuads(integers, words);
#endif
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
