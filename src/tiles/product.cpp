// Products with codes, once per instruction set through Highway (HWY_TARGET_INCLUDE compiles this file again per
// target).
//
// A row block (up to 4 row tiles = 64 rows) is multiplied in chunks of depth. A chunk's codes are
//   a field  of one plane, left where it is: 1 AND per register; what that scales the sums by is shifted out of them
//   once a pair   of planes, joined in registers: 5 instructions per register, for up to 4 vectors and whole row blocks
//   bytes    that unpack.hpp joined in a buffer in L1, [quad][row tile][16 lanes][4]: other planes, more vectors (then
//            one load pays for all), and codes that index a table, which are replaced by its bytes there
// Each register of codes then meets all vectors:
//   VNNI     1 vpdpbusd per vector, 2 for a 16-bit x (its high and its low bytes)
//   pmaddwd  2 of them and 2 additions per vector, for 8- and 16-bit x alike; codes are parted into even and odd depth
//            indices, 16 bits each: one shift per register of a plane, or an AND and a shift per register of codes
// Per 64 bytes of a 2-bit plane (4 row tiles x 4 depth indices), 4 vectors and a 16-bit x that is: 4 x (1 + 8) vector
// instructions with VNNI, 4 x (5 + 32) with AVX2, and 8 broadcasts per row tile that need no vector unit. The number of
// multiplications does not depend on the width of the codes; they are the bound: 4 AVX2 pipes give 32 multiply-adds of
// a 16-bit x per cycle.
#include <algorithm>
#include <utility>

// foreach_target.h must come before highway.h.
// clang-format off
#define HWY_WANT_AVX3_DL 1
#define HWY_WANT_SSE4 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tiles/product.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on
#include "tiles/dot.hpp"
#include "tiles/kernels.hpp"
#include "tiles/output.hpp"
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"
#include "tiles/unpack.hpp"
// After what it builds upon.
#include "tiles/matrix_product.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One piece of depth whose codes lie in one place. 2^tile_shift row tiles share a byte: row tile t of the block starts
// at base + (t >> tile_shift) * block_bytes, and its codes are the bits `mask` << (t mod 2^tile_shift) * bits of every
// byte, or whole bytes if mask is 0. Pairs of 2-bit planes and others: the groups at base and those at `other`.
struct Chunk {
  const std::uint8_t* base;
  int quad_bytes;   // from one quad of this chunk to the next
  int x_words;      // the same in x
  int block_bytes;  // from one group of row tiles to the next
  int tile_shift;   // log2 of the row tiles that share a byte
  int bits;
  std::uint32_t mask;
  int quad;                   // the first one in x
  int quads;                  // length
  int scale;                  // what lies at tile 0's bits is worth 2^scale
  std::ptrdiff_t next_block;  // from a row block of 4 row tiles to the next
  int pair;                   // its number, or 0
  int odd;                    // the other plane's first quad is the second one of a group
  const std::uint8_t* other;  // null unless a pair
  std::ptrdiff_t next_other;
};

struct DotArgs {
  const Chunk* chunks;
  const Chunk* end;
  int tile;                   // first row tile of this call inside the block
  int lane;                   // first lane
  const std::int32_t* x;      // first vector of this call
  std::int64_t vector_words;  // words from vector to vector
  Output to;
  const std::byte* ahead;   // asked for at the start of the next call
  std::size_t ahead_bytes;  // per call
};

// Codes of all row tiles times one word of x of one vector: x is spread, used and gone, which keeps it out of the sums'
// registers.
template <int kVectors, int... T>
KVANT_DOT_ATTR HWY_INLINE void AddWord(const Codes* HWY_RESTRICT codes, const std::int32_t* x, Sum* HWY_RESTRICT sum,
                                       Indices<T...>) {
#if HWY_TARGET == HWY_AVX2
  if constexpr (sizeof...(T) == 2) return AddTwoDots(sum[0], sum[kVectors], codes[0], codes[1], x);
#endif
  const Codes spread = Spread(*x);
  (AddDot(sum[T * kVectors], codes[T], spread), ...);
}

