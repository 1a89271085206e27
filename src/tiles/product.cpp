// Products with codes, once per instruction set through Highway (HWY_TARGET_INCLUDE compiles this file again per
// target).
//
// A row block (up to 4 row tiles = 64 rows) is multiplied in chunks of depth. A chunk reads its codes either straight
// from a plane (1 shift and 1 AND per register) or, where several planes make up a code, from bytes that unpack.hpp
// joined in a buffer in L1, [quad][row tile][16 lanes][4]. Each register of codes then meets all vectors:
//   VNNI     1 vpdpbusd per vector, 2 for a 16-bit x (its high and its low bytes)
//   maddubs  1 pmaddubsw and 1 16-bit add per vector, twice for a 16-bit x; 16-bit sums overflow after 127 / largest
//   code
//            quads, where a chunk ends and its sums move to 32 bits (4 instructions per vector and register)
// Per 64 bytes of a 2-bit plane (4 row tiles x 4 depth indices), 4 vectors and a 16-bit x that is: 4 x (2 + 8) vector
// instructions with VNNI, 8 x (2 + 16) with AVX2, and 8 broadcasts per row tile that need no vector unit. The number of
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
#include "tiles/plane.hpp"
#include "tiles/simd.hpp"
#include "tiles/unpack.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvant::tiles::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One piece of depth whose codes lie in one place. Row tile t of the block starts at base + t / tiles * block_bytes;
// its codes are (byte >> count + t % tiles * bits) & mask, or the whole byte if mask is 0.
struct Chunk {
  const std::uint8_t* base;
  int quad_bytes;   // from quad to quad
  int block_bytes;  // from one group of row tiles to the next
  int tiles;        // row tiles that share a byte
  int bits;
  int count;
  std::int32_t mask;
  int quad;   // of x
  int quads;  // length
  int shift;  // sums are worth 2^shift
};

struct DotArgs {
  const Chunk* chunks;
  const Chunk* end;
  int tile;                   // first row tile of this call inside the block
  int lane;                   // first lane
  const std::int32_t* x;      // first vector of this call
  std::int64_t vector_words;  // words from vector to vector
  Start start;
  const float* factor;
  const float* alpha;
  const float* bias;
  float* out;
  std::int64_t out_stride;
  const std::byte* ahead;   // asked for at the start of the next call
  std::size_t ahead_bytes;  // per call
};

// One vector at a time: x is spread, used on all row tiles and gone, which keeps it out of the sums' registers.
template <bool kWide, int kVectors, int... T>
KVANT_DOT_ATTR HWY_INLINE void AddVector(const Codes* HWY_RESTRICT codes, const std::int32_t* x, Sum* HWY_RESTRICT high,
                                         Sum* HWY_RESTRICT low, Indices<T...>) {
  const Codes x_high = Spread(x[0]);
  ((high[T * kVectors] = AddDot(high[T * kVectors], codes[T], x_high)), ...);
  if constexpr (kWide) {
    const Codes x_low = Spread(x[1]);
    ((low[T * kVectors] = AddDot(low[T * kVectors], codes[T], x_low)), ...);
  }
}

HWY_INLINE void StoreTotal(const DotArgs& a, Total total, int n, float* out) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
#if KVANT_VNNI
  const hn::Vec<decltype(di)> sum{reinterpret_cast<__m512i>(total)};
#else
  const auto sum = total;
#endif
  const auto product = hn::Mul(hn::ConvertTo(d, sum), hn::Set(d, a.factor[n]));
  static_cast<void>(di);
  if (a.start == Start::add) {
    hn::StoreU(hn::Add(hn::LoadU(d, out), product), d, out);
  } else if (a.start == Start::replace) {
    hn::StoreU(hn::Add(hn::Set(d, a.bias[n]), product), d, out);
  } else {
    const auto before = hn::MulAdd(hn::LoadU(d, out), hn::Set(d, a.alpha[n]), hn::Set(d, a.bias[n]));
    hn::StoreU(hn::Add(before, product), d, out);
  }
}

