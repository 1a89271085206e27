// Planes to one byte per code, for the products of one instruction set. Included once per target, hence the toggled
// guard.
#if defined(KVANT_TILES_UNPACK_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_UNPACK_HPP
#undef KVANT_TILES_UNPACK_HPP
#else
#define KVANT_TILES_UNPACK_HPP
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "tiles/kernels.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {

struct Unpack {
  const std::byte* groups;  // of one row block of the plane
  int quads;
  int shift;
  std::uint8_t* codes;  // of the plane's first quad and the row block's first tile
  int quad_bytes;       // from quad to quad in `codes`
};

template <int kRight, int kBits, class D>
HWY_INLINE void UnpackPosition(D d, hwy::HWY_NAMESPACE::VFromD<D> group, int shift, std::uint8_t* to) {
  namespace hn = hwy::HWY_NAMESPACE;
  constexpr std::uint32_t kMask = ((1U << kBits) - 1) * 0x01010101U;
  auto* words = reinterpret_cast<std::uint32_t*>(to);
  const auto code = hn::And(hn::ShiftRight<kRight>(group), hn::Set(d, kMask));
  hn::StoreU(hn::Or(hn::ShiftLeftSame(code, shift), hn::LoadU(d, words)), d, words);
}

// All positions P of the groups of one row block; positions past the plane's last quad are not written.
template <int kBits, int kTiles, int... P>
HWY_NOINLINE void UnpackBlock(const Unpack& a, Indices<P...>) {
  namespace hn = hwy::HWY_NAMESPACE;
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
        UnpackPosition<kBits* decltype(p)::value, kBits>(
            d, group, a.shift, codes + kQuadOf * a.quad_bytes + (decltype(p)::value % kTiles) * kGroupBytes + 4 * lane);
      };
      (position(std::integral_constant<int, P>()), ...);
    }
  }
}

// `codes` gets the plane's bits added.
inline void UnpackRowBlock(const Unpack& a, int bits, int tiles) {
  if (bits == 1 && tiles == 2) UnpackBlock<1, 2>(a, Range<8>());
  if (bits == 1 && tiles == 1) UnpackBlock<1, 1>(a, Range<8>());
  if (bits == 2 && tiles == 2) UnpackBlock<2, 2>(a, Range<4>());
  if (bits == 2 && tiles == 1) UnpackBlock<2, 1>(a, Range<4>());
  if (bits == 4 && tiles == 2) UnpackBlock<4, 2>(a, Range<2>());
  if (bits == 4 && tiles == 1) UnpackBlock<4, 1>(a, Range<2>());
}

constexpr int kMaxPlanes = 32;

// Which quads the planes of a product cover.
struct Cover {
  const CodeProduct& a;

  int first(int i) const { return a.planes[i].first / kQuad; }
  int end(int i) const { return first(i) + quads(a.planes[i].depth); }
  bool touches(int i, int begin, int stop) const { return begin < end(i) && first(i) < stop; }
  // Whether a plane before `limit` covers some of the quads.
  bool covered(int limit, int begin, int stop) const {
    for (int j = 0; j < limit; ++j) {
      if (touches(j, begin, stop)) return true;
    }
    return false;
  }
  // No other plane has any of this one's quads.
  bool is_alone(int i) const {
    for (int j = i + 1; j < a.count; ++j) {
      if (touches(j, first(i), end(i))) return false;
    }
    return !covered(i, first(i), end(i));
  }
};

// Asks for memory that is needed later, some lines with every quad.
struct Asker {
  const std::byte* at = nullptr;
  int lines = 0;  // per quad

  HWY_INLINE void ask(int quads) {
    for (int i = 0; i < lines * quads; ++i, at += kGroupBytes) __builtin_prefetch(at, 0, 2);
  }
};

// Pairs of planes that recipes have and that are joined in one pass: bits and shift of the wider plane, then of the
// other one. First those whose codes have at most 4 bits.
constexpr int kPairs[][4] = {{2, 1, 1, 0}, {2, 0, 1, 2}, {2, 0, 2, 2}, {4, 1, 1, 0}, {4, 1, 2, 5}};
constexpr int kPairCount = sizeof kPairs / sizeof *kPairs;

// A pair as a type; no other plane if its bits are 0.
template <int kWideBits, int kWideLeft, int kNarrowBits, int kNarrowLeft>
struct Pair {
  static constexpr int kBits = kWideBits;
  static constexpr int kLeft = kWideLeft;
  static constexpr int kOtherBits = kNarrowBits;
  static constexpr int kOtherLeft = kNarrowLeft;
};