// Bytes of all row tiles times a quad of all vectors.
template <bool kWide, int kVectors, int... T, int... N>
KVANT_DOT_ATTR HWY_INLINE void AddQuad(const Codes* HWY_RESTRICT bytes, const std::int32_t* x,
                                       std::int64_t vector_words, Sum* HWY_RESTRICT high,
                                       [[maybe_unused]] Sum* HWY_RESTRICT low, Indices<T...> tiles, Indices<N...>) {
#if KVANT_MADD
  const Codes even[] = {Evens(bytes[T])...};
  (AddWord<kVectors>(even, x + N * vector_words, high + N, tiles), ...);
  const Codes odd[] = {Odds(bytes[T])...};
  (AddWord<kVectors>(odd, x + N * vector_words + 1, high + N, tiles), ...);
#else
  (AddWord<kVectors>(bytes, x + N * vector_words, high + N, tiles), ...);
  if constexpr (kWide) (AddWord<kVectors>(bytes, x + N * vector_words + 1, low + N, tiles), ...);
#endif
}

template <bool kWide>
KVANT_DOT_ATTR HWY_INLINE void AddTotal(Total& total, Sum high, [[maybe_unused]] Sum low, int shift) {
#if KVANT_MADD
  total = Join(total, high, shift);
#else
  total = Join<kWide>(total, high, low, shift);
#endif
}

// One chunk: T row tiles against N vectors; accumulator A is tile A / vectors and vector A % vectors. A function of its
// own, so that registers hold its sums and nothing else. pmaddwd: codes of even depth indices first, then the odd ones,
// so that few registers hold codes.
template <int kVectors, bool kWide, bool kField, int... T, int... N, int... A>
KVANT_DOT_ATTR HWY_NOINLINE void AddChunk(const DotArgs& a, const Chunk& c, Total* HWY_RESTRICT total,
                                          Indices<T...> tiles, Indices<N...> vectors, Indices<A...>) {
  Sum high[] = {(static_cast<void>(A), Sum{})...};
  Sum low[] = {(static_cast<void>(A), Sum{})...};
  const std::uint8_t* quad = c.base + 4 * a.lane;
  const int shared = (1 << c.tile_shift) - 1;
  const int places[] = {((a.tile + T) & shared) * c.bits...};
  const std::int64_t offsets[] = {std::int64_t{(a.tile + T) >> c.tile_shift} * c.block_bytes...};
  const std::int64_t quad_bytes = c.quad_bytes;
  const std::int64_t vector_words = a.vector_words;
  const Codes masks[] = {Spread(static_cast<std::int32_t>((c.mask & kCodeBytes) << places[T]))...};
  const std::int32_t* x = a.x + 2 * c.quad;
  const std::int64_t x_words = c.x_words;
  const std::int32_t* const end = x + x_words * c.quads;
  do {
#if KVANT_MADD
    if constexpr (kField) {  // both row tiles share a register
      const Codes bytes = LoadCodes(quad + offsets[0]);
      const Codes even[] = {Mask(bytes, masks[T])...};
      (AddWord<kVectors>(even, x + N * vector_words, high + N, tiles), ...);
      const Codes next = Odds(bytes);
      const Codes odd[] = {Mask(next, masks[T])...};
      (AddWord<kVectors>(odd, x + N * vector_words + 1, high + N, tiles), ...);
    } else
#endif
    {
      const Codes bytes[] = {kField ? Mask(LoadCodes(quad + offsets[T]), masks[T]) : LoadCodes(quad + offsets[T])...};
      AddQuad<kWide, kVectors>(bytes, x, vector_words, high, low, tiles, vectors);
    }
    x += x_words;
    quad += quad_bytes;
  } while (x != end);
  (AddTotal<kWide>(total[A], high[A], low[A], c.scale - places[A / kVectors]), ...);
}

