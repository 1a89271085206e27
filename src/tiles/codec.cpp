// Between rows and planes, per instruction set: half types, the uniform grid, and the bit order of src/tiles/plane.hpp.
// Nothing here uses fused multiply-add, so every instruction set writes the same bytes.
#include <algorithm>
#include <cmath>
#include <cstring>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/codec.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "base/half.hpp"
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;

template <typename T>
void WidenFrom(const T* from, float* to, std::int64_t n) {
  const F d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(LoadWide(d, from + i), d, to + i);
  for (; i < n; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = std::is_same_v<T, hwy::float16_t> ? base::half_to_float(bits) : base::bfloat_to_float(bits);
  }
}

void Widen(const void* from, DType type, float* to, std::int64_t n) {
  if (type == DType::f32) std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  if (type == DType::f16) WidenFrom(static_cast<const hwy::float16_t*>(from), to, n);
  if (type == DType::bf16) WidenFrom(static_cast<const hwy::bfloat16_t*>(from), to, n);
}

// binary16 by integer arithmetic where the CPU has no exact conversion (SSE4): the hardware one is used from AVX2 on.
void Narrow(const float* from, void* to, DType type, std::int64_t n) {
  std::int64_t i = 0;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  if (type == DType::f16) {
    const F d;
    const hn::Rebind<hwy::float16_t, F> dh;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    auto* out = static_cast<hwy::float16_t*>(to);
    for (; i + lanes <= n; i += lanes) hn::StoreU(hn::DemoteTo(dh, hn::LoadU(d, from + i)), dh, out + i);
  }
#endif
  for (; i < n; ++i) base::store_float(to, type, i, from[i]);
}

void MinMax(const float* x, int n, float* min, float* max) {
  const F d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  float low = x[0];
  float high = x[0];
  int i = 0;
  if (n >= lanes) {
    auto lowest = hn::LoadU(d, x);
    auto highest = lowest;
    for (i = lanes; i + lanes <= n; i += lanes) {
      lowest = hn::Min(lowest, hn::LoadU(d, x + i));
      highest = hn::Max(highest, hn::LoadU(d, x + i));
    }
    low = hn::GetLane(hn::MinOfLanes(d, lowest));
    high = hn::GetLane(hn::MaxOfLanes(d, highest));
  }
  for (; i < n; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  *min = low;
  *max = high;
}

void Quantize(const float* x, int n, float min, float step, int levels, std::uint8_t* codes) {
  if (!(step > 0)) {  // a constant channel, or a range too small for a step: every code is the minimum
    std::memset(codes, 0, static_cast<std::size_t>(n));
    return;
  }
  const F d;
  const hn::RebindToSigned<F> di;
  const hn::Rebind<std::uint8_t, F> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto top = hn::Set(d, static_cast<float>(levels));
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto grid = hn::Div(hn::Sub(hn::LoadU(d, x + i), hn::Set(d, min)), hn::Set(d, step));
    const auto code = hn::Clamp(hn::Floor(hn::Add(grid, hn::Set(d, 0.5F))), hn::Zero(d), top);
    hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(di, code)), d8, codes + i);
  }
  for (; i < n; ++i) {
    const float code = std::floor((x[i] - min) / step + 0.5F);
    codes[i] = static_cast<std::uint8_t>(std::clamp(code, 0.0F, static_cast<float>(levels)));
  }
}

void Dequantize(const std::uint8_t* codes, int n, float min, float step, float* x) {
  for (int i = 0; i < n; ++i) x[i] = min + static_cast<float>(codes[i]) * step;
}

// ---- least squares, in eight lanes of double whatever the registers hold; the compiler splits these vectors

using Doubles = double __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(32)));

// Eight codes and values as doubles. Vectors of this size go by reference, because returning one would depend on the
// instruction set.
HWY_INLINE void LoadEight(const std::uint8_t* codes, const float* x, Floats& code, Doubles& value) {
  const hn::CappedTag<float, 8> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  alignas(32) float wide[8];
  for (int i = 0; i < 8; i += lanes) {
    hn::Store(hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, codes + i))), d, wide + i);
  }
  std::memcpy(&code, wide, sizeof code);
  Floats narrow;
  std::memcpy(&narrow, x, sizeof narrow);
  value = __builtin_convertvector(narrow, Doubles);
}

