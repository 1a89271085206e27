// Products with tiles, once per instruction set through Highway (HWY_TARGET_INCLUDE compiles this file again per
// target).
//
// Codes, per word group of 64 bytes (16 rows x 4 depth indices x 8/bits positions), bits = 2, R = 4:
//   VNNI      1 load, 4 AND, then per vector 4 positions x 2 bytes of x = 8 vpdpbusd with a broadcast operand
//   elsewhere 2 loads (AVX2), per position 2 shifts and 2 ANDs, per vector and position 2 pmaddwd and 2 adds
// The bound is the dot-product port: 64 multiply-adds per instruction (VNNI), half of it for a 16-bit x.
// Rows: one convert per 16 values, shared by up to four vectors, then one FMA per vector.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/product.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#undef KVANT_VNNI
#undef KVANT_MADD
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
#define KVANT_VNNI 1
#else
#define KVANT_VNNI 0
#endif
// pmaddwd adds neighbouring products and keeps lanes in place; other architectures' widening products reorder lanes.
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
#define KVANT_MADD 1
#else
#define KVANT_MADD 0
#endif

// ---- pack_x: words [vector][quad][2]. VNNI: high bytes of the quad, low bytes of the quad. Elsewhere: 16-bit pairs of
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
      error = hn::Add(error, hn::NegMulAdd(hn::ConvertTo(d, rounded), scale, value));
      StoreQuads(rounded.raw, a.wide, words);
#else
      alignas(64) std::int32_t integers[16];
      for (int lane = 0; lane < 16; lane += lanes) {
        const auto value = hn::LoadU(d, a.scratch + i + lane);
        const auto rounded = hn::Round(hn::Mul(value, factor));
        error = hn::Add(error, hn::NegMulAdd(rounded, scale, value));
        hn::StoreU(finite ? hn::ConvertTo(di, rounded) : hn::Zero(di), di, integers + lane);
      }
      StoreQuads(integers, words);
#endif
    }
    a.bias[n] += a.mid * hn::GetLane(hn::SumOfLanes(d, error));
  }
}

// ---- multiply_codes

struct BlockArgs {
  const std::byte* groups;
  int group_count;
  const std::int32_t* x;      // word of quad 0 and the first vector of this call
  std::int64_t vector_words;  // words from vector to vector
  const float* factor;
  float* out;
  std::int64_t out_stride;
};

// Accumulators are arrays indexed by parameter packs, not by loops: GCC 12 promotes an array to registers only when
// every index is a constant before its loop passes run (and the element type is not a may_alias type like __m512i), and
// otherwise stores all accumulators on each step.
template <int... I>
using Indices = std::integer_sequence<int, I...>;
template <int kCount>
using Range = std::make_integer_sequence<int, kCount>;

#if KVANT_VNNI
// Highway 1.0.3 detects AVX-512 VNNI for this target but does not name it to the compiler.
#define KVANT_VNNI_TARGET __attribute__((target("avx512vnni")))
using Lanes = int __attribute__((vector_size(64)));  // 16 sums

KVANT_VNNI_TARGET HWY_INLINE Lanes Dot(Lanes sum, __m512i codes, __m512i x) {
  return reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), codes, x));
}

// One group: P are the positions of a quad (row tiles), N the vectors, A = P x N the accumulators.
template <int kBits, int kVectors, bool kWide, int... P, int... N, int... A>
KVANT_VNNI_TARGET HWY_INLINE void AddQuad(__m512i group, const std::int32_t* x, std::int64_t stride,
                                          Lanes* HWY_RESTRICT high, Lanes* HWY_RESTRICT low, Indices<P...>,
                                          Indices<N...>, Indices<A...>) {
  constexpr int kMask = (1 << kBits) - 1;
  const __m512i codes[] = {_mm512_and_si512(group, _mm512_set1_epi8(static_cast<char>(kMask << (kBits * P))))...};
  const __m512i x_high[] = {_mm512_set1_epi32(x[N * stride])...};
  ((high[A] = Dot(high[A], codes[A / kVectors], x_high[A % kVectors])), ...);
  if constexpr (kWide) {
    const __m512i x_low[] = {_mm512_set1_epi32(x[N * stride + 1])...};
    ((low[A] = Dot(low[A], codes[A / kVectors], x_low[A % kVectors])), ...);
  }
}