// The same for a pair of planes over whole row blocks, from row tile kFirst on. Two byte shuffles put the codes of a
// pair of row tiles into the halves of a byte, and those are fields.
template <int kVectors, bool kWide, int kFirst, int kOtherBits, int... T, int... N, int... A>
KVANT_DOT_ATTR HWY_NOINLINE void AddPair(const DotArgs& a, const Chunk& c, Total* HWY_RESTRICT total,
                                         Indices<T...> tiles, [[maybe_unused]] Indices<N...> vectors, Indices<A...>) {
  const hn::CappedTag<std::uint32_t, 16> d;
  Sum high[] = {(static_cast<void>(A), Sum{})...};
  Sum low[] = {(static_cast<void>(A), Sum{})...};
  const NibbleTables& tables = kNibbles[c.pair - 1];
  const Codes masks[] = {Spread(static_cast<std::int32_t>((0x0F0F0F0FU & kCodeBytes) << 4 * (T % 2)))...};
  const std::uint8_t* quad = c.base + 4 * a.lane;
  const std::uint8_t* other = c.other + 4 * a.lane;
  const std::int64_t vector_words = a.vector_words;
  const std::int32_t* x = a.x + 2 * c.quad;
  const std::int32_t* const end = x + 2 * c.quads;
  bool odd = c.odd != 0;
  do {
    const auto wide = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(quad));
    auto narrow = hn::LoadU(d, reinterpret_cast<const std::uint32_t*>(other));
    if constexpr (kOtherBits == 1) {
      if (odd) narrow = hn::ShiftRight<4>(narrow);
      other += odd ? kGroupBytes : 0;
      odd = !odd;
    } else {
      other += kGroupBytes;
    }
    const auto halves = [&](int tile) KVANT_DOT_ATTR {
      return ToCodes(JoinNibbles(d, wide, narrow, tables, tile / 2, kOtherBits));
    };
#if KVANT_MADD
    const Codes bytes = halves(kFirst);
    const Codes even[] = {Mask(bytes, masks[T])...};
    (AddWord<kVectors>(even, x + N * vector_words, high + N, tiles), ...);
    const Codes next = Odds(bytes);
    const Codes odds[] = {Mask(next, masks[T])...};
    (AddWord<kVectors>(odds, x + N * vector_words + 1, high + N, tiles), ...);
#else
    const Codes bytes[] = {Mask(halves(kFirst + T), masks[T])...};
    AddQuad<kWide, kVectors>(bytes, x, vector_words, high, low, tiles, vectors);
#endif
    x += 2;
    quad += kGroupBytes;
  } while (x != end);
  (AddTotal<kWide>(total[A], high[A], low[A], -4 * (A / kVectors % 2)), ...);
}

template <int kVectors, bool kWide, int... A, class Tiles, class Vectors>
KVANT_DOT_ATTR HWY_NOINLINE void DotBlock(const DotArgs& a, Tiles tiles, Vectors vectors, Indices<A...> all) {
  for (std::size_t i = 0; i < a.ahead_bytes; i += kGroupBytes) __builtin_prefetch(a.ahead + i, 0, 2);
  constexpr int kTiles = static_cast<int>(sizeof...(A)) / kVectors;
  Total total[] = {(static_cast<void>(A), ZeroTotal())...};
  for (const Chunk* c = a.chunks; c != a.end; ++c) {
    if (c->pair != 0) {
      if constexpr (kTiles > 1) {
        const auto add = [&](auto first) KVANT_DOT_ATTR {
          constexpr int kFirst = decltype(first)::value;
          if (kPairs[c->pair - 1][2] == 1) AddPair<kVectors, kWide, kFirst, 1>(a, *c, total, tiles, vectors, all);
          if (kPairs[c->pair - 1][2] == 2) AddPair<kVectors, kWide, kFirst, 2>(a, *c, total, tiles, vectors, all);
        };
        if (a.tile == 0) add(std::integral_constant<int, 0>());
        if (a.tile != 0) add(std::integral_constant<int, 4 - kTiles>());
      }
    } else if (c->mask == 0) {
      AddChunk<kVectors, kWide, false>(a, *c, total, tiles, vectors, all);
    } else {
      AddChunk<kVectors, kWide, true>(a, *c, total, tiles, vectors, all);
    }
  }
  const Output to = a.to;  // stores of vectors may change what pointers lead to
  WithStart(to.start, [&](auto start) KVANT_DOT_ATTR {
    (StoreSum<decltype(start)::value>(to, ToInts(total[A]), A % kVectors,
                                      to.out + (A % kVectors) * to.stride + (A / kVectors) * kLanes),
     ...);
  });
}

constexpr int kGroupVectors = 4;  // that meet a register of codes at once
// Row tiles of a call: sums, codes and x fit the registers, 32 with AVX-512, else 16.
constexpr int tiles_at_once(int vectors) {
  return KVANT_VNNI && vectors == 1 ? 4 : 2;
}

template <int kVectors, bool kWide>
void DotTiles(DotArgs& a, int tiles) {
  constexpr int kTiles = tiles_at_once(kVectors);
  float* const out = a.to.out;
  for (a.tile = 0; a.tile < tiles;) {
    const bool full = tiles - a.tile >= kTiles;
    for (a.lane = 0; a.lane < kLanes; a.lane += kSumRows) {
      a.to.out = out + a.tile * kLanes + a.lane;
      if (full) {
        DotBlock<kVectors, kWide>(a, Range<kTiles>(), Range<kVectors>(), Range<kTiles * kVectors>());
      } else {
        DotBlock<kVectors, kWide>(a, Range<1>(), Range<kVectors>(), Range<kVectors>());
      }
      a.ahead += a.ahead_bytes;
    }
    a.tile += full ? kTiles : 1;
  }
  a.to.out = out;
}

