// Products with codes, once per instruction set through Highway (HWY_TARGET_INCLUDE compiles this file again per
// target).
//
// Two or three steps per row block (up to 4 row tiles = 64 rows), whatever the planes are:
//   unpack  the planes become one byte per code, [quad][row tile][16 lanes][4 depth indices], in a buffer in L1: per 64
//           codes 1 shift, 1 AND and 1 store for a plane, plus a load, a shift and an OR for each further plane
//   table   codes that index a table are replaced by its bytes: 1 load, 1 byte shuffle and 1 store
//   dot     bytes times packed x. VNNI: 1 vpdpbusd per vector and 64 codes, 2 for a 16-bit x. Elsewhere: 16-bit halves
//           (2 AND, 1 shift per register, shared by all vectors), then 2 pmaddwd and 2 adds per vector
// So planes are unpacked once for all vectors, the number of multiplications does not depend on the width of the codes,
// and one inner loop serves every recipe. The bound is the dot step.
#include <algorithm>
#include <cstring>
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

// ---- unpack

struct Unpack {
  const std::byte* groups;  // of one row block of the plane
  int quads;
  int shift;
  std::uint8_t* codes;  // of the plane's first quad and the row block's first tile
  int quad_bytes;       // from quad to quad in `codes`
};

template <int kRight, int kBits, bool kAdd, class D>
HWY_INLINE void UnpackPosition(D d, hn::VFromD<D> group, int shift, std::uint8_t* to) {
  constexpr std::uint32_t kMask = ((1U << kBits) - 1) * 0x01010101U;
  auto* words = reinterpret_cast<std::uint32_t*>(to);
  auto code = hn::ShiftLeftSame(hn::And(hn::ShiftRight<kRight>(group), hn::Set(d, kMask)), shift);
  if constexpr (kAdd) code = hn::Or(code, hn::LoadU(d, words));
  hn::StoreU(code, d, words);
}

// All positions P of the groups of one row block; positions past the plane's last quad are not written.
template <int kBits, int kTiles, bool kAdd, int... P>
HWY_NOINLINE void UnpackBlock(const Unpack& a, Indices<P...>) {
  const hn::CappedTag<std::uint32_t, 16> d;
  constexpr int kQuads = quads_per_group(kBits, kTiles);
  const auto* words = reinterpret_cast<const std::uint32_t*>(a.groups);
  std::uint8_t* codes = a.codes;
  const int step = static_cast<int>(hn::Lanes(d));
  for (int quad = 0; quad < a.quads; quad += kQuads, words += kLanes, codes += kQuads * a.quad_bytes) {
    for (int lane = 0; lane < kLanes; lane += step) {
      const auto group = hn::LoadU(d, words + lane);
      const auto position = [&](auto p) HWY_ATTR {
        constexpr int kQuadOf = decltype(p)::value / kTiles;
        if (kQuadOf > 0 && quad + kQuadOf >= a.quads) return;
        UnpackPosition<kBits* decltype(p)::value, kBits, kAdd>(
            d, group, a.shift, codes + kQuadOf * a.quad_bytes + (decltype(p)::value % kTiles) * kGroupBytes + 4 * lane);
      };
      (position(std::integral_constant<int, P>()), ...);
    }
  }
}

template <int kBits, int kTiles>
void UnpackBits(const Unpack& a, bool add) {
  if (add) {
    UnpackBlock<kBits, kTiles, true>(a, Range<8 / kBits>());
  } else {
    UnpackBlock<kBits, kTiles, false>(a, Range<8 / kBits>());
  }
}

void UnpackRowBlock(const Unpack& a, int bits, int tiles, bool add) {
  if (bits == 1 && tiles == 4) UnpackBits<1, 4>(a, add);
  if (bits == 1 && tiles == 2) UnpackBits<1, 2>(a, add);
  if (bits == 1 && tiles == 1) UnpackBits<1, 1>(a, add);
  if (bits == 2 && tiles == 4) UnpackBits<2, 4>(a, add);
  if (bits == 2 && tiles == 2) UnpackBits<2, 2>(a, add);
  if (bits == 2 && tiles == 1) UnpackBits<2, 1>(a, add);
  if (bits == 4 && tiles == 2) UnpackBits<4, 2>(a, add);
  if (bits == 4 && tiles == 1) UnpackBits<4, 1>(a, add);
}

// How the planes of a product cover its quads. A plane over quads that no earlier one touches stores its codes, one
// inside an earlier plane adds to them. Anything else (gaps, partial overlaps) works on zeros and adds everywhere.
struct Cover {
  const CodeProduct& a;
  bool regular = true;

