// Planes to one byte per code, for the products of one instruction set. Included once per target, hence the toggled
// guard.
#if defined(KVANT_TILES_UNPACK_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVANT_TILES_UNPACK_HPP
#undef KVANT_TILES_UNPACK_HPP
#else
#define KVANT_TILES_UNPACK_HPP
#endif

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

template <int kRight, int kBits, bool kAdd, class D>
HWY_INLINE void UnpackPosition(D d, hwy::HWY_NAMESPACE::VFromD<D> group, int shift, std::uint8_t* to) {
  namespace hn = hwy::HWY_NAMESPACE;
  constexpr std::uint32_t kMask = ((1U << kBits) - 1) * 0x01010101U;
  auto* words = reinterpret_cast<std::uint32_t*>(to);
  auto code = hn::And(hn::ShiftRight<kRight>(group), hn::Set(d, kMask));
  if constexpr (kAdd) {
    code = hn::Or(hn::ShiftLeftSame(code, shift), hn::LoadU(d, words));
  } else {
    if (shift > 0) code = hn::ShiftLeftSame(code, shift);
  }
  hn::StoreU(code, d, words);
}

// All positions P of the groups of one row block; positions past the plane's last quad are not written.
template <int kBits, int kTiles, bool kAdd, int... P>
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
        UnpackPosition<kBits* decltype(p)::value, kBits, kAdd>(
            d, group, a.shift, codes + kQuadOf * a.quad_bytes + (decltype(p)::value % kTiles) * kGroupBytes + 4 * lane);
      };
      (position(std::integral_constant<int, P>()), ...);
    }
  }
}

template <int kBits, int kTiles>
void UnpackBits(const Unpack& a, bool add) {
  if (add) {
    UnpackBlock<kBits, kTiles, true>(a, Range<8 / kBits>());
  } else {
    UnpackBlock<kBits, kTiles, false>(a, Range<8 / kBits>());
  }
}

inline void UnpackRowBlock(const Unpack& a, int bits, int tiles, bool add) {
  if (bits == 1 && tiles == 4) UnpackBits<1, 4>(a, add);
  if (bits == 1 && tiles == 2) UnpackBits<1, 2>(a, add);
  if (bits == 1 && tiles == 1) UnpackBits<1, 1>(a, add);
  if (bits == 2 && tiles == 4) UnpackBits<2, 4>(a, add);
  if (bits == 2 && tiles == 2) UnpackBits<2, 2>(a, add);
  if (bits == 2 && tiles == 1) UnpackBits<2, 1>(a, add);
  if (bits == 4 && tiles == 2) UnpackBits<4, 2>(a, add);
  if (bits == 4 && tiles == 1) UnpackBits<4, 1>(a, add);
}

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

// Codes of `tiles` row tiles from tile `tile` on, [quad][tile][16 lanes][4], all planes joined but those in `direct`,
// which are alone. Quads without a plane are left as they are.
inline void UnpackTiles(const Cover& cover, std::uint64_t direct, int tile, int tiles, std::uint8_t* codes) {
  const CodeProduct& a = cover.a;
  const int quad_bytes = tiles * kGroupBytes;
  for (int i = 0; i < a.count; ++i) {
    if ((direct >> i & 1) != 0) continue;
    const CodePlane& plane = a.planes[i];
    // The first plane over a quad stores, later ones add; a plane that is both adds to zeros.
    const bool add = cover.covered(i, cover.first(i), cover.end(i));
    for (int quad = cover.first(i); add && quad < cover.end(i); ++quad) {
      if (!cover.covered(i, quad, quad + 1)) {
        std::memset(codes + std::ptrdiff_t{quad} * quad_bytes, 0, static_cast<std::size_t>(quad_bytes));
      }
    }
    for (int t = tile; t < tile + tiles;) {
      const int block = block_tiles(plane.bits, row_tiles(a.rows) - t);
      UnpackRowBlock({plane.plane + block_offset(plane.bits, a.rows, plane.depth, t), quads(plane.depth), plane.shift,
                      codes + std::ptrdiff_t{cover.first(i)} * quad_bytes + (t - tile) * kGroupBytes, quad_bytes},
                     plane.bits, block, add);
      t += block;
    }
  }
}

}  // namespace kvant::tiles::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
