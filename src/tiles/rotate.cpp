// Keys that are stored before their rotation (RoPE), once per instruction set: the angles, and tiles of codes as the
// rotated rows that queries meet.
// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/rotate.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- angles; encoders use them, so nothing here may be a fused multiply-add

template <class D, std::size_t N>
HWY_INLINE hn::VFromD<D> Polynomial(D d, hn::VFromD<D> x, const double (&terms)[N]) {
  auto sum = hn::Set(d, terms[N - 1]);
  for (std::size_t i = N - 1; i-- > 0;) sum = hn::Add(hn::Mul(sum, x), hn::Set(d, terms[i]));
  return sum;
}

void SinCos(const double* turns, int n, float* cosines, float* sines) {
  const hn::CappedTag<double, kSinCosStep> d;
  const hn::Rebind<float, decltype(d)> d32;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < n; i += lanes) {
    const auto turn = hn::LoadU(d, turns + i);
    const auto rest = hn::Sub(turn, hn::Round(turn));                // -1/2..1/2 of a turn
    const auto quarter = hn::Round(hn::Mul(rest, hn::Set(d, 4.0)));  // -2..2
    const auto inside = hn::Sub(rest, hn::Mul(quarter, hn::Set(d, 0.25)));
    const auto x = hn::Mul(inside, hn::Set(d, kTurn));  // -pi/4..pi/4
    const auto square = hn::Mul(x, x);
    const auto sine = hn::Mul(x, Polynomial(d, square, kSineTerms));
    const auto cosine = Polynomial(d, square, kCosineTerms);
    const auto odd = hn::Eq(hn::Abs(quarter), hn::Set(d, 1.0));
    const auto half = hn::Gt(hn::Abs(quarter), hn::Set(d, 1.5));
    const auto minus_cosine = hn::Or(half, hn::Eq(quarter, hn::Set(d, 1.0)));
    const auto minus_sine = hn::Or(half, hn::Eq(quarter, hn::Set(d, -1.0)));
    const auto c = hn::IfThenElse(odd, sine, cosine);
    const auto s = hn::IfThenElse(odd, cosine, sine);
    hn::StoreU(hn::DemoteTo(d32, hn::IfThenElse(minus_cosine, hn::Neg(c), c)), d32, cosines + i);
    hn::StoreU(hn::DemoteTo(d32, hn::IfThenElse(minus_sine, hn::Neg(s), s)), d32, sines + i);
  }
}

// ---- tiles

using Float = hn::CappedTag<float, 16>;
using Word = hn::RebindToUnsigned<Float>;

// Where the codes of the row tiles of a page begin in one plane. All row blocks of a page have as many tiles.
struct PlaneRows {
  const std::uint32_t* groups[kMostRowTiles];
  int place[kMostRowTiles];  // bits in front of the tile's own position
  int tiles;                 // of a row block

  PlaneRows(const CodePlane& plane, int rows) : tiles(block_tiles(plane.bits, row_tiles(rows))) {
    for_each_block(plane.bits, rows, plane.depth, [&](int first, int count, std::size_t offset) {
      for (int i = 0; i < count; ++i) {
        groups[first + i] = reinterpret_cast<const std::uint32_t*>(plane.plane + offset);
        place[first + i] = i * plane.bits;
      }
    });
  }
};

// One channel: where its words are and how its bits lie in them, for every row tile alike.
template <int kPlanes>
struct Channel {
  std::ptrdiff_t words[kPlanes];
  int right[kPlanes];
  float min;
  float step;

  HWY_INLINE Channel(const TurnedTile& a, const PlaneRows* rows, int depth) : min(a.min[depth]), step(a.step[depth]) {
    const int quad = depth / kQuad;
    for (int k = 0; k < kPlanes; ++k) {
      const int shift = group_shift(a.planes[k].bits, rows[k].tiles);
      words[k] = std::ptrdiff_t{quad >> shift} * kLanes;
      right[k] = depth % kQuad * 8 + (quad & ((1 << shift) - 1)) * rows[k].tiles * a.planes[k].bits;
    }
  }
};