// Position p holds codes times 2^(kBits*p): an exact shift removes it, so every set has the same integers.
template <int kShift, bool kWide>
KVANT_VNNI_TARGET HWY_INLINE void StoreSums(Lanes high, Lanes low, float factor, float* out) {
  Lanes sum = high >> kShift;
  if constexpr (kWide) sum = sum * 256 + (low >> kShift);
  const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(sum)), _mm512_set1_ps(factor));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), scaled));
}

template <int kBits, int kTiles, int kVectors, bool kWide, int... Q, int... A>
KVANT_VNNI_TARGET HWY_NOINLINE void MultiplyBlock(const BlockArgs& a, Indices<Q...>, Indices<A...> all) {
  Lanes high[] = {(static_cast<void>(A), Lanes{})...};
  Lanes low[] = {(static_cast<void>(A), Lanes{})...};
  const std::int32_t* x = a.x;
  for (int g = 0; g < a.group_count; ++g, x += 2 * sizeof...(Q)) {
    const __m512i group = _mm512_load_si512(a.groups + static_cast<std::size_t>(g) * kGroupBytes);
    (AddQuad<kBits, kVectors, kWide>(_mm512_srli_epi32(group, kBits * kTiles * Q), x + 2 * Q, a.vector_words, high, low,
                                     Range<kTiles>(), Range<kVectors>(), all),
     ...);
  }
  (StoreSums<kBits*(A / kVectors), kWide>(high[A], low[A], a.factor[A % kVectors],
                                          a.out + (A % kVectors) * a.out_stride + (A / kVectors) * kLanes),
   ...);
}
#else
// sum + even0 * x0 + even1 * x1 per 32-bit lane; codes are non-negative 16-bit halves, x signed ones.
template <class D, class V>
HWY_INLINE V PairDot(D d, V codes, V x, V sum) {
#if KVANT_MADD
  const hn::Repartition<std::int16_t, D> d16;
  auto unused = hn::Zero(d);
  return hn::ReorderWidenMulAccumulate(d, hn::BitCast(d16, codes), hn::BitCast(d16, x), sum, unused);
#else
  const auto even = hn::Mul(hn::And(codes, hn::Set(d, 0xFFFF)), hn::ShiftRight<16>(hn::ShiftLeft<16>(x)));
  return hn::Add(sum, hn::Add(even, hn::Mul(hn::ShiftRight<16>(codes), hn::ShiftRight<16>(x))));
#endif
}

template <int kShift, int kBits, class D>
HWY_INLINE hn::VFromD<D> PairsAt(D d, hn::VFromD<D> group) {
  const hn::RebindToUnsigned<D> du;
  constexpr std::uint32_t kMask = ((1U << kBits) - 1) * 0x00010001U;
  return hn::BitCast(d, hn::And(hn::ShiftRight<kShift>(hn::BitCast(du, group)), hn::Set(du, kMask)));
}

// One position of a group: even and odd depth indices against all N vectors.
template <int kBits, int kPosition, class D, class V, int... N>
HWY_INLINE void AddPosition(D d, V group, const std::int32_t* quad, std::int64_t stride, V* HWY_RESTRICT sum,
                            Indices<N...>) {
  const V even = PairsAt<kBits * kPosition, kBits>(d, group);
  const V odd = PairsAt<kBits * kPosition + 8, kBits>(d, group);
  ((sum[N] = PairDot(d, even, hn::Set(d, quad[N * stride]), sum[N])), ...);
  ((sum[N] = PairDot(d, odd, hn::Set(d, quad[N * stride + 1]), sum[N])), ...);
}

