// Bit slices of codes and back, for columns.cpp. Included once per target, hence the toggled guard.
#if defined(KVANT_EXACT_SLICES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_EXACT_SLICES_INL_HPP
#undef KVANT_EXACT_SLICES_INL_HPP
#else
#define KVANT_EXACT_SLICES_INL_HPP
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvant::exact::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Bit planes and the eight rows of codes that they are slices of, from column 0 on.
template <class Byte>
struct Slices {
  Byte* planes;
  std::int64_t plane_stride;
  int shift;
  int bits;
};

// Calls kernel on whole vectors, then on 8 columns, then on single ones.
template <class Kernel>
HWY_INLINE void ForByteColumns(std::int64_t n, const Kernel& kernel) {
  const hn::CappedTag<std::uint8_t, 64> d;
  const hn::CappedTag<std::uint8_t, 8> few;
  const hn::CappedTag<std::uint8_t, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + lanes <= n; c += lanes) kernel.Run(d, c);
  for (; c + 8 <= n; c += 8) kernel.Run(few, c);
  for (; c < n; ++c) kernel.Run(one, c);
}

struct SliceKernel {
  const std::uint8_t* rows;
  std::int64_t row_stride;
  Slices<std::uint8_t> slices;

  template <class D>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    for (int b = 0; b < slices.bits; ++b) {
      const auto bit = hn::Set(d, static_cast<std::uint8_t>(1U << (slices.shift + b)));
      auto word = hn::Zero(d);
      for (int r = 0; r < 8; ++r) {
        const auto set = hn::TestBit(hn::LoadU(d, rows + r * row_stride + c), bit);
        word = hn::Or(word, hn::IfThenElseZero(set, hn::Set(d, static_cast<std::uint8_t>(1U << r))));
      }
      hn::StoreU(word, d, slices.planes + b * slices.plane_stride + c);
    }
  }
};

// kPairs[t][pair][nibble]: two neighbouring rows of a nibble of a plane, as bit t of each half of a byte.
struct PairTables {
  alignas(16) std::uint8_t byte[4][2][16];
};
constexpr PairTables MakePairTables() {
  PairTables tables{};
  for (unsigned t = 0; t < 4; ++t) {
    for (unsigned pair = 0; pair < 2; ++pair) {
      for (unsigned nibble = 0; nibble < 16; ++nibble) {
        const unsigned two = nibble >> (2 * pair);
        tables.byte[t][pair][nibble] = static_cast<std::uint8_t>(((two & 1U) << t) | ((two >> 1 & 1U) << (t + 4)));
      }
    }
  }
  return tables;
}
constexpr PairTables kPairs = MakePairTables();

struct UnsliceKernel {
  Slices<const std::uint8_t> slices;
  std::uint8_t* rows;
  std::int64_t row_stride;

  // Four bits of the codes at a time: table lookups give them for two rows in each byte, then rows are taken apart.
  template <class D, hwy::EnableIf<(hn::MaxLanes(D()) >= 16)>* = nullptr>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    const auto low_half = hn::Set(d, std::uint8_t{15});
    for (int half = 0; half < 2; ++half) {
      const int first = std::max(0, 4 * half - slices.shift);
      const int last = std::min(slices.bits, 4 * half + 4 - slices.shift);
      if (first >= last) continue;
      hn::Vec<D> pairs[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
      for (int b = first; b < last; ++b) {
        const int t = slices.shift + b - 4 * half;
        const auto plane = hn::LoadU(d, slices.planes + b * slices.plane_stride + c);
        const auto low = hn::And(plane, low_half);
        const auto high = hn::And(hn::ShiftRight<4>(plane), low_half);
        const auto even = hn::LoadDup128(d, kPairs.byte[t][0]);
        const auto odd = hn::LoadDup128(d, kPairs.byte[t][1]);
        pairs[0] = hn::Or(pairs[0], hn::TableLookupBytes(even, low));
        pairs[1] = hn::Or(pairs[1], hn::TableLookupBytes(odd, low));
        pairs[2] = hn::Or(pairs[2], hn::TableLookupBytes(even, high));
        pairs[3] = hn::Or(pairs[3], hn::TableLookupBytes(odd, high));
      }
      const bool fresh = half == 0 && slices.shift == 0;
      for (int pair = 0; pair < 4; ++pair) {
        auto first_row = hn::And(pairs[pair], low_half);
        auto second_row = hn::And(hn::ShiftRight<4>(pairs[pair]), low_half);
        if (half == 1) {
          first_row = hn::ShiftLeft<4>(first_row);
          second_row = hn::ShiftLeft<4>(second_row);
        }
        Put(d, first_row, fresh, 2 * pair, c);
        Put(d, second_row, fresh, 2 * pair + 1, c);
      }
    }
  }

  // The few columns that fill no vector: bit by bit.
  template <class D, hwy::EnableIf<(hn::MaxLanes(D()) < 16)>* = nullptr>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    for (int r = 0; r < 8; ++r) {
      const auto row_bit = hn::Set(d, static_cast<std::uint8_t>(1U << r));
      auto code = hn::Zero(d);
      for (int b = 0; b < slices.bits; ++b) {
        const auto set = hn::TestBit(hn::LoadU(d, slices.planes + b * slices.plane_stride + c), row_bit);
        code = hn::Or(code, hn::IfThenElseZero(set, hn::Set(d, static_cast<std::uint8_t>(1U << (slices.shift + b)))));
      }
      Put(d, code, slices.shift == 0, r, c);
    }
  }

 private:
  template <class D>
  HWY_INLINE void Put(D d, hn::Vec<D> code, bool fresh, int r, std::int64_t c) const {
    std::uint8_t* row = rows + r * row_stride + c;
    hn::StoreU(fresh ? code : hn::Or(code, hn::LoadU(d, row)), d, row);
  }
};

void Slice(const std::uint8_t* rows, std::int64_t row_stride, int shift, int bits, std::int64_t n, std::uint8_t* planes,
           std::int64_t plane_stride) {
  ForByteColumns(n, SliceKernel{rows, row_stride, {planes, plane_stride, shift, bits}});
}

void Unslice(const std::uint8_t* planes, std::int64_t plane_stride, int shift, int bits, std::int64_t n,
             std::uint8_t* rows, std::int64_t row_stride) {
  ForByteColumns(n, UnsliceKernel{{planes, plane_stride, shift, bits}, rows, row_stride});
}

}  // namespace kvant::exact::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