// The values of a channel in some rows of a tile. An index of 0x80 and more makes zeros of the other bytes of a lane.
template <int kPlanes, class Table>
HWY_INLINE hn::VFromD<Float> Values(const CodePlane* planes, const PlaneRows* rows, const Channel<kPlanes>& channel,
                                    int tile, int lane, Table table) {
  const Word d;
  const Float df;
  const hn::RebindToSigned<Word> di;
  const hn::Repartition<std::uint8_t, Word> d8;
  auto code = hn::Set(d, 0x80808000U);
  for (int k = 0; k < kPlanes; ++k) {
    const auto words = hn::LoadU(d, rows[k].groups[tile] + channel.words[k] + lane);
    const auto bits = hn::ShiftRightSame(words, channel.right[k] + rows[k].place[tile]);
    const auto own = hn::And(bits, hn::Set(d, (1U << planes[k].bits) - 1));
    code = hn::Or(code, k == 0 ? own : hn::ShiftLeftSame(own, planes[k].shift));
  }
  const auto level = hn::BitCast(di, hn::TableLookupBytesOr0(table, hn::BitCast(d8, code)));
  return hn::MulAdd(hn::ConvertTo(df, level), hn::Set(df, channel.step), hn::Set(df, channel.min));
}

template <int kPlanes>
void TurnTileOf(const TurnedTile& a) {
  const Float d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const hn::Repartition<std::uint8_t, Word> d8;
  const auto table = hn::LoadDup128(d8, a.table);
  const PlaneRows rows[] = {PlaneRows(a.planes[0], a.rows), PlaneRows(a.planes[kPlanes - 1], a.rows)};
  const int tiles = row_tiles(a.rows);
  for (int pair = 0; pair < a.pairs; ++pair) {
    const int first = pair * a.pair_step;
    const int second = first + a.pair_distance;
    const Channel<kPlanes> one(a, rows, first);
    const Channel<kPlanes> other(a, rows, second);
    float* out_x = a.out + first * a.out_stride;
    float* out_y = a.out + second * a.out_stride;
    for (int tile = 0; tile < tiles; ++tile, out_x += kLanes, out_y += kLanes) {
      const TurnBlock& block = a.blocks[tile];
      const auto block_cosine = hn::Set(d, block.cosines[pair]);
      const auto block_sine = hn::Set(d, block.sines[pair]);
      for (int lane = 0; lane < kLanes; lane += lanes) {
        const auto lane_cosine = hn::LoadU(d, block.lane_cosines + pair * kLanes + lane);
        const auto lane_sine = hn::LoadU(d, block.lane_sines + pair * kLanes + lane);
        const auto cosine = hn::NegMulAdd(block_sine, lane_sine, hn::Mul(block_cosine, lane_cosine));
        const auto sine = hn::MulAdd(block_sine, lane_cosine, hn::Mul(block_cosine, lane_sine));
        const auto x = Values<kPlanes>(a.planes, rows, one, tile, lane, table);
        const auto y = Values<kPlanes>(a.planes, rows, other, tile, lane, table);
        hn::StoreU(hn::NegMulAdd(y, sine, hn::Mul(x, cosine)), d, out_x + lane);
        hn::StoreU(hn::MulAdd(y, cosine, hn::Mul(x, sine)), d, out_y + lane);
      }
    }
  }
  for (int i = 2 * a.pairs; i < a.depth; ++i) {
    const Channel<kPlanes> channel(a, rows, i);
    for (int row = 0; row < a.rows; row += lanes) {
      hn::StoreU(Values<kPlanes>(a.planes, rows, channel, row / kLanes, row % kLanes, table), d,
                 a.out + i * a.out_stride + row);
    }
  }
}

void TurnTile(const TurnedTile& a) {
  if (a.count == 1) TurnTileOf<1>(a);
  if (a.count == 2) TurnTileOf<2>(a);
}

void FillRotate(Kernels& k) {
  k.sincos = SinCos;
  k.turn_tile = TurnTile;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillRotate);
void fill_rotate(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillRotate)(k);
}
}  // namespace kvant::tiles
#endif