template <class Body, int... I>
void WithPair(int number, const Body& body, Indices<I...>) {
  ((number == I + 1 ? body(Pair<kPairs[I][0], kPairs[I][1], kPairs[I][2], kPairs[I][3]>()) : void()), ...);
}
// Calls body with a pair as a type; numbers count from 1.
template <class Body>
void WithPair(int number, const Body& body) {
  WithPair(number, body, Range<kPairCount>());
}

// A run of quads over which the same planes make up the codes.
struct Segment {
  int begin;
  int end;
  int count;               // planes; 0: all codes are 0
  std::int8_t planes[32];  // their numbers, in the order of the product or of the pair
  int pair;                // the number of the pair that they are, or 0
  bool in_registers;       // its codes are not wanted as bytes
};

// The depth of a product cut into segments.
struct Segments {
  int count = 0;
  Segment list[2 * kMaxPlanes + 1];

  explicit Segments(const Cover& cover) {
    const CodeProduct& a = cover.a;
    int cuts[2 * kMaxPlanes + 2];  // ascending, each once
    cuts[0] = 0;
    cuts[1] = quads(a.x_depth);
    int cut_count = 2;
    for (int i = 0; i < a.count; ++i) {
      for (const int cut : {cover.first(i), cover.end(i)}) {
        int at = cut_count;
        while (cuts[at - 1] > cut) --at;
        if (cuts[at - 1] == cut) continue;
        for (int j = cut_count++; j > at; --j) cuts[j] = cuts[j - 1];
        cuts[at] = cut;
      }
    }
    for (int c = 0; c + 1 < cut_count; ++c) {
      Segment& segment = list[count++];
      segment.begin = cuts[c];
      segment.end = cuts[c + 1];
      segment.count = 0;
      for (int i = 0; i < a.count; ++i) {
        if (cover.touches(i, segment.begin, segment.end)) segment.planes[segment.count++] = static_cast<std::int8_t>(i);
      }
      segment.pair = segment.count == 2 ? find_pair(a, segment) : 0;
      segment.in_registers = false;
    }
  }

  // Puts the planes of a pair in its order.
  static int find_pair(const CodeProduct& a, Segment& segment) {
    const CodePlane& p = a.planes[segment.planes[0]];
    const CodePlane& q = a.planes[segment.planes[1]];
    const auto is = [](const int(&pair)[4], const CodePlane& wide, const CodePlane& narrow) {
      return pair[0] == wide.bits && pair[1] == wide.shift && pair[2] == narrow.bits && pair[3] == narrow.shift;
    };
    for (int i = 0; i < kPairCount; ++i) {
      if (is(kPairs[i], p, q)) return i + 1;
      if (!is(kPairs[i], q, p)) continue;
      std::swap(segment.planes[0], segment.planes[1]);
      return i + 1;
    }
    return 0;
  }
};

// Where one row block of 4 row tiles of a plane lies, quads counted as in the product.
struct PlaneBlock {
  const std::byte* groups = nullptr;
  std::ptrdiff_t half = 0;  // to the groups of the last two row tiles (4-bit planes)
  std::ptrdiff_t next = 0;  // to the next row block
  int first = 0;
  int shift = 0;

  PlaneBlock(const CodeProduct& a, const CodePlane& plane, int tile)
      : groups(plane.plane + block_offset(plane.bits, a.rows, plane.depth, tile)),
        half(std::ptrdiff_t{quads(plane.depth)} * kGroupBytes),
        next(plane.bits == 4   ? 2 * half
             : plane.bits == 2 ? half
                               : std::ptrdiff_t{tiles::groups(1, 4, plane.depth)} * kGroupBytes),
        first(plane.first / kQuad),
        shift(plane.shift) {}
};

// The codes of row tile kTile in a register of a group; kLeft: times 2^kLeft.
template <int kBits, int kLeft, int kTile, class D, class V>
HWY_INLINE V TileField(D d, V group) {
  namespace hn = hwy::HWY_NAMESPACE;
  constexpr int kRight = kTile * kBits % 8 - kLeft;
  constexpr std::uint32_t kMask = (((1U << kBits) - 1) << kLeft) * 0x01010101U;
  if constexpr (kRight > 0) group = hn::ShiftRight<kRight>(group);
  if constexpr (kRight < 0) group = hn::ShiftLeft<-kRight>(group);
  return hn::And(group, hn::Set(d, kMask));
}

// The codes of row tile kTile in the group registers of a pair.
template <int kTile, class D, class V, int... P>
HWY_INLINE V JoinFields(D d, V wide, V narrow, Pair<P...> pair) {
  return hwy::HWY_NAMESPACE::Or(TileField<pair.kBits, pair.kLeft, kTile>(d, wide),
                                TileField<pair.kOtherBits, pair.kOtherLeft, kTile>(d, narrow));
}