// One chunk: T row tiles against N vectors; accumulator A is tile A / vectors and vector A % vectors. A function of its
// own, so that registers hold its sums and nothing else.
template <int kVectors, bool kWide, bool kField, int... T, int... N, int... A>
KVANT_DOT_ATTR HWY_NOINLINE void AddChunk(const DotArgs& a, const Chunk& c, Total* HWY_RESTRICT total,
                                          Indices<T...> tiles, Indices<N...>, Indices<A...>) {
  Sum high[] = {(static_cast<void>(A), Sum{})...};
  Sum low[] = {(static_cast<void>(A), Sum{})...};
  const std::uint8_t* quad = c.base + a.tile / c.tiles * c.block_bytes + 4 * a.lane;
  const std::int64_t between = c.tiles == 1 ? c.block_bytes : 0;
  const std::int64_t quad_bytes = c.quad_bytes;
  const std::int64_t vector_words = a.vector_words;
  const int counts[] = {(c.count + (a.tile + T) % c.tiles * c.bits)...};
  const Codes mask = Spread(c.mask);
  const std::int32_t* x = a.x + 2 * c.quad;
  const std::int32_t* const end = x + 2 * c.quads;
  do {
    const Codes codes[] = {kField ? Field(LoadCodes(quad + T * between), counts[T], mask)
                                  : LoadCodes(quad + T * between)...};
    (AddVector<kWide, kVectors>(codes, x + N * vector_words, high + N, low + N, tiles), ...);
    x += 2;
    quad += quad_bytes;
  } while (x != end);
  ((total[A] = Join<kWide>(total[A], high[A], low[A], c.shift)), ...);
}

template <int kVectors, bool kWide, int... A, class Tiles, class Vectors>
KVANT_DOT_ATTR HWY_NOINLINE void DotBlock(const DotArgs& a, Tiles tiles, Vectors vectors, Indices<A...> all) {
  for (std::size_t i = 0; i < a.ahead_bytes; i += kGroupBytes) __builtin_prefetch(a.ahead + i, 0, 2);
  Total total[] = {(static_cast<void>(A), ZeroTotal())...};
  for (const Chunk* c = a.chunks; c != a.end; ++c) {
    if (c->mask == 0) {
      AddChunk<kVectors, kWide, false>(a, *c, total, tiles, vectors, all);
    } else {
      AddChunk<kVectors, kWide, true>(a, *c, total, tiles, vectors, all);
    }
  }
  (StoreTotal(a, total[A], A % kVectors, a.out + (A % kVectors) * a.out_stride + (A / kVectors) * kLanes), ...);
}

// Sums, codes and x fit the registers: 32 with AVX-512, else 16.
template <int kVectors>
constexpr int tiles_at_once() {
  return KVANT_VNNI ? (kVectors == 1 ? 4 : 2) : (kVectors <= 2 ? 2 : 1);
}

