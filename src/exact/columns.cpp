// Loops over columns, once per instruction set; Highway supplies the vectors, the targets and the dispatch.
#include "exact/columns.hpp"

#include <cstring>

#include "base/half.hpp"

// foreach_target.h must come before highway.h.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "exact/columns.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "exact/slices-inl.hpp"
#include "tiles/simd.hpp"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace kvant::exact::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using tiles::HWY_NAMESPACE::LoadWide;

constexpr float kSmallestScale = 1e-8F;
// Adding 1.5 * 2^23 rounds 0..255 to the nearest integer, ties to even, as rintf does; the low byte is that integer.
constexpr float kRounder = 12582912.0F;

// Calls op.Run<T, N>(d, c) for columns [c, c + N * lanes of d): many at first, single ones at the end. A kernel keeps
// its N vectors in registers over all rows, which N independent sums also need to fill the pipeline.
template <class T, class Op>
HWY_INLINE void ForColumns(std::int64_t n, const Op& op) {
  const hn::CappedTag<float, 16> d;
  const hn::CappedTag<float, 1> one;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t c = 0;
  for (; c + Op::kVectors * lanes <= n; c += Op::kVectors * lanes) op.template Run<T, Op::kVectors>(d, c);
  for (; c + lanes <= n; c += lanes) op.template Run<T, 1>(d, c);
  for (; c < n; ++c) op.template Run<T, 1>(one, c);
}

template <class Op>
HWY_INLINE void ForTypedColumns(DType type, std::int64_t n, const Op& op) {
  if (type == DType::f32) ForColumns<float>(n, op);
  if (type == DType::f16) ForColumns<hwy::float16_t>(n, op);
  if (type == DType::bf16) ForColumns<hwy::bfloat16_t>(n, op);
}

template <class T>
HWY_INLINE const T* RowAt(const ConstRows& x, std::int64_t r, std::int64_t c) {
  return static_cast<const T*>(x.row[r]) + c;
}

// ---- sums

struct Plain {
  template <class D, class V>
  HWY_INLINE V operator()(D, V x, std::int64_t) const {
    return x;
  }
};
struct Square {
  template <class D, class V>
  HWY_INLINE V operator()(D, V x, std::int64_t) const {
    return hn::Mul(x, x);
  }
};
struct SquaredDifference {
  const float* mean;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x, std::int64_t c) const {
    const auto difference = hn::Sub(x, hn::LoadU(d, mean + c));
    return hn::Mul(difference, difference);
  }
};

template <class Term>
struct SumOp {
  static constexpr int kVectors = 4;
  const ConstRows& x;
  float* sum;
  Term term;

  template <class T, int kCount, class D>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    hn::Vec<D> total[kCount];
    for (int i = 0; i < kCount; ++i) total[i] = hn::LoadU(d, sum + c + i * lanes);
    for (std::int64_t r = 0; r < x.count; ++r) {
      const T* row = RowAt<T>(x, r, c);
      for (int i = 0; i < kCount; ++i) {
        total[i] = hn::Add(total[i], term(d, LoadWide(d, row + i * lanes), c + i * lanes));
      }
    }
    for (int i = 0; i < kCount; ++i) hn::StoreU(total[i], d, sum + c + i * lanes);
  }
};

void Add(const ConstRows& x, std::int64_t n, float* sum) {
  ForTypedColumns(x.type, n, SumOp<Plain>{x, sum, {}});
}
void AddSquares(const ConstRows& x, std::int64_t n, float* sum) {
  ForTypedColumns(x.type, n, SumOp<Square>{x, sum, {}});
}
void AddSquaredDifferences(const ConstRows& x, const float* mean, std::int64_t n, float* sum) {
  ForTypedColumns(x.type, n, SumOp<SquaredDifference>{x, sum, {mean}});
}
void Multiply(float factor, std::int64_t n, float* HWY_RESTRICT x) {
  for (std::int64_t c = 0; c < n; ++c) x[c] *= factor;
}

// ---- grids

struct MinMaxOp {
  static constexpr int kVectors = 4;
  const ConstRows& x;
  float* min;
  float* max;

  template <class T, int kCount, class D>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    hn::Vec<D> low[kCount];
    hn::Vec<D> high[kCount];
    hn::Vec<D> known[kCount];  // becomes NaN with the first NaN row; the comparisons below skip NaN
    for (int i = 0; i < kCount; ++i) low[i] = high[i] = known[i] = LoadWide(d, RowAt<T>(x, 0, c) + i * lanes);
    for (std::int64_t r = 1; r < x.count; ++r) {
      const T* row = RowAt<T>(x, r, c);
      for (int i = 0; i < kCount; ++i) {
        const auto value = LoadWide(d, row + i * lanes);
        low[i] = hn::IfThenElse(hn::Lt(value, low[i]), value, low[i]);
        high[i] = hn::IfThenElse(hn::Gt(value, high[i]), value, high[i]);
        known[i] = hn::IfThenElse(hn::Eq(value, value), known[i], value);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      const auto is_known = hn::Eq(known[i], known[i]);
      hn::StoreU(hn::IfThenElse(is_known, low[i], known[i]), d, min + c + i * lanes);
      hn::StoreU(hn::IfThenElse(is_known, high[i], known[i]), d, max + c + i * lanes);
    }
  }
};

void MinMax(const ConstRows& x, std::int64_t n, float* min, float* max) {
  ForTypedColumns(x.type, n, MinMaxOp{x, min, max});
}

void Grid(const float* HWY_RESTRICT min, const float* HWY_RESTRICT max, const float* HWY_RESTRICT levels,
          std::int64_t n, float* HWY_RESTRICT scale) {
  for (std::int64_t c = 0; c < n; ++c) {
    const float step = (max[c] - min[c]) / levels[c];
    scale[c] = step < kSmallestScale ? kSmallestScale : step;
  }
}

