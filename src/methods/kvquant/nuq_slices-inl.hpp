// The parts of nuq.cpp that work on bit slices. Included once per target, hence the toggled guard.
#if defined(KVANT_NUQ_SLICES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_NUQ_SLICES_INL_HPP
#undef KVANT_NUQ_SLICES_INL_HPP
#else
#define KVANT_NUQ_SLICES_INL_HPP
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "methods/kvquant/nuq.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::kvquant::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The bits of lanes first..first+Lanes-1 as a mask.
template <class D>
HWY_INLINE hn::MFromD<D> LoadBits(D d, const std::uint8_t* plane, std::int64_t first) {
  if (hn::Lanes(d) >= 8) return hn::LoadMaskBits(d, plane + first / 8);
  const std::uint8_t bits[kSliceSlack] = {static_cast<std::uint8_t>(plane[first / 8] >> (first % 8))};
  return hn::LoadMaskBits(d, bits);
}

void Slice(const std::uint8_t* codes, std::int64_t columns, int bits, std::uint8_t* slices) {
  const hn::CappedTag<std::uint8_t, kColumnPad> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t plane = (columns + 7) / 8;
  for (int b = 0; b < bits; ++b, slices += plane) {
    const auto bit = hn::Set(d, static_cast<std::uint8_t>(1U << b));
    for (std::int64_t c = 0; c < columns; c += lanes) {
      std::uint8_t packed[8] = {};
      hn::StoreMaskBits(d, hn::TestBit(hn::LoadU(d, codes + c), bit), packed);
      std::memcpy(slices + c / 8, packed, static_cast<std::size_t>(std::min(lanes / 8, plane - c / 8)));
    }
  }
}

void Unslice(const std::uint8_t* slices, std::int64_t columns, int bits, std::uint8_t* codes) {
  const hn::CappedTag<std::uint8_t, kColumnPad> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t plane = (columns + 7) / 8;
  for (std::int64_t c = 0; c < columns; c += lanes) {
    auto code = hn::Zero(d);
    for (int b = 0; b < bits; ++b) {
      const auto bit = hn::Set(d, static_cast<std::uint8_t>(1U << b));
      code = hn::Or(code, hn::IfThenElseZero(hn::LoadMaskBits(d, slices + b * plane + c / 8), bit));
    }
    hn::StoreU(code, d, codes + c);
  }
}

// levels(0 .. 2^kBits - 1) by a binary tree of blends: one per level, no gather.
template <int kBits, class D, class Levels>
HWY_INLINE hn::VFromD<D> Choose(D d, const Levels& levels, const std::uint8_t* slices, std::int64_t plane,
                                std::int64_t first, int base) {
  if constexpr (kBits == 0) {
    return levels(base);
  } else {
    const auto high = LoadBits(d, slices + (kBits - 1) * plane, first);
    return hn::IfThenElse(high, Choose<kBits - 1>(d, levels, slices, plane, first, base + (1 << (kBits - 1))),
                          Choose<kBits - 1>(d, levels, slices, plane, first, base));
  }
}

// `levels(l, c)` is the vector of level l for columns c.. .
template <int kBits, typename T, class Levels>
HWY_INLINE void ChooseRow(const std::uint8_t* slices, std::int64_t columns, const Levels& levels, T* out) {
  const hn::CappedTag<T, 64 / sizeof(T)> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t plane = (columns + 7) / 8;
  const auto at = [&](std::int64_t c) HWY_ATTR {
    return Choose<kBits>(
        d, [&](int l) HWY_ATTR { return levels(d, l, c); }, slices, plane, c, 0);
  };
  std::int64_t c = 0;
  for (; c + lanes <= columns; c += lanes) hn::StoreU(at(c), d, out + c);
  if (c < columns) {
    alignas(64) T rest[64 / sizeof(T)];
    hn::Store(at(c), d, rest);
    std::memcpy(out + c, rest, static_cast<std::size_t>(columns - c) * sizeof(T));
  }
}

template <typename T, class Levels>
HWY_INLINE void ChooseRowOf(int bits, const std::uint8_t* slices, std::int64_t columns, const Levels& levels, T* out) {
  switch (bits) {
    case 1:
      return ChooseRow<1, T>(slices, columns, levels, out);
    case 2:
      return ChooseRow<2, T>(slices, columns, levels, out);
    case 3:
      return ChooseRow<3, T>(slices, columns, levels, out);
    default:
      return ChooseRow<4, T>(slices, columns, levels, out);
  }
}

constexpr int kBlendBits = 4;  // wider codes are looked up one by one

// Calls look(column, code) for every column of a row.
template <class Look>
HWY_INLINE void ForEachCode(const std::uint8_t* slices, std::int64_t columns, int bits, const Look& look) {
  std::uint8_t codes[kColumnPad];
  const std::int64_t plane = (columns + 7) / 8;
  for (std::int64_t c = 0; c < columns; c += kColumnPad) {
    const std::int64_t n = std::min<std::int64_t>(kColumnPad, columns - c);
    std::memset(codes, 0, static_cast<std::size_t>(n));
    for (int b = 0; b < bits; ++b) {
      for (std::int64_t i = 0; i < n; ++i) {
        const unsigned bit = (slices[b * plane + (c + i) / 8] >> ((c + i) % 8)) & 1U;
        codes[i] = static_cast<std::uint8_t>(codes[i] | (bit << b));
      }
    }
    for (std::int64_t i = 0; i < n; ++i) look(c + i, codes[i]);
  }
}

template <typename T>
void LookUp(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits, const T* table,
            std::int64_t table_stride, T* out, std::int64_t out_stride) {
  const auto step = static_cast<std::int64_t>(slice_bytes(columns, bits));
  const auto levels = [&](auto d, int l, std::int64_t c)
                          HWY_ATTR { return hn::LoadU(d, table + l * table_stride + c); };
  for (std::int64_t row = 0; row < rows; ++row, slices += step, out += out_stride) {
    if (bits <= kBlendBits) {
      ChooseRowOf<T>(bits, slices, columns, levels, out);
    } else {
      ForEachCode(slices, columns, bits,
                  [&](std::int64_t c, std::uint8_t code) { out[c] = table[code * table_stride + c]; });
    }
  }
}

template <typename T>
void LookUpRows(const std::uint8_t* slices, std::int64_t rows, std::int64_t columns, int bits, const T* table, T* out,
                std::int64_t out_stride) {
  const auto step = static_cast<std::int64_t>(slice_bytes(columns, bits));
  for (std::int64_t row = 0; row < rows; ++row, slices += step, out += out_stride, table += 1 << bits) {
    if (bits <= kBlendBits) {
      ChooseRowOf<T>(
          bits, slices, columns, [&](auto d, int l, std::int64_t) HWY_ATTR { return hn::Set(d, table[l]); }, out);
    } else {
      ForEachCode(slices, columns, bits, [&](std::int64_t c, std::uint8_t code) { out[c] = table[code]; });
    }
  }
}

}  // namespace kvant::kvquant::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