// Tables for pairs whose codes fit half a byte: from a half of a group's bytes (two row tiles of a 2-bit plane, four of
// a 1-bit plane) to the codes of two row tiles in the halves of a byte.
struct NibbleTables {
  alignas(16) std::uint8_t wide[16] = {};
  alignas(16) std::uint8_t narrow[2][16] = {};  // for row tiles 0 and 1, 2 and 3; equal for 2-bit planes
};
constexpr NibbleTables make_nibbles(const int (&pair)[4]) {
  NibbleTables tables;
  const auto place = [](int codes, int bits, int left) {
    const int mask = (1 << bits) - 1;
    return static_cast<std::uint8_t>((codes & mask) << left | (codes >> bits & mask) << (4 + left));
  };
  for (int i = 0; i < 16; ++i) {
    tables.wide[i] = place(i, 2, pair[1]);
    for (int half = 0; half < 2; ++half) {
      tables.narrow[half][i] = place(pair[2] == 1 ? i >> 2 * half : i, pair[2], pair[3]);
    }
  }
  return tables;
}
constexpr NibbleTables kNibbles[] = {make_nibbles(kPairs[0]), make_nibbles(kPairs[1]), make_nibbles(kPairs[2])};
constexpr bool is_nibble(int pair) {
  return pair > 0 && pair <= static_cast<int>(sizeof kNibbles / sizeof *kNibbles);
}

// Row tiles 2 * half and 2 * half + 1 of a group of each plane; a 1-bit plane's quad in the low halves of its bytes.
template <class D, class V>
HWY_INLINE V JoinNibbles(D d, V wide, V narrow, const NibbleTables& tables, int half, int narrow_bits) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Repartition<std::uint8_t, D> d8;
  const auto look = [&](const std::uint8_t* table, V group, bool upper) HWY_ATTR {
    const V nibbles = hn::And(upper ? hn::ShiftRight<4>(group) : group, hn::Set(d, 0x0F0F0F0FU));
    return hn::BitCast(d, hn::TableLookupBytes(hn::LoadDup128(d8, table), hn::BitCast(d8, nibbles)));
  };
  return hn::Or(look(tables.wide, wide, half == 1), look(tables.narrow[half], narrow, narrow_bits == 2 && half == 1));
}

// The group registers of a quad: of one group, or of two for 4-bit planes.
template <int kBits, class D>
HWY_INLINE void LoadQuad(D d, const PlaneBlock& plane, int quad, int lane, hwy::HWY_NAMESPACE::VFromD<D>* group) {
  namespace hn = hwy::HWY_NAMESPACE;
  const int at = quad - plane.first;
  const auto* words = reinterpret_cast<const std::uint32_t*>(plane.groups + (kBits == 1 ? at / 2 : at) * kGroupBytes);
  group[0] = group[1] = hn::LoadU(d, words + lane);
  if (kBits == 4) group[1] = hn::LoadU(d, words + plane.half / 4 + lane);
  if (kBits == 1 && at % 2 != 0) group[0] = group[1] = hn::ShiftRight<4>(group[0]);
}

// Quads [begin, end) of one plane or of two at once, 4 row tiles: one store per register of codes.
template <int... P, int... T>
HWY_NOINLINE void JoinQuads([[maybe_unused]] Pair<P...> pair, const PlaneBlock& plane, const PlaneBlock& other,
                            int begin, int end, std::uint8_t* codes, Asker& ahead, Indices<T...>) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::uint32_t, 16> d;
  using V = hn::VFromD<decltype(d)>;
  const int step = static_cast<int>(hn::Lanes(d));
  for (int quad = begin; quad < end; ++quad) {
    ahead.ask(1);
    auto* words = reinterpret_cast<std::uint32_t*>(codes + std::ptrdiff_t{quad} * 4 * kGroupBytes);
    for (int lane = 0; lane < kLanes; lane += step) {
      V group[2];
      LoadQuad<pair.kBits>(d, plane, quad, lane, group);
      if constexpr (pair.kOtherBits == 0) {
        (hn::StoreU(TileField<pair.kBits, pair.kLeft, T>(d, group[T / 2]), d, words + T * kLanes + lane), ...);
      } else {
        V low[2];
        LoadQuad<pair.kOtherBits>(d, other, quad, lane, low);
        (hn::StoreU(JoinFields<T>(d, group[T / 2], low[T / 2], pair), d, words + T * kLanes + lane), ...);
      }
    }
  }
}