template <bool kWide>
void DotVectors(DotArgs& a, int tiles, int vectors) {
  for (int n = 0; n < vectors;) {
    const int count = std::min(kGroupVectors, vectors - n);
    if (count == 4) DotTiles<4, kWide>(a, tiles);
    if (count == 3) DotTiles<3, kWide>(a, tiles);
    if (count == 2) DotTiles<2, kWide>(a, tiles);
    if (count == 1) DotTiles<1, kWide>(a, tiles);
    n += count;
    a.ahead_bytes = 0;  // the first vectors ask for all of it
    a.x += count * a.vector_words;
    a.to.next(count);
  }
}

constexpr int kSumQuads = kSumDepth / kQuad;
// Segments up to which each is a chunk of its own for several vectors: short ones cost more than joining all. For few
// vectors joining costs more.
constexpr int kFewSegments = 2;
constexpr int kFewVectors = KVANT_MADD ? 1 : 2;

// The chunks of a product.
struct Program {
  const CodeProduct& a;
  Cover cover;
  Segments segments;
  int count = 0;
  Chunk chunks[2 * kSumQuads];  // each has a quad of its own, or several

  explicit Program(const CodeProduct& product) : a(product), cover{product}, segments(cover) {
    if (a.table != nullptr) return;  // codes that index a table have to be whole
    const bool any = a.vectors <= kFewVectors || (a.vectors <= kGroupVectors && segments.count <= kFewSegments);
    for (int i = 0; i < segments.count; ++i) {
      Segment& segment = segments.list[i];
      const bool field = segment.count == 1 && (any || cover.is_alone(segment.planes[0]));
      segment.in_registers = segment.count == 0 || field || (is_nibble(segment.pair) && any);
    }
  }
  // Pairs are whole row blocks.
  static bool joins(const Segment& segment, int tiles) {
    return !segment.in_registers || (segment.count > 1 && tiles < 4);
  }

  // A group of a plane holds Q quads of x side by side: one chunk for each of them.
  void add_field(const CodePlane& plane, int begin, int end, int tile, int tiles) {
    const int first = plane.first / kQuad;
    const int block = block_tiles(plane.bits, tiles);
    const int shift = group_shift(plane.bits, block);
    const int per_group = 1 << shift;
    const auto* base =
        reinterpret_cast<const std::uint8_t*>(plane.plane) + block_offset(plane.bits, a.rows, plane.depth, tile);
    const int block_bytes = groups(plane.bits, block, plane.depth) * kGroupBytes;
    for (int quad = begin; quad < std::min(end, begin + per_group); ++quad) {
      const int place = ((quad - first) & (per_group - 1)) * block * plane.bits;
      chunks[count++] = {base + std::ptrdiff_t{(quad - first) >> shift} * kGroupBytes,
                         kGroupBytes,
                         2 * per_group,
                         block_bytes,
                         block >> 1,
                         plane.bits,
                         ((1U << plane.bits) - 1) * 0x01010101U << place,
                         quad,
                         (end - quad + per_group - 1) >> shift,
                         plane.shift - place,
                         std::ptrdiff_t{block_bytes} * (4 / block),
                         0,
                         0,
                         nullptr,
                         0};
    }
  }

  void add_pair(const Segment& segment, int begin, int end, int tile) {
    const CodePlane& wide = a.planes[segment.planes[0]];
    const CodePlane& narrow = a.planes[segment.planes[1]];
    const PlaneBlock first(a, wide, tile);
    const PlaneBlock second(a, narrow, tile);
    const int at = begin - second.first;
    const auto base = [](const PlaneBlock& block, int group) {
      return reinterpret_cast<const std::uint8_t*>(block.groups) + std::ptrdiff_t{group} * kGroupBytes;
    };
    chunks[count++] = {base(first, begin - first.first),
                       kGroupBytes,
                       2,
                       0,
                       0,
                       0,
                       0,
                       begin,
                       end - begin,
                       0,
                       first.next,
                       segment.pair,
                       narrow.bits == 1 ? at & 1 : 0,
                       base(second, narrow.bits == 1 ? at >> 1 : at),
                       second.next};
  }

  // Joined bytes of quads [begin, end).
  void add_bytes(const std::uint8_t* codes, int begin, int end, int tiles) {
    const int quad_bytes = tiles * kGroupBytes;
    chunks[count++] = {codes + std::ptrdiff_t{begin} * quad_bytes,
                       quad_bytes,
                       2,
                       kGroupBytes,
                       0,
                       0,
                       0,
                       begin,
                       end - begin,
                       0,
                       0,
                       0,
                       0,
                       nullptr,
                       0};
  }

