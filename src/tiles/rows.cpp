// Products with rows of a float type, once per instruction set: one convert per register of rows, shared by up to four
// vectors, then one FMA per vector.
// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What to ask for next: the memory ahead, spread over the steps of the first vectors' row blocks.
struct Fetch {
  const std::byte* at;
  std::size_t step;
};

template <int kColumns, class D, typename T, int... C, int... A>
HWY_INLINE void AddRow(D d, const T* tile, const float* v, std::int64_t v_stride, hn::VFromD<D>* HWY_RESTRICT sum,
                       Indices<C...>, Indices<A...>) {
  const hn::VFromD<D> row[] = {LoadWide(d, tile + C * static_cast<int>(hn::Lanes(d)))...};
  ((sum[A] = hn::MulAdd(hn::Set(d, v[(A / kColumns) * v_stride]), row[A % kColumns], sum[A])), ...);
}

// A = vectors x columns accumulators; a column is one register of rows.
template <int kColumns, class D, typename T, int... A>
HWY_NOINLINE void RowBlock([[maybe_unused]] D d, const RowProduct& a, const T* tile, const float* v, float* out,
                           Fetch fetch, Indices<A...> all) {
  const int lanes = static_cast<int>(hn::Lanes(d));
  hn::VFromD<D> sum[] = {hn::LoadU(d, out + (A / kColumns) * a.out_stride + (A % kColumns) * lanes)...};
  for (int k = 0; k < a.depth; ++k, tile += a.tile_stride) {
    __builtin_prefetch(fetch.at, 0, 2);
    fetch.at += fetch.step;
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
  const std::size_t blocks = static_cast<std::size_t>((rows + 2 * lanes - 1) / (2 * lanes));
  const std::size_t steps = blocks * static_cast<std::size_t>(a.depth);
  // Without memory ahead the prefetch goes to the tile itself and costs nothing.
  Fetch fetch{static_cast<const std::byte*>(a.tile), 0};
  if (n == 0 && a.ahead.bytes > 0) fetch = {a.ahead.data, (a.ahead.bytes + steps - 1) / steps};
  const std::size_t block_bytes = fetch.step * static_cast<std::size_t>(a.depth);
  int row = 0;
  for (; row + 2 * lanes <= rows; row += 2 * lanes, fetch.at += block_bytes) {
    RowBlock<2>(d, a, tile + row, v, out + row, fetch, Range<kVectors * 2>());
  }
  for (; row < rows; row += lanes) RowBlock<1>(d, a, tile + row, v, out + row, fetch, Range<kVectors>());
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

// kWidth vectors from `first` on, as the lanes of [depth][kWidth] and [rows][kWidth].
template <int kWidth>
void SparseVectors(const SparseProduct& a, int first, int count) {
  const hn::CappedTag<float, kWidth> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  float* v = a.scratch;
  float* out = a.scratch + std::ptrdiff_t{kWidth} * a.depth;
  for (int n = 0; n < count; ++n) {
    const float* from = a.v + (first + n) * a.v_stride;
    for (int i = 0; i < a.depth; ++i) v[i * kWidth + n] = from[i];
  }
  for (int n = count; n < kWidth; ++n) {
    for (int i = 0; i < a.depth; ++i) v[i * kWidth + n] = 0.0F;
  }
  for (int i = 0; i < a.row_count * kWidth; i += lanes) hn::StoreU(hn::Zero(d), d, out + i);
  for (int i = 0; i < a.count; ++i) {
    const auto value = hn::Set(d, a.values[i]);
    const float* from = v + a.depths[i] * kWidth;
    float* to = out + a.rows[i] * kWidth;
    for (int lane = 0; lane < kWidth; lane += lanes) {
      hn::StoreU(hn::MulAdd(hn::LoadU(d, from + lane), value, hn::LoadU(d, to + lane)), d, to + lane);
    }
  }
  for (int n = 0; n < count; ++n) {
    float* to = a.out + (first + n) * a.out_stride;
    for (int row = 0; row < a.row_count; ++row) to[row] += out[row * kWidth + n];
  }
}

void MultiplySparse(const SparseProduct& a) {
  for (int n = 0; n < a.vectors;) {
    const int count = a.vectors - n < 16 ? a.vectors - n : 16;
    if (count <= 4) SparseVectors<4>(a, n, count);
    if (count > 4) SparseVectors<16>(a, n, count);
    n += count;
  }
}

void FillRows(Kernels& k) {
  k.multiply_sparse = MultiplySparse;
  k.multiply_rows = MultiplyRows;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillRows);
void fill_rows(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillRows)(k);
}
}  // namespace kvant::tiles
#endif