HWY_INLINE double AddLanes(const Doubles& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Calls add(codes, x, count) for every eight elements; the last ones are copied, with zeros behind them.
template <class Add>
HWY_INLINE void ForEachEight(const std::uint8_t* codes, const float* x, int n, const Add& add) {
  int i = 0;
  for (; i + 8 <= n; i += 8) add(codes + i, x + i, 8);
  if (i == n) return;
  std::uint8_t last_codes[8] = {};
  float last[8] = {};
  std::memcpy(last_codes, codes + i, static_cast<std::size_t>(n - i));
  std::memcpy(last, x + i, static_cast<std::size_t>(n - i) * sizeof(float));
  add(last_codes, last, n - i);
}

LineSums SumLine(const std::uint8_t* codes, const float* x, int n) {
  Doubles value = {}, product = {}, code_sum = {}, square_sum = {};
  ForEachEight(codes, x, n, [&](const std::uint8_t* c, const float* v, int) HWY_ATTR {
    Floats code;
    Doubles wide;
    LoadEight(c, v, code, wide);
    const auto exact = __builtin_convertvector(code, Doubles);
    value += wide;
    product += exact * wide;
    code_sum += exact;
    square_sum += exact * exact;
  });
  return {static_cast<std::int64_t>(AddLanes(code_sum)), static_cast<std::int64_t>(AddLanes(square_sum)),
          AddLanes(value), AddLanes(product)};
}

double GridError(const std::uint8_t* codes, const float* x, int n, float min, float step) {
  Doubles error = {};
  ForEachEight(codes, x, n, [&](const std::uint8_t* c, const float* v, int count) HWY_ATTR {
    Floats code;
    Doubles difference;
    LoadEight(c, v, code, difference);
    const Floats point = min + code * step;
    difference -= __builtin_convertvector(point, Doubles);
    for (int lane = count; lane < 8; ++lane) difference[lane] = 0;
    error += difference * difference;
  });
  return AddLanes(error);
}

// ---- sums of rows

// n lanes of D at a time; four registers share a factor where there are as many.
template <class D>
HWY_INLINE int AddRowsTo(D d, int first, const float* rows, std::int64_t stride, const float* factors, int count, int n,
                         float* out) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  int i = first;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    auto a = hn::LoadU(d, out + i);
    auto b = hn::LoadU(d, out + i + lanes);
    auto c = hn::LoadU(d, out + i + 2 * lanes);
    auto e = hn::LoadU(d, out + i + 3 * lanes);
    const float* row = rows + i;
    for (int k = 0; k < count; ++k, row += stride) {
      const auto factor = hn::Set(d, factors[k]);
      a = hn::Add(a, hn::Mul(factor, hn::LoadU(d, row)));
      b = hn::Add(b, hn::Mul(factor, hn::LoadU(d, row + lanes)));
      c = hn::Add(c, hn::Mul(factor, hn::LoadU(d, row + 2 * lanes)));
      e = hn::Add(e, hn::Mul(factor, hn::LoadU(d, row + 3 * lanes)));
    }
    hn::StoreU(a, d, out + i);
    hn::StoreU(b, d, out + i + lanes);
    hn::StoreU(c, d, out + i + 2 * lanes);
    hn::StoreU(e, d, out + i + 3 * lanes);
  }
  for (; i + lanes <= n; i += lanes) {
    auto a = hn::LoadU(d, out + i);
    for (int k = 0; k < count; ++k) {
      a = hn::Add(a, hn::Mul(hn::Set(d, factors[k]), hn::LoadU(d, rows + k * stride + i)));
    }
    hn::StoreU(a, d, out + i);
  }
  return i;
}

void AddRows(const float* rows, std::int64_t stride, const float* factors, int count, int n, float* out) {
  const int done = AddRowsTo(F(), 0, rows, stride, factors, count, n, out);
  AddRowsTo(hn::CappedTag<float, 1>(), done, rows, stride, factors, count, n, out);
}

// ---- Hadamard

// (a, b) -> (a + b, a - b) at distance `half`, for halves of at least one register of D.
template <class D>
HWY_INLINE void Butterflies(D d, float* x, int n, int half) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int first = 0; first < n; first += 2 * half) {
    for (int i = first; i < first + half; i += lanes) {
      const auto a = hn::LoadU(d, x + i);
      const auto b = hn::LoadU(d, x + i + half);
      hn::StoreU(hn::Add(a, b), d, x + i);
      hn::StoreU(hn::Sub(a, b), d, x + i + half);
    }
  }
}