template <int kVectors, bool kWide>
void DotTiles(DotArgs a, int tiles) {
  constexpr int kTiles = tiles_at_once<kVectors>();
  float* out = a.out;
  for (a.tile = 0; a.tile < tiles;) {
    const bool full = tiles - a.tile >= kTiles;
    for (a.lane = 0; a.lane < kLanes; a.lane += kSumRows) {
      a.out = out + a.tile * kLanes + a.lane;
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
    a.factor += count;
    a.alpha += a.alpha != nullptr ? count : 0;
    a.bias += a.bias != nullptr ? count : 0;
    a.out += count * a.out_stride;
  }
}

// The depth of a product, cut where the set of planes changes.
struct Run {
  int first;  // quads
  int end;
  int plane;     // the only plane, read directly; -1: joined bytes
  int max_code;  // of all planes together
};

constexpr int kMaxPlanes = 64;
constexpr int kSumQuads = kSumDepth / kQuad;

struct Program {
  const CodeProduct& a;
  Cover cover;
  std::uint64_t direct = 0;  // planes that are read directly
  int run_count = 0;
  Run runs[2 * kMaxPlanes];
  Chunk chunks[2 * kSumQuads + 2 * kMaxPlanes];

  explicit Program(const CodeProduct& product) : a(product), cover(product) {
    int cuts[2 * kMaxPlanes];
    for (int i = 0; i < a.count; ++i) {
      cuts[2 * i] = cover.first(i);
      cuts[2 * i + 1] = cover.end(i);
    }
    std::sort(cuts, cuts + 2 * a.count);
    for (int i = 0; i + 1 < 2 * a.count; ++i) {
      if (cuts[i] < cuts[i + 1]) add_run(cuts[i], cuts[i + 1]);
    }
  }

  void add_run(int first, int end) {
    Run run{first, end, -1, 0};
    for (int i = 0; i < a.count; ++i) {
      const CodePlane& plane = a.planes[i];
      if (!cover.touches(i, first, end)) continue;
      run.max_code += ((1 << plane.bits) - 1) << plane.shift;
      if (reads_directly(i)) run.plane = i;
    }
    if (run.max_code == 0) return;
    if (run.plane >= 0) direct |= std::uint64_t{1} << run.plane;
    runs[run_count++] = run;
  }

  // A group of the plane is one quad of a full row block, and no other plane is there.
  bool reads_directly(int i) const {
    return a.planes[i].bits >= 2 && row_tiles(a.rows) % (8 / a.planes[i].bits) == 0 && cover.regular &&
           cover.is_alone(i);
  }

  // Chunks of quads [begin, end) for the row block at tile `tile`; returns their number.
  int cut(int begin, int end, int tile, int tiles, const std::uint8_t* codes) {
    int count = 0;
    for (int r = 0; r < run_count; ++r) {
      const Run& run = runs[r];
      const int stop = std::min(run.end, end);
      Chunk chunk{codes, tiles * kGroupBytes, kGroupBytes, 1, 0, 0, 0, std::max(run.first, begin), 0, 0};
      int max_code = run.max_code;
      const std::uint8_t* data = codes + chunk.quad * chunk.quad_bytes;
      if (run.plane >= 0) {
        const CodePlane& plane = a.planes[run.plane];
        const auto bytes = static_cast<std::size_t>(quads(plane.depth)) * kGroupBytes;
        max_code = (1 << plane.bits) - 1;
        chunk = {nullptr,    kGroupBytes, static_cast<int>(bytes), 8 / plane.bits,
                 plane.bits, 0,           max_code * 0x01010101,   chunk.quad,
                 0,          plane.shift};
        data = reinterpret_cast<const std::uint8_t*>(plane.plane) + tile / chunk.tiles * bytes +
               (chunk.quad - run.first) * kGroupBytes;
      }
      // 8-bit codes do not fit the 16-bit sums of pmaddubsw: their halves are chunks of their own.
      const bool halves = max_code > kChunkCodes;
      const int length = std::max(1, kChunkCodes / (halves ? 15 : max_code));
      for (; chunk.quad < stop; chunk.quad += chunk.quads) {
        chunk.quads = std::min(length, stop - chunk.quad);
        chunk.base = data;
        data += chunk.quads * chunk.quad_bytes;
        if (halves) chunk.mask = 0x0F0F0F0F;
        chunks[count++] = chunk;
        if (!halves) continue;
        chunks[count] = chunk;
        chunks[count].count = 4;
        chunks[count++].shift = 4;
      }
    }
    return count;
  }
};

void MultiplyCodes(const CodeProduct& a) {
  alignas(64) std::uint8_t codes[kMaxDepth / kQuad * 4 * kGroupBytes];
  Program program(a);
  // A call covers kSumRows rows of at least one row tile: shares of whole lines, the last one may reach past the end.
  const std::size_t calls =
      static_cast<std::size_t>(row_tiles(a.rows) * (kLanes / kSumRows)) / (a.vectors <= 2 ? 2 : 1);
  const std::size_t share = base::round_up(a.ahead.bytes / std::max<std::size_t>(calls, 1), std::size_t{kGroupBytes});
  const std::byte* ahead = a.ahead.data;
  for (int tile = 0, tiles = 0; tile < row_tiles(a.rows); tile += tiles) {
    tiles = block_tiles(1, row_tiles(a.rows) - tile);
    UnpackTiles(program.cover, program.direct, tile, tiles, codes);
    for (int quad = 0; quad < quads(a.x_depth); quad += kSumQuads) {
      const int count = program.cut(quad, std::min(quad + kSumQuads, quads(a.x_depth)), tile, tiles, codes);
      const DotArgs dot{program.chunks,
                        program.chunks + count,
                        0,
                        0,
                        a.x,
                        vector_words(a.x_depth),
                        quad == 0 ? a.start : Start::add,
                        a.factor,
                        a.alpha,
                        a.bias,
                        a.out + tile * kLanes,
                        a.out_stride,
                        ahead,
                        quad == 0 ? share : 0};
      if (a.wide) {
        DotVectors<true>(dot, tiles, a.vectors);
      } else {
        DotVectors<false>(dot, tiles, a.vectors);
      }
    }
    ahead += share * static_cast<std::size_t>(tiles * (kLanes / kSumRows)) / (a.vectors <= 2 ? 2 : 1);
  }
}

void FillProducts(Kernels& k) {
  k.integer_dot = KVANT_VNNI != 0;
  k.multiply_codes = MultiplyCodes;
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvant::tiles {
HWY_EXPORT(FillProducts);
void fill_products(Kernels& k) {
  HWY_DYNAMIC_DISPATCH(FillProducts)(k);
}
}  // namespace kvant::tiles
#endif
