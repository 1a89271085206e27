// The integer dot product of one instruction set, as the products of src/tiles/product.cpp see it: a register holds one
// 32-bit word per row, four codes (unsigned bytes) or four bytes of x (signed), and a sum per row. Included once per
// target, hence the toggled guard.
#if defined(KVANT_TILES_DOT_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_DOT_HPP
#undef KVANT_TILES_DOT_HPP
#else
#define KVANT_TILES_DOT_HPP
#endif

#include "hwy/highway.h"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

// The bits of a register of codes that one factor of a product may come from.
constexpr std::uint32_t kCodeBytes = KVANT_MADD ? 0x00FF00FF : 0xFFFFFFFF;

#undef KVANT_DOT_ATTR
#if KVANT_VNNI
// Highway 1.0.3 detects AVX-512 VNNI for this target but does not name it to the compiler. For Clang a function's own
// attribute replaces that of the region, so it names all.
#define KVANT_DOT_ATTR __attribute__((target(HWY_TARGET_STR ",avx512vnni")))
using Sum = int __attribute__((vector_size(64)));  // not __m512i: GCC keeps arrays of may_alias types in memory
using Total = Sum;
using Codes = __m512i;
constexpr int kSumRows = 16;

KVANT_DOT_ATTR HWY_INLINE Codes LoadCodes(const std::uint8_t* codes) {
  return _mm512_loadu_si512(codes);
}
KVANT_DOT_ATTR HWY_INLINE Codes Spread(std::int32_t word) {
  return _mm512_set1_epi32(word);
}
KVANT_DOT_ATTR HWY_INLINE Codes Mask(Codes codes, Codes mask) {
  return _mm512_and_si512(codes, mask);
}
template <class V>
KVANT_DOT_ATTR HWY_INLINE Codes ToCodes(V bytes) {
  return bytes.raw;
}
KVANT_DOT_ATTR HWY_INLINE void AddDot(Sum& sum, Codes codes, Codes x) {
  sum = reinterpret_cast<Sum>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), codes, x));
}
KVANT_DOT_ATTR HWY_INLINE Total ZeroTotal() {
  return Total{};
}
// Adds sums that are worth 2^shift.
template <bool kWide>
KVANT_DOT_ATTR HWY_INLINE Total Join(Total total, Sum high, Sum low, int shift) {
  const auto sum = reinterpret_cast<__m512i>(kWide ? high * 256 + low : high);
  return total + reinterpret_cast<Sum>(shift < 0 ? _mm512_srav_epi32(sum, Spread(-shift))
                                                 : _mm512_sllv_epi32(sum, Spread(shift)));
}
KVANT_DOT_ATTR HWY_INLINE auto ToInts(Total total) {
  return hwy::HWY_NAMESPACE::Vec512<std::int32_t>{reinterpret_cast<__m512i>(total)};
}
#else
#define KVANT_DOT_ATTR HWY_ATTR
using D32 = hwy::HWY_NAMESPACE::CappedTag<std::int32_t, 16>;
using Total = hwy::HWY_NAMESPACE::Vec<D32>;
using Codes = Total;
constexpr int kSumRows = HWY_MAX_BYTES / 4;  // every target here has vectors of a fixed size up to 64 bytes

