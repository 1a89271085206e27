// Products with codes through matrix tiles (matrix.hpp). Included once per target, hence the toggled guard.
//
// Every row block is joined to bytes in L1 first, then multiplied by 16 rows of x at a time (8 vectors of 16 bits): per
// 64 rows x 64 depth indices 4 loads of codes and 1 of x (about 11 cycles each as measured) and 4 products of 16
// cycles, whatever the width; joining them takes 64 stores. The next block is joined before this one is multiplied, so
// that both overlap and loads do not wait for stores.
#if defined(KVANT_TILES_MATRIX_PRODUCT_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_MATRIX_PRODUCT_HPP
#undef KVANT_TILES_MATRIX_PRODUCT_HPP
#else
#define KVANT_TILES_MATRIX_PRODUCT_HPP
#endif

#include "hwy/highway.h"
#include "tiles/matrix.hpp"
#include "tiles/output.hpp"
#include "tiles/unpack.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

inline void LookUp(const std::uint8_t* table, std::uint8_t* codes, int bytes) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::uint8_t, kGroupBytes> d;
  const auto levels = hn::LoadDup128(d, table);
  const int step = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < bytes; i += step) hn::Store(hn::TableLookupBytes(levels, hn::Load(d, codes + i)), d, codes + i);
}

// Row tile `tile` of the sums of up to 16 rows of x: a row per vector, or its high and its low bytes in two.
inline void StoreRows(const std::int32_t* sums, bool wide, int vectors, const Output& to) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::int32_t, 16> d;
  const int step = static_cast<int>(hn::Lanes(d));
  WithStart(to.start, [&](auto start) HWY_ATTR {
    for (int n = 0; n < vectors; ++n) {
      const std::int32_t* row = sums + n * (wide ? 2 : 1) * kLanes;
      for (int lane = 0; lane < kLanes; lane += step) {
        auto sum = hn::Load(d, row + lane);
        if (wide) sum = hn::Add(hn::ShiftLeft<8>(sum), hn::Load(d, row + kLanes + lane));
        StoreSum<decltype(start)::value>(to, sum, n, to.out + n * to.stride + lane);
      }
    }
  });
}

// One row block times all vectors.
template <template <int> class Matrix, int kTiles>
void MultiplyBlock(const CodeProduct& a, const std::uint8_t* codes, int tile) {
  constexpr int kSumSteps = kSumDepth / kMatrixDepth;
  alignas(64) std::int32_t sums[kTiles * kMatrixRows * kLanes];
  const int steps = (a.x_depth + kMatrixDepth - 1) / kMatrixDepth;
  const int rows_each = a.wide ? 2 : 1;
  MatrixProduct product;
  product.x_step = std::ptrdiff_t{a.vectors} * rows_each * kLanes;
  product.quad_bytes = kTiles * kGroupBytes;
  product.sums = sums;
  for (int step = 0; step < steps; step += kSumSteps) {
    product.steps = std::min(kSumSteps, steps - step);
    product.codes = codes + std::ptrdiff_t{step} * (kMatrixDepth / kQuad) * product.quad_bytes;
    Output to(a, step == 0, tile);
    const int at_once = kMatrixRows / rows_each;
    for (int n = 0; n < a.vectors; n += at_once) {
      const int count = std::min(at_once, a.vectors - n);
      product.x = a.x + step * product.x_step + std::ptrdiff_t{n} * rows_each * kLanes;
      Matrix<kTiles>::multiply(product);
      for (int t = 0; t < kTiles; ++t) {
        Output part = to;
        part.out += t * kLanes;
        StoreRows(sums + t * kMatrixRows * kLanes, a.wide, count, part);
      }
      to.next(count);
    }
  }
}

// The row blocks of a product, joined ahead of their multiplication.
struct JoinedBlocks {
  const CodeProduct& a;
  Cover cover{a};
  Segments segments{cover};
  int quads_padded = base::round_up(quads(a.x_depth), kMatrixDepth / kQuad);

  Asker ahead;

  explicit JoinedBlocks(const CodeProduct& product) : a(product) {
    const int all = quads(a.x_depth) * ((row_tiles(a.rows) + 3) / 4);
    ahead = {a.ahead.data, static_cast<int>((a.ahead.bytes / kGroupBytes + static_cast<std::size_t>(all) - 1) /
                                            static_cast<std::size_t>(all))};
  }
  void join(int tile, int tiles, std::uint8_t* codes) {
    UnpackTiles(cover, segments, tile, tiles, codes, ahead);
    const int used = quads(a.x_depth) * tiles * kGroupBytes;
    if (a.table != nullptr) LookUp(a.table, codes, used);
    std::memset(codes + used, 0, static_cast<std::size_t>(quads_padded * tiles * kGroupBytes - used));
  }
};

template <template <int> class Matrix>
void MultiplyTiles(const CodeProduct& a) {
  alignas(64) std::uint8_t codes[kMaxDepth / kQuad * 4 * kGroupBytes];
  JoinedBlocks blocks(a);
  const int block_bytes = blocks.quads_padded * 4 * kGroupBytes;
  const bool two = 2 * block_bytes <= static_cast<int>(sizeof codes);
  const int all = row_tiles(a.rows);
  std::uint8_t* current = codes;
  std::uint8_t* other = two ? codes + block_bytes : codes;
  blocks.join(0, block_tiles(1, all), current);
  for (int tile = 0, tiles = 0; tile < all; tile += tiles) {
    tiles = block_tiles(1, all - tile);
    const int next = tile + tiles;
    if (two && next < all) blocks.join(next, block_tiles(1, all - next), other);
    if (tiles == 4) MultiplyBlock<Matrix, 4>(a, current, tile);
    if (tiles == 2) MultiplyBlock<Matrix, 2>(a, current, tile);
    if (tiles == 1) MultiplyBlock<Matrix, 1>(a, current, tile);
    if (!two && next < all) blocks.join(next, block_tiles(1, all - next), other);
    std::swap(current, other);
  }
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
