// Products with codes, once per instruction set through Highway (HWY_TARGET_INCLUDE compiles this file again per
// target).
//
// A row block (up to 4 row tiles = 64 rows) is multiplied in chunks of depth. A chunk reads its codes either straight
// from a plane (1 shift and 1 AND per register) or, where several planes make up a code, from bytes that unpack.hpp
// joined in a buffer in L1, [quad][row tile][16 lanes][4]; codes that index a table are always joined and then replaced
// by its bytes (1 load, 1 byte shuffle, 1 store per register). Each register of codes then meets all vectors:
//   VNNI     1 vpdpbusd per vector, 2 for a 16-bit x (its high and its low bytes)
//   pmaddwd  2 of them and 2 additions per vector, for 8- and 16-bit x alike, and an AND and a shift per register that
//            part codes of even and odd depth indices into 16-bit lanes
// Per 64 bytes of a 2-bit plane (4 row tiles x 4 depth indices), 4 vectors and a 16-bit x that is: 4 x (2 + 8) vector
// instructions with VNNI, 8 x (4 + 16) with AVX2, and 8 broadcasts per row tile that need no vector unit. The number of
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
// at base + (t >> tile_shift) * block_bytes, and its codes are (byte >> count + (t mod 2^tile_shift) * bits) & mask, or
// the whole byte if mask is 0.
struct Chunk {
  const std::uint8_t* base;
  int quad_bytes;   // from one quad of this chunk to the next
  int x_words;      // the same in x
  int block_bytes;  // from one group of row tiles to the next
  int tile_shift;   // log2 of the row tiles that share a byte
  int bits;
  int count;
  std::int32_t mask;
  int quad;                   // the first one in x
  int quads;                  // length
  int shift;                  // sums are worth 2^shift
  std::ptrdiff_t next_block;  // from a row block of 4 row tiles to the next
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

// One vector at a time: x is spread, used on all row tiles and gone, which keeps it out of the sums' registers.
template <bool kWide, int kVectors, int... T>
KVANT_DOT_ATTR HWY_INLINE void AddVector(const Codes* HWY_RESTRICT codes, const std::int32_t* x, Sum* HWY_RESTRICT high,
                                         Sum* HWY_RESTRICT low, Indices<T...>) {
#if KVANT_MADD
  static_cast<void>(low);
  const Codes x_even = Spread(x[0]);
  ((high[T * kVectors] = AddDot(high[T * kVectors], codes[2 * T], x_even)), ...);
  const Codes x_odd = Spread(x[1]);
  ((high[T * kVectors] = AddDot(high[T * kVectors], codes[2 * T + 1], x_odd)), ...);
#else
  const Codes x_high = Spread(x[0]);
  ((high[T * kVectors] = AddDot(high[T * kVectors], codes[T], x_high)), ...);
  if constexpr (kWide) {
    const Codes x_low = Spread(x[1]);
    ((low[T * kVectors] = AddDot(low[T * kVectors], codes[T], x_low)), ...);
  }
#endif
}

HWY_INLINE void StoreTotal(const DotArgs& a, Total total, int n, float* out) {
#if KVANT_VNNI
  const hn::CappedTag<std::int32_t, 16> di;
  StoreSum(a.to, hn::Vec<decltype(di)>{reinterpret_cast<__m512i>(total)}, n, out);
#else
  StoreSum(a.to, total, n, out);
#endif
}

// One chunk: T row tiles against N vectors; accumulator A is tile A / vectors and vector A % vectors. A function of its
// own, so that registers hold its sums and nothing else.
template <int kVectors, bool kWide, bool kField, int... T, int... N, int... A, int... I>
KVANT_DOT_ATTR HWY_NOINLINE void AddChunk(const DotArgs& a, const Chunk& c, Total* HWY_RESTRICT total,
                                          Indices<T...> tiles, Indices<N...>, Indices<A...>, Indices<I...>) {
  Sum high[] = {(static_cast<void>(A), Sum{})...};
  Sum low[] = {(static_cast<void>(A), Sum{})...};
  const std::uint8_t* quad = c.base + 4 * a.lane;
  const int shared = (1 << c.tile_shift) - 1;
  const std::int64_t offsets[] = {std::int64_t{(a.tile + T) >> c.tile_shift} * c.block_bytes...};
  const std::int64_t quad_bytes = c.quad_bytes;
  const std::int64_t vector_words = a.vector_words;
  const Codes counts[] = {Spread(c.count + ((a.tile + T) & shared) * c.bits)...};
  const Codes mask = Spread(c.mask);
  const std::int32_t* x = a.x + 2 * c.quad;
  const std::int64_t x_words = c.x_words;
  const std::int32_t* const end = x + x_words * c.quads;
  do {
    const Codes bytes[] = {kField ? Field(LoadCodes(quad + offsets[T]), counts[T], mask)
                                  : LoadCodes(quad + offsets[T])...};
#if KVANT_MADD
    const Codes codes[] = {(I % 2 == 0 ? Evens(bytes[I / 2]) : Odds(bytes[I / 2]))...};
#else
    const Codes* codes = bytes;
#endif
    (AddVector<kWide, kVectors>(codes, x + N * vector_words, high + N, low + N, tiles), ...);
    x += x_words;
    quad += quad_bytes;
  } while (x != end);
#if KVANT_MADD
  ((total[A] = Join(total[A], high[A], c.shift)), ...);
#else
  ((total[A] = Join<kWide>(total[A], high[A], low[A], c.shift)), ...);
#endif
}

template <int kVectors, bool kWide, int... A, class Tiles, class Vectors>
KVANT_DOT_ATTR HWY_NOINLINE void DotBlock(const DotArgs& a, Tiles tiles, Vectors vectors, Indices<A...> all) {
  for (std::size_t i = 0; i < a.ahead_bytes; i += kGroupBytes) __builtin_prefetch(a.ahead + i, 0, 2);
  using Halves = Range<2 * static_cast<int>(sizeof...(A)) / kVectors>;  // even and odd codes of each tile
  Total total[] = {(static_cast<void>(A), ZeroTotal())...};
  for (const Chunk* c = a.chunks; c != a.end; ++c) {
    if (c->mask == 0) {
      AddChunk<kVectors, kWide, false>(a, *c, total, tiles, vectors, all, Halves());
    } else {
      AddChunk<kVectors, kWide, true>(a, *c, total, tiles, vectors, all, Halves());
    }
  }
  (StoreTotal(a, total[A], A % kVectors, a.to.out + (A % kVectors) * a.to.stride + (A / kVectors) * kLanes), ...);
}

// Vectors up to which two row tiles share the spread x where there are 16 registers.
constexpr int kTwoTilesUpTo = 4;
// Row tiles of a call: sums, codes and x fit the registers, 32 with AVX-512, else 16.
constexpr int tiles_at_once(int vectors) {
  return KVANT_VNNI ? (vectors == 1 ? 4 : 2) : (vectors <= kTwoTilesUpTo ? 2 : 1);
}

template <int kVectors, bool kWide>
void DotTiles(DotArgs a, int tiles) {
  constexpr int kTiles = tiles_at_once(kVectors);
  float* out = a.to.out;
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
}

template <bool kWide>
void DotVectors(DotArgs a, int tiles, int vectors) {
  for (int n = 0; n < vectors;) {
    const int count = std::min(4, vectors - n);
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
// Vectors up to which every plane is read in place: multiplying each plane costs less than joining them (measured at 1
// and 2 vectors with AVX2: joining loses 10 % at one, wins 10 % at two).
constexpr int kFewVectors = KVANT_MADD ? 1 : 2;

// The chunks of a product. Planes in `direct` are chunks of their own; the others are joined, and the depth they cover
// is cut where the set of planes changes.
struct Program {
  const CodeProduct& a;
  Cover cover;
  std::uint64_t direct;
  Segments segments;
  int count = 0;
  Chunk chunks[(kMaxPlanes + 2) * 16];

  explicit Program(const CodeProduct& product)
      : a(product), cover{product}, direct(read_in_place(cover)), segments(cover, direct) {}
  static std::uint64_t read_in_place(const Cover& cover) {
    std::uint64_t planes = 0;
    if (cover.a.table != nullptr) return planes;  // codes that index a table have to be whole
    for (int i = 0; i < cover.a.count; ++i) {
      if (cover.a.vectors <= kFewVectors || cover.is_alone(i)) planes |= std::uint64_t{1} << i;
    }
    return planes;
  }
  bool joins() const { return direct != (std::uint64_t{1} << a.count) - 1; }

  // A group of a plane holds Q quads of x side by side: one chunk for each of them.
  void add_plane(const CodePlane& plane, int begin, int end, int tile, int tiles) {
    const int first = plane.first / kQuad;
    const int block = block_tiles(plane.bits, tiles);
    const int shift = group_shift(plane.bits, block);
    const int per_group = 1 << shift;
    const auto* base =
        reinterpret_cast<const std::uint8_t*>(plane.plane) + block_offset(plane.bits, a.rows, plane.depth, tile);
    begin = std::max(begin, first);
    end = std::min(end, first + quads(plane.depth));
    for (int quad = begin; quad < std::min(end, begin + per_group); ++quad) {
      const int group = (quad - first) >> shift;
      const int position = ((quad - first) & (per_group - 1)) * block;
      chunks[count++] = {base + std::ptrdiff_t{group} * kGroupBytes,
                         kGroupBytes,
                         2 * per_group,
                         groups(plane.bits, block, plane.depth) * kGroupBytes,
                         block >> 1,
                         plane.bits,
                         position * plane.bits,
                         ((1 << plane.bits) - 1) * 0x01010101,
                         quad,
                         (end - quad + per_group - 1) >> shift,
                         plane.shift,
                         std::ptrdiff_t{groups(plane.bits, block, plane.depth)} * kGroupBytes * (4 / block)};
    }
  }

  // Joined bytes of quads [begin, end).
  void add_bytes(const std::uint8_t* codes, int begin, int end, int tiles) {
    const int quad_bytes = tiles * kGroupBytes;
    chunks[count++] = {
        codes + std::ptrdiff_t{begin} * quad_bytes, quad_bytes, 2, kGroupBytes, 0, 0, 0, 0, begin, end - begin, 0, 0};
  }

  // From a row block of 4 row tiles to the next one.
  void advance() {
    for (int i = 0; i < count; ++i) chunks[i].base += chunks[i].next_block;
  }

  // All chunks of quads [begin, end) for the row block at tile `tile`.
  void cut(int begin, int end, int tile, int tiles, const std::uint8_t* codes) {
    count = 0;
    for (int i = 0; i < a.count; ++i) {
      if ((direct >> i & 1) != 0) add_plane(a.planes[i], begin, end, tile, tiles);
    }
    // Joined codes that lie together are one chunk, whatever their widths.
    for (int i = 0; i < segments.count;) {
      const int first = std::max(segments.list[i].begin, begin);
      int last = begin;
      for (; i < segments.count && segments.list[i].count > 0; ++i) last = std::min(segments.list[i].end, end);
      if (first < last) add_bytes(codes, first, last, tiles);
      while (i < segments.count && segments.list[i].count == 0) ++i;
    }
  }
};

void MultiplyCodes(const CodeProduct& a) {
  alignas(64) std::uint8_t codes[kMaxDepth / kQuad * 4 * kGroupBytes];
  Program program(a);
  // Each call for the first vectors asks for an equal share of whole lines; the last one may reach past the end.
  const int per_tile = kLanes / kSumRows;
  const int at_once = tiles_at_once(std::min(4, a.vectors));
  const auto calls = static_cast<std::size_t>(std::max(1, row_tiles(a.rows) * per_tile / at_once));
  const std::size_t share = base::round_up((a.ahead.bytes + calls - 1) / calls, std::size_t{kGroupBytes});
  const std::byte* ahead = a.ahead.data;
  for (int tile = 0, tiles = 0; tile < row_tiles(a.rows); tile += tiles) {
    const int previous = tiles;
    tiles = block_tiles(1, row_tiles(a.rows) - tile);
    Asker nothing;
    if (program.joins()) UnpackTiles(program.cover, program.segments, program.direct, tile, tiles, codes, nothing);
    if (a.table != nullptr) LookUp(a.table, codes, quads(a.x_depth) * tiles * kGroupBytes);
    for (int quad = 0; quad < quads(a.x_depth); quad += kSumQuads) {
      if (previous == 4 && tiles == 4 && quads(a.x_depth) <= kSumQuads) {
        program.advance();
      } else {
        program.cut(quad, std::min(quad + kSumQuads, quads(a.x_depth)), tile, tiles, codes);
      }
      const DotArgs dot{program.chunks,
                        program.chunks + program.count,
                        0,
                        0,
                        a.x,
                        vector_words(a.x_depth),
                        Output(a, quad == 0, tile),
                        ahead,
                        quad == 0 ? share : 0};
      if (a.wide) {
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