void Hadamard(float* x, int n, int block) {
  int half = 1;
  if (block >= 4) {  // distances 1 and 2 inside four lanes: b + a above, b - a as b + (-a) below
    const hn::CappedTag<float, 4> d;
    alignas(16) static constexpr float kOdd[4] = {1, -1, 1, -1};
    alignas(16) static constexpr float kHigh[4] = {1, 1, -1, -1};
    for (int i = 0; i < n; i += 4) {
      auto v = hn::LoadU(d, x + i);
      v = hn::Add(hn::Shuffle2301(v), hn::Mul(v, hn::Load(d, kOdd)));
      v = hn::Add(hn::Shuffle1032(v), hn::Mul(v, hn::Load(d, kHigh)));
      hn::StoreU(v, d, x + i);
    }
    half = 4;
  }
  for (; half < block; half *= 2) {
    if (half >= 16) {
      Butterflies(F(), x, n, half);
    } else if (half >= 4) {
      Butterflies(hn::CappedTag<float, 4>(), x, n, half);
    } else {
      Butterflies(hn::CappedTag<float, 1>(), x, n, half);
    }
  }
}

using U = hn::CappedTag<std::uint32_t, 16>;
using Bytes = hn::Rebind<std::uint8_t, U>;

void PackPlane(const std::uint8_t* codes, std::int64_t code_stride, const std::uint16_t* index, int bits, int shift,
               int rows, int depth, std::byte* plane) {
  const U d;
  const Bytes d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto mask = hn::Set(d, (1U << bits) - 1);
  for_each_block(bits, rows, depth, [&](int first, int tiles, std::size_t offset) {
    const int span = quads_per_group(bits, tiles) * kQuad;  // depth indices of a group
    for (int g = 0; g < groups(bits, tiles, depth); ++g) {
      auto* words = reinterpret_cast<std::uint32_t*>(plane + offset) + g * kLanes;
      for (int lane = 0; lane < kLanes; lane += lanes) {
        auto word = hn::Zero(d);
        for (int i = 0; i < span && g * span + i < depth; ++i) {
          const int channel = index != nullptr ? index[g * span + i] : g * span + i;
          const std::uint8_t* row = codes + channel * code_stride + first * kLanes + lane;
          for (int p = 0; p < tiles; ++p) {
            const auto code = hn::PromoteTo(d, hn::LoadU(d8, row + p * kLanes));
            const int position = (i / kQuad) * tiles + p;
            word = hn::Or(word, hn::ShiftLeftSame(hn::And(hn::ShiftRightSame(code, shift), mask),
                                                  (i % kQuad) * 8 + position * bits));
          }
        }
        hn::StoreU(word, d, words + lane);
      }
    }
  });
}

void UnpackPlane(const std::byte* plane, int bits, int shift, int rows, int depth, const std::uint16_t* index,
                 std::uint8_t* codes, std::int64_t code_stride) {
  const U d;
  const hn::RebindToSigned<U> di;
  const Bytes d8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto mask = hn::Set(d, (1U << bits) - 1);
  for_each_block(bits, rows, depth, [&](int first, int tiles, std::size_t offset) {
    const int span = quads_per_group(bits, tiles) * kQuad;
    for (int i = 0; i < depth; ++i) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(plane + offset) + (i / span) * kLanes;
      std::uint8_t* row = codes + (index != nullptr ? index[i] : i) * code_stride + first * kLanes;
      for (int p = 0; p < tiles; ++p) {
        const int position = ((i % span) / kQuad) * tiles + p;
        for (int lane = 0; lane < kLanes; lane += lanes) {
          const auto word = hn::ShiftRightSame(hn::LoadU(d, words + lane), (i % kQuad) * 8 + position * bits);
          const auto code = hn::ShiftLeftSame(hn::And(word, mask), shift);
          std::uint8_t* out = row + p * kLanes + lane;
          hn::StoreU(hn::Or(hn::LoadU(d8, out), hn::DemoteTo(d8, hn::BitCast(di, code))), d8, out);
        }
      }
    }
  });
}

void FillCodec(Kernels& k) {
  k.name = hwy::TargetName(HWY_TARGET);
  k.widen = Widen;
  k.narrow = Narrow;
  k.min_max = MinMax;
  k.quantize = Quantize;
  k.dequantize = Dequantize;
  k.line_sums = SumLine;
  k.grid_error = GridError;
  k.add_rows = AddRows;
  k.hadamard = Hadamard;
  k.pack_plane = PackPlane;
  k.unpack_plane = UnpackPlane;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillCodec);
void fill_codec(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillCodec)(k);
}
}  // namespace kvant::tiles
#endif