  explicit Cover(const CodeProduct& product) : a(product) {
    int covered = 0;
    for (int i = 0; i < a.count; ++i) {
      const bool fresh = is_fresh(i);
      covered += fresh ? quads(a.planes[i].depth) : 0;
      regular = regular && (fresh || is_inside(i));
    }
    regular = regular && covered == quads(a.x_depth);
  }
  int first(int i) const { return a.planes[i].first / kQuad; }
  int end(int i) const { return first(i) + quads(a.planes[i].depth); }
  bool is_fresh(int i) const {
    for (int j = 0; j < i; ++j) {
      if (first(i) < end(j) && first(j) < end(i)) return false;
    }
    return true;
  }
  bool is_inside(int i) const {
    for (int j = 0; j < i; ++j) {
      if (first(i) >= first(j) && end(i) <= end(j)) return true;
    }
    return false;
  }
};

// Codes of `tiles` row tiles from tile `first` on, all planes joined.
void UnpackTiles(const Cover& cover, int first, int tiles, std::uint8_t* codes) {
  const CodeProduct& a = cover.a;
  const int quad_bytes = tiles * kGroupBytes;
  if (!cover.regular) std::memset(codes, 0, static_cast<std::size_t>(quads(a.x_depth) * quad_bytes));
  for (int i = 0; i < a.count; ++i) {
    const CodePlane& plane = a.planes[i];
    const bool add = !cover.regular || !cover.is_fresh(i);
    for_each_block(plane.bits, a.rows, plane.depth, [&](int tile, int block, std::size_t offset) {
      if (tile < first || tile >= first + tiles) return;
      UnpackRowBlock({plane.plane + offset, quads(plane.depth), plane.shift,
                      codes + cover.first(i) * quad_bytes + (tile - first) * kGroupBytes, quad_bytes},
                     plane.bits, block, add);
    });
  }
}

// Joined codes to bytes of the table; both are below 256, so the dot step does not see the difference.
void LookUp(const std::uint8_t* table, std::uint8_t* codes, int bytes) {
  const hn::CappedTag<std::uint8_t, kGroupBytes> d;
  const auto levels = hn::LoadDup128(d, table);
  const int step = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < bytes; i += step) hn::Store(hn::TableLookupBytes(levels, hn::Load(d, codes + i)), d, codes + i);
}

// ---- dot

struct DotArgs {
  const std::uint8_t* codes;  // first quad and first row tile of this call
  int quad_bytes;
  int quads;
  const std::int32_t* x;      // word of the first quad and the first vector of this call
  std::int64_t vector_words;  // words from vector to vector
  const float* factor;
  float* out;
  std::int64_t out_stride;
};

#if KVANT_VNNI
// Highway 1.0.3 detects AVX-512 VNNI for this target but does not name it to the compiler.
#define KVANT_VNNI_TARGET __attribute__((target("avx512vnni")))
using Lanes = int __attribute__((vector_size(64)));  // 16 sums

KVANT_VNNI_TARGET HWY_INLINE Lanes Dot(Lanes sum, __m512i codes, __m512i x) {
  return reinterpret_cast<Lanes>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), codes, x));
}

template <bool kWide>
KVANT_VNNI_TARGET HWY_INLINE void StoreSums(Lanes high, Lanes low, float factor, float* out) {
  const Lanes sum = kWide ? high * 256 + low : high;
  const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(sum)), _mm512_set1_ps(factor));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), scaled));
}