// ---- codes

struct EncodeOp {
  static constexpr int kVectors = 2;
  const ConstRows& x;
  const GridView& grid;
  std::uint8_t* codes;
  std::int64_t stride;

  template <class T, int kCount, class D>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint8_t, D> d8;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    const auto rounder = hn::Set(d, kRounder);
    hn::Vec<D> min[kCount];
    hn::Vec<D> scale[kCount];
    hn::Vec<D> levels[kCount];
    for (int i = 0; i < kCount; ++i) {
      min[i] = hn::LoadU(d, grid.min + c + i * lanes);
      scale[i] = hn::LoadU(d, grid.scale + c + i * lanes);
      levels[i] = hn::LoadU(d, grid.levels + c + i * lanes);
    }
    for (std::int64_t r = 0; r < x.count; ++r) {
      const T* row = RowAt<T>(x, r, c);
      for (int i = 0; i < kCount; ++i) {
        const auto place = hn::Div(hn::Sub(LoadWide(d, row + i * lanes), min[i]), scale[i]);
        const auto limited = hn::IfThenElse(hn::Lt(place, levels[i]), place, levels[i]);
        const auto known = hn::IfThenElseZero(hn::Eq(place, place), limited);
        const auto code = hn::And(hn::BitCast(di, hn::Add(known, rounder)), hn::Set(di, 255));
        hn::StoreU(hn::DemoteTo(d8, code), d8, codes + r * stride + c + i * lanes);
      }
    }
  }
};

void Encode(const ConstRows& x, const GridView& grid, std::int64_t n, std::uint8_t* codes, std::int64_t stride) {
  ForTypedColumns(x.type, n, EncodeOp{x, grid, codes, stride});
}

template <class D>
HWY_INLINE void StoreNarrow(D d, hn::Vec<D> v, float* to) {
  hn::StoreU(v, d, to);
}
// By integer arithmetic where the CPU has no exact conversion, as tiles/codec.cpp does.
template <class D>
HWY_INLINE void StoreNarrow([[maybe_unused]] D d, hn::Vec<D> v, hwy::float16_t* to) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  const hn::Rebind<hwy::float16_t, D> dh;
  hn::StoreU(hn::DemoteTo(dh, v), dh, to);
#else
  float values[16];
  hn::StoreU(v, d, values);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    const std::uint16_t bits = base::float_to_half(values[i]);
    std::memcpy(to + i, &bits, sizeof bits);
  }
#endif
}
template <class D>
HWY_INLINE void StoreNarrow(D, hn::Vec<D> v, hwy::bfloat16_t* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::BitCast(du, v);
  const auto top = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(top, hn::Set(du, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFU))));
  const auto quiet = hn::Or(top, hn::Set(du, 0x40U));
  const auto known = hn::RebindMask(du, hn::Eq(v, v));
  const auto half = hn::IfThenElse(known, rounded, quiet);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, half)), d16, reinterpret_cast<std::uint16_t*>(to));
}

template <Rounding kRounding>
struct DecodeOp {
  static constexpr int kVectors = 2;
  const std::uint8_t* codes;
  std::int64_t stride;
  const GridView& grid;
  const Rows& out;

  template <class T, int kCount, class D>
  HWY_INLINE void Run(D d, std::int64_t c) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<std::uint8_t, D> d8;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    hn::Vec<D> min[kCount];
    hn::Vec<D> scale[kCount];
    for (int i = 0; i < kCount; ++i) {
      min[i] = hn::LoadU(d, grid.min + c + i * lanes);
      scale[i] = hn::LoadU(d, grid.scale + c + i * lanes);
    }
    for (std::int64_t r = 0; r < out.count; ++r) {
      T* row = static_cast<T*>(out.row[r]) + c;
      for (int i = 0; i < kCount; ++i) {
        const auto code = hn::PromoteTo(di, hn::LoadU(d8, codes + r * stride + c + i * lanes));
        auto value = hn::Add(hn::Mul(hn::ConvertTo(d, code), scale[i]), min[i]);
        if constexpr (kRounding == Rounding::through_half) {
          hwy::float16_t half[16];
          StoreNarrow(d, value, half);
          value = LoadWide(d, half);
        }
        StoreNarrow(d, value, row + i * lanes);
      }
    }
  }
};

void Decode(const std::uint8_t* codes, std::int64_t stride, const GridView& grid, std::int64_t n, const Rows& out,
            Rounding rounding) {
  if (rounding == Rounding::direct || out.type == DType::f16) {  // rounding to fp16 twice changes nothing
    ForTypedColumns(out.type, n, DecodeOp<Rounding::direct>{codes, stride, grid, out});
  } else {
    ForTypedColumns(out.type, n, DecodeOp<Rounding::through_half>{codes, stride, grid, out});
  }
}

ColumnKernels Table() {
  return {hwy::TargetName(HWY_TARGET),
          Add,
          AddSquares,
          AddSquaredDifferences,
          Multiply,
          MinMax,
          Grid,
          Encode,
          Decode,
          Slice,
          Unslice};
}

}  // namespace kvant::exact::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::exact {

HWY_EXPORT(Table);

const ColumnKernels& columns() {
  static const ColumnKernels table = HWY_DYNAMIC_DISPATCH(Table)();
  return table;
}

std::vector<ColumnKernels> all_columns() {
  std::vector<ColumnKernels> tables;
  for (std::int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left & -left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    tables.push_back(HWY_DYNAMIC_DISPATCH(Table)());
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  return tables;
}

}  // namespace kvant::exact
#endif
