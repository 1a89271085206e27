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

// Where the codes of 16 rows begin in each plane.
struct RowTile {
  const std::byte* groups[kMaxTurnedPlanes];
  int tiles[kMaxTurnedPlanes];  // of the row block that these rows are in
  int place[kMaxTurnedPlanes];  // which of them
};

void FindRows(const TurnedTile& a, int tile, RowTile* rows) {
  for (int k = 0; k < a.count; ++k) {
    const CodePlane& plane = a.planes[k];
    for_each_block(plane.bits, a.rows, plane.depth, [&](int first, int tiles, std::size_t offset) {
      if (tile < first || tile >= first + tiles) return;
      rows->groups[k] = plane.plane + offset;
      rows->tiles[k] = tiles;
      rows->place[k] = tile - first;
    });
  }
}

using Float = hn::CappedTag<float, 16>;
using Word = hn::RebindToUnsigned<Float>;

// One channel of a row tile: where its words are and how its bits lie in them.
struct Channel {
  const std::uint32_t* words[kMaxTurnedPlanes];
  int right[kMaxTurnedPlanes];
  float min;
  float step;
};

HWY_INLINE void FindChannel(const TurnedTile& a, const RowTile& rows, int depth, Channel* channel) {
  for (int k = 0; k < a.count; ++k) {
    const int bits = a.planes[k].bits;
    const int shift = group_shift(bits, rows.tiles[k]);
    const int quad = depth / kQuad;
    const int position = (quad & ((1 << shift) - 1)) * rows.tiles[k] + rows.place[k];
    channel->words[k] = reinterpret_cast<const std::uint32_t*>(rows.groups[k]) + (quad >> shift) * kLanes;
    channel->right[k] = depth % kQuad * 8 + position * bits;
  }
  channel->min = a.min[depth];
  channel->step = a.step[depth];
}

// The codes' levels as bytes in 32-bit lanes: an index of 0x80 and more in the other bytes gives zeros there.
template <class Table>
HWY_INLINE hn::VFromD<Float> Levels(const TurnedTile& a, const Channel& channel, int lane, Table table) {
  const Word d;
  auto code = hn::Set(d, 0x80808000U);
  for (int k = 0; k < a.count; ++k) {
    const auto mask = hn::Set(d, (1U << a.planes[k].bits) - 1);
    const auto bits = hn::And(hn::ShiftRightSame(hn::LoadU(d, channel.words[k] + lane), channel.right[k]), mask);
    code = hn::Or(code, hn::ShiftLeftSame(bits, a.planes[k].shift));
  }
  const hn::Repartition<std::uint8_t, Word> d8;
  const hn::RebindToSigned<Word> di;
  const auto level = hn::BitCast(di, hn::TableLookupBytesOr0(table, hn::BitCast(d8, code)));
  const Float df;
  return hn::MulAdd(hn::ConvertTo(df, level), hn::Set(df, channel.step), hn::Set(df, channel.min));
}

void TurnTile(const TurnedTile& a) {
  const Float d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const hn::Repartition<std::uint8_t, Word> d8;
  const auto table = hn::LoadDup128(d8, a.table);
  for (int tile = 0; tile < row_tiles(a.rows); ++tile) {
    RowTile rows;
    FindRows(a, tile, &rows);
    float* out = a.out + tile * kLanes;
    for (int pair = 0; pair < a.pairs; ++pair) {
      const int first = pair * a.pair_step;
      const int second = first + a.pair_distance;
      Channel one, other;
      FindChannel(a, rows, first, &one);
      FindChannel(a, rows, second, &other);
      const TurnBlock& block = a.blocks[tile];
      const auto block_cosine = hn::Set(d, block.cosines[pair]);
      const auto block_sine = hn::Set(d, block.sines[pair]);
      for (int lane = 0; lane < kLanes; lane += lanes) {
        const auto lane_cosine = hn::LoadU(d, block.lane_cosines + pair * kLanes + lane);
        const auto lane_sine = hn::LoadU(d, block.lane_sines + pair * kLanes + lane);
        const auto cosine = hn::NegMulAdd(block_sine, lane_sine, hn::Mul(block_cosine, lane_cosine));
        const auto sine = hn::MulAdd(block_sine, lane_cosine, hn::Mul(block_cosine, lane_sine));
        const auto x = Levels(a, one, lane, table);
        const auto y = Levels(a, other, lane, table);
        hn::StoreU(hn::NegMulAdd(y, sine, hn::Mul(x, cosine)), d, out + first * a.out_stride + lane);
        hn::StoreU(hn::MulAdd(y, cosine, hn::Mul(x, sine)), d, out + second * a.out_stride + lane);
      }
    }
    for (int i = 2 * a.pairs; i < a.depth; ++i) {
      Channel channel;
      FindChannel(a, rows, i, &channel);
      for (int lane = 0; lane < kLanes; lane += lanes) {
        hn::StoreU(Levels(a, channel, lane, table), d, out + i * a.out_stride + lane);
      }
    }
  }
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