// Any planes: the first one stores, the others add.
template <int kBits, int... T>
HWY_NOINLINE void AddQuads(const PlaneBlock& plane, int begin, int end, bool add, std::uint8_t* codes, Indices<T...>) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::CappedTag<std::uint32_t, 16> d;
  using V = hn::VFromD<decltype(d)>;
  const int step = static_cast<int>(hn::Lanes(d));
  for (int quad = begin; quad < end; ++quad) {
    auto* words = reinterpret_cast<std::uint32_t*>(codes + std::ptrdiff_t{quad} * 4 * kGroupBytes);
    for (int lane = 0; lane < kLanes; lane += step) {
      V group[2];
      LoadQuad<kBits>(d, plane, quad, lane, group);
      const auto store = [&](V code, std::uint32_t* to) HWY_ATTR {
        code = hn::ShiftLeftSame(code, plane.shift);
        hn::StoreU(add ? hn::Or(code, hn::LoadU(d, to)) : code, d, to);
      };
      (store(TileField<kBits, 0, T>(d, group[T / 2]), words + T * kLanes + lane), ...);
    }
  }
}

inline void JoinSegment(const CodeProduct& a, const Segment& segment, int tile, std::uint8_t* codes, Asker& ahead) {
  constexpr Range<4> kTiles;
  const int begin = segment.begin;
  const int end = segment.end;
  if (segment.count == 0) {
    std::memset(codes + std::ptrdiff_t{begin} * 4 * kGroupBytes, 0,
                static_cast<std::size_t>(end - begin) * 4 * kGroupBytes);
    return;
  }
  const auto plane = [&](int i) -> const CodePlane& { return a.planes[segment.planes[i]]; };
  const auto is = [&](int i, int bits, int shift) { return plane(i).bits == bits && plane(i).shift == shift; };
  const PlaneBlock first(a, plane(0), tile);
  const auto join = [&](auto pair, const PlaneBlock& other) {
    JoinQuads(pair, first, other, begin, end, codes, ahead, kTiles);
  };
  if (segment.count == 1) {
    if (is(0, 4, 0)) return join(Pair<4, 0, 0, 0>(), first);
    if (is(0, 4, 1)) return join(Pair<4, 1, 0, 0>(), first);
    if (is(0, 2, 0)) return join(Pair<2, 0, 0, 0>(), first);
    if (is(0, 2, 1)) return join(Pair<2, 1, 0, 0>(), first);
    if (is(0, 1, 0)) return join(Pair<1, 0, 0, 0>(), first);
  }
  if (segment.pair != 0) {
    const PlaneBlock second(a, plane(1), tile);
    return WithPair(segment.pair, [&](auto pair) { join(pair, second); });
  }
  ahead.ask(end - begin);
  for (int i = 0; i < segment.count; ++i) {
    const PlaneBlock block(a, plane(i), tile);
    if (plane(i).bits == 4) AddQuads<4>(block, begin, end, i > 0, codes, kTiles);
    if (plane(i).bits == 2) AddQuads<2>(block, begin, end, i > 0, codes, kTiles);
    if (plane(i).bits == 1) AddQuads<1>(block, begin, end, i > 0, codes, kTiles);
  }
}

// Codes of fewer than 4 row tiles, plane by plane.
inline void UnpackPlanes(const Cover& cover, const Segments& segments, int tile, int tiles, std::uint8_t* codes) {
  const CodeProduct& a = cover.a;
  const int quad_bytes = tiles * kGroupBytes;
  std::uint32_t wanted = 0;
  bool any = false;
  for (int i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.list[i];
    if (segment.in_registers && segment.count < 2) continue;
    any = true;
    for (int j = 0; j < segment.count; ++j) wanted |= 1U << segment.planes[j];
  }
  if (!any) return;
  std::memset(codes, 0, static_cast<std::size_t>(quads(a.x_depth)) * static_cast<std::size_t>(quad_bytes));
  for (int i = 0; i < a.count; ++i) {
    if ((wanted >> i & 1) == 0) continue;
    const CodePlane& plane = a.planes[i];
    for (int t = tile; t < tile + tiles;) {
      const int block = block_tiles(plane.bits, row_tiles(a.rows) - t);
      UnpackRowBlock({plane.plane + block_offset(plane.bits, a.rows, plane.depth, t), quads(plane.depth), plane.shift,
                      codes + std::ptrdiff_t{cover.first(i)} * quad_bytes + (t - tile) * kGroupBytes, quad_bytes},
                     plane.bits, block);
      t += block;
    }
  }
}

// Codes of `tiles` row tiles from tile `tile` on, [quad][tile][16 lanes][4], all planes joined. Segments in registers
// are left as they are; of fewer than 4 row tiles only those of one plane can be.
inline void UnpackTiles(const Cover& cover, const Segments& segments, int tile, int tiles, std::uint8_t* codes,
                        Asker& ahead) {
  if (tiles < 4) {
    ahead.ask(quads(cover.a.x_depth));
    return UnpackPlanes(cover, segments, tile, tiles, codes);
  }
  for (int i = 0; i < segments.count; ++i) {
    if (!segments.list[i].in_registers) JoinSegment(cover.a, segments.list[i], tile, codes, ahead);
  }
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