HWY_INLINE Codes LoadCodes(const std::uint8_t* codes) {
  return hwy::HWY_NAMESPACE::LoadU(D32(), reinterpret_cast<const std::int32_t*>(codes));
}
HWY_INLINE Codes Spread(std::int32_t word) {
  return hwy::HWY_NAMESPACE::Set(D32(), word);
}
HWY_INLINE Codes Mask(Codes codes, Codes mask) {
  return hwy::HWY_NAMESPACE::And(codes, mask);
}
template <class V>
HWY_INLINE Codes ToCodes(V bytes) {
  return hwy::HWY_NAMESPACE::BitCast(D32(), bytes);
}
HWY_INLINE Total ToInts(Total total) {
  return total;
}
HWY_INLINE Total ZeroTotal() {
  return hwy::HWY_NAMESPACE::Zero(D32());
}
#if KVANT_MADD
using Sum = int __attribute__((vector_size(HWY_MAX_BYTES)));  // as above, no may_alias type
HWY_INLINE __m128i MulPairs(__m128i codes, __m128i x) {
  return _mm_madd_epi16(codes, x);
}
#if HWY_TARGET <= HWY_AVX2
HWY_INLINE __m256i MulPairs(__m256i codes, __m256i x) {
  return _mm256_madd_epi16(codes, x);
}
#endif
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE __m512i MulPairs(__m512i codes, __m512i x) {
  return _mm512_madd_epi16(codes, x);
}
#endif
// Codes of the even and of the odd depth indices of a quad, 16 bits each.
HWY_INLINE Codes Evens(Codes codes) {
  return hwy::HWY_NAMESPACE::And(codes, Spread(0x00FF00FF));
}
HWY_INLINE Codes Odds(Codes codes) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Repartition<std::uint16_t, D32> d16;
  return hn::BitCast(D32(), hn::ShiftRight<8>(hn::BitCast(d16, codes)));
}
HWY_INLINE void AddDot(Sum& sum, Codes codes, Codes x) {
  sum += reinterpret_cast<Sum>(MulPairs(codes.raw, x.raw));
  asm("" : "+x"(sum));  // GCC 12 would compute all products first and then run out of registers
}
#if HWY_TARGET == HWY_AVX2
// Two registers of codes times one word of x. By name: GCC 12 spends one instruction in six on moves between registers.
HWY_INLINE void AddTwoDots(Sum& sum, Sum& other_sum, Codes codes, Codes other_codes, const std::int32_t* x) {
  asm("vpbroadcastd %4, %%ymm15\n\t"
      "vpmaddwd %%ymm15, %2, %%ymm14\n\t"
      "vpmaddwd %%ymm15, %3, %%ymm15\n\t"
      "vpaddd %%ymm14, %0, %0\n\t"
      "vpaddd %%ymm15, %1, %1"
      : "+x"(sum), "+x"(other_sum)
      : "x"(codes.raw), "x"(other_codes.raw), "m"(*x)
      : "xmm14", "xmm15");
}
#endif
// Adds sums that are worth 2^shift.
HWY_INLINE Total Join(Total total, Sum sum, int shift) {
  namespace hn = hwy::HWY_NAMESPACE;
  const Total ints{reinterpret_cast<decltype(Total::raw)>(sum)};
#if HWY_TARGET > HWY_AVX2  // no shift per lane there, which is one instruction elsewhere and the other one two
  return hn::Add(total, shift < 0 ? hn::ShiftRightSame(ints, -shift) : hn::ShiftLeftSame(ints, shift));
#else
  return hn::Add(total, shift < 0 ? hn::Shr(ints, Spread(-shift)) : hn::Shl(ints, Spread(shift)));
#endif
}
#else
using Sum = Total;
// Byte by byte: no special instruction, no overflow.
HWY_INLINE void AddDot(Sum& sum, Codes codes, Codes x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const auto byte = hn::Set(D32(), 0xFF);
  sum = hn::Add(sum, hn::Mul(hn::And(codes, byte), hn::ShiftRight<24>(hn::ShiftLeft<24>(x))));
  sum = hn::Add(sum, hn::Mul(hn::And(hn::ShiftRight<8>(codes), byte), hn::ShiftRight<24>(hn::ShiftLeft<16>(x))));
  sum = hn::Add(sum, hn::Mul(hn::And(hn::ShiftRight<16>(codes), byte), hn::ShiftRight<24>(hn::ShiftLeft<8>(x))));
  sum = hn::Add(sum, hn::Mul(hn::And(hn::ShiftRight<24>(codes), byte), hn::ShiftRight<24>(x)));
}
// Adds sums that are worth 2^shift.
template <bool kWide>
HWY_INLINE Total Join(Total total, Sum high, Sum low, int shift) {
  namespace hn = hwy::HWY_NAMESPACE;
  const Sum sum = kWide ? hn::Add(hn::ShiftLeft<8>(high), low) : high;
  return hn::Add(total, shift < 0 ? hn::ShiftRightSame(sum, -shift) : hn::ShiftLeftSame(sum, shift));
}
#endif
#endif

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