// T row tiles against N vectors; accumulator A is tile A / vectors and vector A % vectors.
template <int kVectors, bool kWide, int... T, int... N, int... A>
KVANT_VNNI_TARGET HWY_NOINLINE void DotBlock(const DotArgs& a, Indices<T...>, Indices<N...>, Indices<A...>) {
  Lanes high[] = {(static_cast<void>(A), Lanes{})...};
  Lanes low[] = {(static_cast<void>(A), Lanes{})...};
  const std::int32_t* x = a.x;
  const std::uint8_t* quad = a.codes;
  for (int q = 0; q < a.quads; ++q, x += 2, quad += a.quad_bytes) {
    const __m512i codes[] = {_mm512_load_si512(quad + T * kGroupBytes)...};
    const __m512i x_high[] = {_mm512_set1_epi32(x[N * a.vector_words])...};
    ((high[A] = Dot(high[A], codes[A / kVectors], x_high[A % kVectors])), ...);
    if constexpr (kWide) {
      const __m512i x_low[] = {_mm512_set1_epi32(x[N * a.vector_words + 1])...};
      ((low[A] = Dot(low[A], codes[A / kVectors], x_low[A % kVectors])), ...);
    }
  }
  (StoreSums<kWide>(high[A], low[A], a.factor[A % kVectors],
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

template <class D, class V>
HWY_INLINE void StoreSums([[maybe_unused]] D d, V sum, float factor, float* out) {
  const hn::RebindToFloat<D> df;
  const auto scaled = hn::Mul(hn::ConvertTo(df, sum), hn::Set(df, factor));
  hn::StoreU(hn::Add(hn::LoadU(df, out), scaled), df, out);
}

// C registers of rows against N vectors; accumulator A is register A / vectors and vector A % vectors.
template <int kVectors, bool /*kWide: the 16-bit product is the only one here*/, class D, int... C, int... N, int... A>
HWY_NOINLINE void DotBlock(D d, const DotArgs& a, Indices<C...>, Indices<N...>, Indices<A...>) {
  using V = hn::VFromD<D>;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto bytes = hn::Set(d, 0x00FF00FF);
  V sum[] = {(static_cast<void>(A), hn::Zero(d))...};
  const std::int32_t* x = a.x;
  const std::uint8_t* quad = a.codes;
  for (int q = 0; q < a.quads; ++q, x += 2, quad += a.quad_bytes) {
    const auto* words = reinterpret_cast<const std::int32_t*>(quad);
    const V codes[] = {hn::LoadU(d, words + C * lanes)...};
    const V even[] = {hn::And(codes[C], bytes)...};
    const V x_even[] = {hn::Set(d, x[N * a.vector_words])...};
    ((sum[A] = PairDot(d, even[A / kVectors], x_even[A % kVectors], sum[A])), ...);
    const V odd[] = {hn::And(hn::ShiftRight<8>(codes[C]), bytes)...};
    const V x_odd[] = {hn::Set(d, x[N * a.vector_words + 1])...};
    ((sum[A] = PairDot(d, odd[A / kVectors], x_odd[A % kVectors], sum[A])), ...);
  }
  (StoreSums(d, sum[A], a.factor[A % kVectors], a.out + (A % kVectors) * a.out_stride + (A / kVectors) * lanes), ...);
}
#endif

// Up to kMaxVectors at a time: sums, codes and x fit the registers (32 with AVX-512, else 16).
constexpr int kMaxVectors = 4;

template <int kVectors, bool kWide>
void DotTiles(DotArgs a, int tiles) {
#if KVANT_VNNI
  for (; tiles >= 2; tiles -= 2, a.codes += 2 * kGroupBytes, a.out += 2 * kLanes) {
    DotBlock<kVectors, kWide>(a, Range<2>(), Range<kVectors>(), Range<2 * kVectors>());
  }
  if (tiles == 1) DotBlock<kVectors, kWide>(a, Range<1>(), Range<kVectors>(), Range<kVectors>());
#else
  const hn::CappedTag<std::int32_t, 16> d;
  constexpr int kColumns = HWY_MAX_BYTES == 64 ? 1 : 2;  // a row tile is 1, 2 or 4 registers
  const int rows = kColumns * static_cast<int>(hn::Lanes(d));
  for (int row = 0; row < tiles * kLanes; row += rows, a.codes += rows * kQuad, a.out += rows) {
    DotBlock<kVectors, kWide>(d, a, Range<kColumns>(), Range<kVectors>(), Range<kColumns * kVectors>());
  }
#endif
}

template <bool kWide>
void DotVectors(DotArgs a, int tiles, int vectors) {
  for (int n = 0; n < vectors;) {
    const int count = std::min(kMaxVectors, vectors - n);
    if (count == 4) DotTiles<4, kWide>(a, tiles);
    if (count == 3) DotTiles<3, kWide>(a, tiles);
    if (count == 2) DotTiles<2, kWide>(a, tiles);
    if (count == 1) DotTiles<1, kWide>(a, tiles);
    n += count;
    a.x += count * a.vector_words;
    a.factor += count;
    a.out += count * a.out_stride;
  }
}

void MultiplyCodes(const CodeProduct& a) {
  constexpr int kBlock = 4;  // row tiles
  alignas(64) std::uint8_t codes[kMaxDepth / kQuad * kBlock * kGroupBytes];
  const Cover cover(a);
  for (int tile = 0, tiles = 0; tile < row_tiles(a.rows); tile += tiles) {
    tiles = block_tiles(1, row_tiles(a.rows) - tile);
    UnpackTiles(cover, tile, tiles, codes);
    const int quad_bytes = tiles * kGroupBytes;
    if (a.table != nullptr) LookUp(a.table, codes, quads(a.x_depth) * quad_bytes);
    for (int quad = 0; quad < quads(a.x_depth); quad += kSumDepth / kQuad) {
      const DotArgs dot{codes + quad * quad_bytes,
                        quad_bytes,
                        std::min(kSumDepth / kQuad, quads(a.x_depth) - quad),
                        a.x + 2 * quad,
                        vector_words(a.x_depth),
                        a.factor,
                        a.out + tile * kLanes,
                        a.out_stride};
      if (a.wide) {
        DotVectors<true>(dot, tiles, a.vectors);
      } else {
        DotVectors<false>(dot, tiles, a.vectors);
      }
    }
  }
}

void FillProducts(Kernels& k) {
  k.integer_dot = KVANT_VNNI != 0;
  k.multiply_codes = MultiplyCodes;
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