template <class D, class V>
HWY_INLINE void StoreSums([[maybe_unused]] D d, V sum, float factor, float* out) {
  const hn::RebindToFloat<D> df;
  const auto scaled = hn::Mul(hn::ConvertTo(df, sum), hn::Set(df, factor));
  hn::StoreU(hn::Add(hn::LoadU(df, out), scaled), df, out);
}

template <int kBits, int kTiles, int kVectors, class D, int... Q, int... A, int... P>
HWY_INLINE void MultiplyLanes(D d, const BlockArgs& a, int lane, Indices<Q...>, Indices<A...>, Indices<P...>) {
  using V = hn::VFromD<D>;
  V sum[] = {(static_cast<void>(A), hn::Zero(d))...};
  const auto* words = reinterpret_cast<const std::int32_t*>(a.groups) + lane;
  const std::int32_t* x = a.x;
  for (int g = 0; g < a.group_count; ++g, words += kLanes, x += 2 * sizeof...(Q)) {
    const V group = hn::LoadU(d, words);
    (AddPosition<kBits, P>(d, group, x + (P / kTiles) * 2, a.vector_words, sum + (P % kTiles) * kVectors,
                           Range<kVectors>()),
     ...);
  }
  (StoreSums(d, sum[A], a.factor[A % kVectors], a.out + (A % kVectors) * a.out_stride + (A / kVectors) * kLanes + lane),
   ...);
}

template <int kBits, int kTiles, int kVectors, bool /*kWide: the 16-bit product is the only one here*/, int... Q,
          int... A>
HWY_NOINLINE void MultiplyBlock(const BlockArgs& a, Indices<Q...> quads, Indices<A...> all) {
  const hn::CappedTag<std::int32_t, 16> d;
  for (int lane = 0; lane < kLanes; lane += static_cast<int>(hn::Lanes(d))) {
    MultiplyLanes<kBits, kTiles, kVectors>(d, a, lane, quads, all, Range<8 / kBits>());
  }
}
#endif

// Accumulators are R x vectors (x 2 bytes of x with VNNI): 12 leave registers for codes and x.
template <int kBits, int kTiles, int kVectors, bool kWide>
HWY_INLINE void MultiplySome(const BlockArgs& args) {
  MultiplyBlock<kBits, kTiles, kVectors, kWide>(args, Range<quads_per_group(kBits, kTiles)>(),
                                                Range<kTiles * kVectors>());
}

template <int kBits, int kTiles, bool kWide>
void MultiplyVectors(BlockArgs args, int vectors) {
  constexpr int kMaxVectors = kTiles == 4 ? 3 : 6;
  for (int n = 0; n < vectors;) {
    const int count = std::min(kMaxVectors, vectors - n);
    if constexpr (kMaxVectors == 6) {
      if (count == 6) MultiplySome<kBits, kTiles, 6, kWide>(args);
      if (count == 5) MultiplySome<kBits, kTiles, 5, kWide>(args);
      if (count == 4) MultiplySome<kBits, kTiles, 4, kWide>(args);
    }
    if (count == 3) MultiplySome<kBits, kTiles, 3, kWide>(args);
    if (count == 2) MultiplySome<kBits, kTiles, 2, kWide>(args);
    if (count == 1) MultiplySome<kBits, kTiles, 1, kWide>(args);
    n += count;
    args.x += count * args.vector_words;
    args.factor += count;
    args.out += count * args.out_stride;
  }
}

template <int kBits, bool kWide>
void MultiplyPlane(const CodeProduct& a) {
  for_each_block(kBits, a.rows, a.depth, [&](int first, int tiles, std::size_t offset) {
    const BlockArgs block{
        a.plane + offset, groups(kBits, tiles, a.depth), a.x,         base::round_up(a.depth, kDepthPad) / kQuad * 2,
        a.factor,         a.out + first * kLanes,        a.out_stride};
    if (tiles == 1) MultiplyVectors<kBits, 1, kWide>(block, a.vectors);
    if (tiles == 2) MultiplyVectors<kBits, 2, kWide>(block, a.vectors);
    if constexpr (kBits < 4) {
      if (tiles == 4) MultiplyVectors<kBits, 4, kWide>(block, a.vectors);
    }
  });
}