  // From a row block of 4 row tiles to the next one.
  void advance() {
    for (int i = 0; i < count; ++i) {
      chunks[i].base += chunks[i].next_block;
      chunks[i].other += chunks[i].next_other;
    }
  }

  // All chunks of quads [begin, end) for the row block at tile `tile`.
  void cut(int begin, int end, int tile, int tiles, const std::uint8_t* codes) {
    count = 0;
    for (int i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.list[i];
      const int first = std::max(segment.begin, begin);
      int last = std::min(segment.end, end);
      if (joins(segment, tiles)) {  // joined codes that lie together are one chunk, whatever their widths
        for (; i + 1 < segments.count && joins(segments.list[i + 1], tiles); ++i) {
          last = std::min(segments.list[i + 1].end, end);
        }
        if (first < last) add_bytes(codes, first, last, tiles);
      } else if (first < last && segment.count == 1) {
        add_field(a.planes[segment.planes[0]], first, last, tile, tiles);
      } else if (first < last && segment.count == 2) {
        add_pair(segment, first, last, tile);
      }
    }
  }
};

void MultiplyCodes(const CodeProduct& a) {
  alignas(64) std::uint8_t codes[kMaxDepth / kQuad * 4 * kGroupBytes];
  Program program(a);
  // Each call for the first vectors asks for an equal share of whole lines; the last one may reach past the end.
  const int per_tile = kLanes / kSumRows;
  const int at_once = tiles_at_once(std::min(kGroupVectors, a.vectors));
  const auto calls = static_cast<std::uint32_t>(std::max(1, row_tiles(a.rows) * per_tile / at_once));
  const auto lines = static_cast<std::uint32_t>((a.ahead.bytes + kGroupBytes - 1) / kGroupBytes);
  const std::size_t share = std::size_t{(lines + calls - 1) / calls} * kGroupBytes;
  const std::byte* ahead = a.ahead.data;
  for (int tile = 0, tiles = 0; tile < row_tiles(a.rows); tile += tiles) {
    const int previous = tiles;
    tiles = block_tiles(1, row_tiles(a.rows) - tile);
    Asker nothing;
    UnpackTiles(program.cover, program.segments, tile, tiles, codes, nothing);
    if (a.table != nullptr) LookUp(a.table, codes, quads(a.x_depth) * tiles * kGroupBytes);
    for (int quad = 0; quad < quads(a.x_depth); quad += kSumQuads) {
      if (previous == 4 && tiles == 4 && quads(a.x_depth) <= kSumQuads) {
        program.advance();
      } else {
        program.cut(quad, std::min(quad + kSumQuads, quads(a.x_depth)), tile, tiles, codes);
      }
      DotArgs dot{program.chunks,
                  program.chunks + program.count,
                  0,
                  0,
                  a.x,
                  vector_words(a.x_depth),
                  Output(a, quad == 0, tile),
                  ahead,
                  quad == 0 ? share : 0};
      if (a.wide || KVANT_MADD) {
        DotVectors<true>(dot, tiles, a.vectors);
      } else {
        DotVectors<false>(dot, tiles, a.vectors);
      }
    }
    ahead += share * static_cast<std::size_t>(tiles * per_tile / at_once);
  }
}

void FillProducts(Kernels& k) {
  k.integer_dot = KVANT_VNNI != 0;
  k.multiply_codes = MultiplyCodes;
}

// Few vectors leave most of a matrix tile empty.
template <template <int> class Matrix>
void MultiplyMatrix(const CodeProduct& a) {
  if (a.vectors < kMatrixVectors) return MultiplyCodes(a);
  ThreadState before;
  const bool restore = Matrix<4>::begin(before);
  MultiplyTiles<Matrix>(a);
  if (restore) Matrix<4>::end(before);
}

void FillMatrixProducts(Kernels& k, bool emulated) {
#if KVANT_AMX
  if (!emulated) {
    k.begin_products = [](ThreadState& before) { AmxMatrix<4>::begin(before); };
    k.end_products = AmxMatrix<4>::end;
    k.multiply_codes = MultiplyMatrix<AmxMatrix>;
    return;
  }
#endif
  static_cast<void>(emulated);
  k.multiply_codes = MultiplyMatrix<EmulatedMatrix>;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillProducts);
void fill_products(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillProducts)(k);
}
HWY_EXPORT(FillMatrixProducts);
void fill_matrix_products(Kernels& k, bool emulated) {
  HWY_DYNAMIC_DISPATCH(FillMatrixProducts)(k, emulated);
}
}  // namespace kvant::tiles
#endif