void MultiplyCodes(const CodeProduct& a) {
  if (a.bits == 1) return a.wide ? MultiplyPlane<1, true>(a) : MultiplyPlane<1, false>(a);
  if (a.bits == 2) return a.wide ? MultiplyPlane<2, true>(a) : MultiplyPlane<2, false>(a);
  return a.wide ? MultiplyPlane<4, true>(a) : MultiplyPlane<4, false>(a);
}

// ---- multiply_rows

template <int kColumns, class D, typename T, int... C, int... A>
HWY_INLINE void AddRow(D d, const T* tile, const float* v, std::int64_t v_stride, hn::VFromD<D>* HWY_RESTRICT sum,
                       Indices<C...>, Indices<A...>) {
  const hn::VFromD<D> row[] = {LoadWide(d, tile + C * static_cast<int>(hn::Lanes(d)))...};
  ((sum[A] = hn::MulAdd(hn::Set(d, v[(A / kColumns) * v_stride]), row[A % kColumns], sum[A])), ...);
}

// A = vectors x columns accumulators; a column is one register of rows.
template <int kColumns, class D, typename T, int... A>
HWY_NOINLINE void RowBlock([[maybe_unused]] D d, const RowProduct& a, const T* tile, const float* v, float* out,
                           Indices<A...> all) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  hn::VFromD<D> sum[] = {hn::LoadU(d, out + (A / kColumns) * a.out_stride + (A % kColumns) * lanes)...};
  for (int k = 0; k < a.depth; ++k, tile += a.tile_stride) {
    AddRow<kColumns>(d, tile, v + k, a.v_stride, sum, Range<kColumns>(), all);
  }
  (hn::StoreU(sum[A], d, out + (A / kColumns) * a.out_stride + (A % kColumns) * lanes), ...);
}

template <typename T, int kVectors>
void RowVectors(const RowProduct& a, int n) {
  const hn::CappedTag<float, 16> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const T* tile = static_cast<const T*>(a.tile);
  const float* v = a.v + n * a.v_stride;
  float* out = a.out + n * a.out_stride;
  const int rows = base::round_up(a.rows, kLanes);
  int row = 0;
  for (; row + 2 * lanes <= rows; row += 2 * lanes) {
    RowBlock<2>(d, a, tile + row, v, out + row, Range<kVectors * 2>());
  }
  for (; row < rows; row += lanes) RowBlock<1>(d, a, tile + row, v, out + row, Range<kVectors>());
}

template <typename T>
void MultiplyRowsOf(const RowProduct& a) {
  int n = 0;
  for (; n + 4 <= a.vectors; n += 4) RowVectors<T, 4>(a, n);
  if (a.vectors - n == 3) RowVectors<T, 3>(a, n);
  if (a.vectors - n == 2) RowVectors<T, 2>(a, n);
  if (a.vectors - n == 1) RowVectors<T, 1>(a, n);
}

void MultiplyRows(const RowProduct& a) {
  if (a.type == DType::f32) MultiplyRowsOf<float>(a);
  if (a.type == DType::f16) MultiplyRowsOf<hwy::float16_t>(a);
  if (a.type == DType::bf16) MultiplyRowsOf<hwy::bfloat16_t>(a);
}

void FillProducts(Kernels& k) {
  k.integer_dot = KVANT_VNNI != 0;
  k.pack_x = PackX;
  k.multiply_codes = MultiplyCodes;
  k.multiply_rows = MultiplyRows;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillProducts);
void fill_products(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillProducts)(k);
}
}  // namespace kvant::tiles
#endif
