// The device form of a sealed page: one contiguous block per (page, KV head), its words already in the register order
// of the tensor core instructions that read them. README.md has the picture and the reasons.
//
// A "lane" is 4 * g + t, g = 0..7, t = 0..3. A "quad" is 16 bytes per lane, 512 bytes per warp, words r = 0..3.
//
// key tile                                   value tile, two halves of 64 tokens, each
//   endpoints  dim * 4 bytes                   endpoints  min [g][8], max [g][8]: entry 2j+e is token 16j + g + 8e
//   index      32 bytes per high step          plane 1    3-bit only
//   plane 1    3-bit only, [step] quads        codes      [group][step 0..1] quads
//   codes      [group][step] quads
//
// Endpoints of keys: 16 bytes per (step, half, t): min of channels 32 step + 16 half + 4t + 0..3, then their max.
// Boosted channels have max first: that is how the product knows their finer step without reading the list. Code words:
// byte b of word r is depth index 32 step + 16 (r >> 1) + 4t + b; position p in it is row 16 * tile(group, p) + 8 (r &
// 1) + g. Rows are tokens for keys and channels for values, depth the other way round. Value depth is permuted inside
// 16 tokens: slot s is token (s >> 1) + 8 (s & 1), the order in which scores leave the tensor core.
//
// Keys with widths of their own (waterfill; KeyFormat::budget > 0) lie in the order of the CPU's block, by width class,
// and in its planes of 4, 1, 2 and 2 bits over runs of fours of channels:
//
//   endpoints  dim * 4 bytes: per four, min of its channels, then their max
//   index      dim bytes: the channel of each place
//   counts     fours per width class (6 bytes, 10 of padding)
//   codes      plane after plane; 64 bytes per four and bit, in the same words as above but cut into fours, so that no
//              plane is padded to a step
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVANT_BOTH __host__ __device__
#else
#define KVANT_BOTH
#endif

namespace kvant::cuda {

constexpr int kLine = 128;  // bytes that memory moves at once
// Room for `bytes`, a multiple of 16, from any multiple of 16 within a line on.
constexpr int shifted_bytes(int bytes) {
  return (bytes + (kLine - 16) + kLine - 1) / kLine * kLine;
}

constexpr int kPage = 128;       // tokens of a page on the device
constexpr int kQuadBytes = 512;  // one quad of a warp
constexpr int kStep = 32;        // depth indices of a step: the k of m16n8k32
constexpr int kTile = 16;        // rows of a row tile: the m of m16n8k32
constexpr int kFour = 4;         // channels that share a width where widths are their own
constexpr int kFourBytes = 64;   // one bit of a four over a page

// Row tiles in one word: positions of 2 bits hold four, nibbles two. 3-bit codes are a 2-bit plane joined in registers
// with a 1-bit plane to nibbles, so four tiles share a word there too.
KVANT_BOTH constexpr int tiles_per_group(int bits) {
  return bits == 4 ? 2 : 4;
}

struct KeyFormat {
  int bits = 2;        // 2, 3 or 4; 0: each channel has its own width
  int dim = 128;       // a multiple of 32
  int high_steps = 0;  // steps of 32 boosted channels with a second 2-bit plane; 2-bit keys only
  int budget = 0;      // own widths per channel (then bits is 0): the most that the widths of all fours sum to

  KVANT_BOTH constexpr int steps() const { return dim / kStep; }
  KVANT_BOTH constexpr bool sorted() const { return bits == 0; }
  KVANT_BOTH constexpr int groups() const { return kPage / kTile / tiles_per_group(bits); }
  KVANT_BOTH constexpr int quads_per_group() const { return steps() + high_steps; }
  KVANT_BOTH constexpr int index_offset() const { return dim * 4; }
  KVANT_BOTH constexpr int plane1_offset() const { return index_offset() + high_steps * kStep; }
  KVANT_BOTH constexpr int counts_offset() const { return index_offset() + dim; }  // sorted only
  KVANT_BOTH constexpr int codes_offset() const {
    return sorted() ? counts_offset() + 16 : plane1_offset() + (bits == 3 ? steps() * kQuadBytes : 0);
  }
  // Codes of tokens 0..63 come first, then those of 64..127.
  KVANT_BOTH constexpr int half_codes_bytes() const { return groups() / 2 * quads_per_group() * kQuadBytes; }
  KVANT_BOTH constexpr int bytes() const {
    return codes_offset() + (sorted() ? budget * kFourBytes : 2 * half_codes_bytes());
  }
};

struct ValueFormat {
  int bits = 2;
  int dim = 128;  // a multiple of 32

  KVANT_BOTH constexpr int groups() const { return (dim / kTile + tiles_per_group(bits) - 1) / tiles_per_group(bits); }
  KVANT_BOTH constexpr int plane1_groups() const { return bits == 3 ? (groups() + 1) / 2 : 0; }
  KVANT_BOTH constexpr int plane1_offset() const { return 64 * 4; }
  KVANT_BOTH constexpr int codes_offset() const { return plane1_offset() + plane1_groups() * 2 * kQuadBytes; }
  KVANT_BOTH constexpr int half_bytes() const { return codes_offset() + groups() * 2 * kQuadBytes; }
  KVANT_BOTH constexpr int bytes() const { return 2 * half_bytes(); }
};

// Row tile of position p in group `group`. Nibbles made from 3-bit codes come out as tiles 0, 2, 1, 3 of the positions.
KVANT_BOTH constexpr int tile_of(int bits, int group, int position) {
  return group * tiles_per_group(bits) + (bits == 3 ? ((position & 1) << 1 | position >> 1) : position);
}

// Where a code of a key or value tile lies. `group_stride` and friends differ, the inside of a quad does not.
struct CodePlace {
  int group, step, lane, word, byte, position;
};
KVANT_BOTH constexpr CodePlace place_of(int bits, int row, int depth) {
  const int tile = row / kTile;
  const int per = tiles_per_group(bits);
  const int within = tile % per;
  const int position = bits == 3 ? ((within & 1) << 1 | within >> 1) : within;
  const int g = row % 8;
  const int in_step = depth % kStep;
  const int t = in_step % 16 / 4;
  return {tile / per, depth / kStep, 4 * g + t, (row % 16) / 8 + 2 * (in_step / 16), in_step % 4, position};
}

// Bit of a byte of the 1-bit plane that belongs to (group, position) of the 2-bit plane of 3-bit codes.
KVANT_BOTH constexpr int plane1_bit(int group, int position) {
  // group even: bits 2, 6 unshifted for positions 0, 2; bits 3, 7 (right shift by 1) for 1, 3;
  // group odd: bits 0, 4 (left shift by 2) and 1, 5 (left shift by 1).
  const int high = position >> 1 << 2;
  if (group % 2 == 0) return (position & 1 ? 3 : 2) + high;
  return (position & 1 ? 1 : 0) + high;
}

// Where a field of a plane of `bits` bits (1, 2, 4) of sorted keys lies: four `k` of the plane, channel `c` of the
// four.
struct FieldPlace {
  int byte, shift;
};
KVANT_BOTH constexpr FieldPlace sorted_place(int bits, int k, int c, int token) {
  const int tile = token / kTile;
  const int positions = 8 / bits;
  const int group = tile / positions;
  const int g = token % 8;
  const int row = token % 16 / 8;
  // A lane reads its words of a half step at once: 16 bytes (two groups), or 8 where there is one group. Lanes that
  // read at the same time belong to several fours; the exclusive or spreads these over the banks.
  const int inside = bits == 1 ? (g ^ ((k & 2) << 1)) * 8 : group / 2 * 128 + (g ^ ((k & 3) << 1)) * 16 + group % 2 * 8;
  return {k * bits * kFourBytes + inside + row * 4 + c, tile % positions * bits};
}

// Depth slot of a token inside a page (values): the inverse of the permutation above.
KVANT_BOTH constexpr int value_slot(int token) {
  return (token & ~15) | (token & 7) << 1 | (token >> 3 & 1);
}

// Bytes from the start of the key tile to the endpoints of a channel: its minimum; the maximum is 8 bytes further.
KVANT_BOTH constexpr int key_endpoint_offset(int channel) {
  return channel / 32 * 128 + channel % 32 / 16 * 64 + channel % 16 / 4 * 16 + channel % 4 * 2;
}
// Bytes from the start of the value tile to a token's minimum; the maximum is 128 bytes further.
KVANT_BOTH constexpr int value_endpoint_offset(ValueFormat format, int token) {
  const int in_half = token % 64;
  return token / 64 * format.half_bytes() + in_half % 8 * 16 + in_half / 16 * 4 + in_half % 16 / 8 * 2;
}

// An unquantized 16-token tile (sinks, open pages): keys then values as A fragments of m16n8k16, 16 bytes per lane.
struct ExactFormat {
  int key_dim = 128;
  int value_dim = 128;
  KVANT_BOTH constexpr int key_bytes() const { return key_dim * 32; }
  KVANT_BOTH constexpr int tile_bytes() const { return (key_dim + value_dim) * 32; }
  KVANT_BOTH constexpr int page_bytes() const { return tile_bytes() * (kPage / kTile); }

  // Byte offset inside an exact page of (token, channel).
  KVANT_BOTH constexpr int key_at(int token, int channel) const {
    return token / 16 * tile_bytes() + fragment(token % 16, channel % 16) + channel / 16 * kQuadBytes;
  }
  KVANT_BOTH constexpr int value_at(int token, int channel) const {
    return token / 16 * tile_bytes() + key_bytes() + fragment(channel % 16, token % 16) + channel / 16 * kQuadBytes;
  }

 private:
  KVANT_BOTH static constexpr int fragment(int row, int k) {
    const int lane = row % 8 * 4 + k % 8 / 2;
    return lane * 16 + (row / 8 + k / 8 * 2) * 4 + k % 2 * 2;
  }
};

static_assert(KeyFormat{2, 128, 0}.bytes() + ValueFormat{2, 128}.bytes() == 9216);
static_assert(KeyFormat{4, 128, 0}.bytes() + ValueFormat{4, 128}.bytes() == 17408);
static_assert(KeyFormat{2, 128, 1}.bytes() == 4608 + 1024 + 32);
static_assert(KeyFormat{0, 128, 0, 80}.bytes() == 512 + 128 + 16 + 5120);
static_assert(tile_of(3, 0, 1) == 2 && place_of(3, 16 * 2, 0).position == 1);

}  // namespace kvant::cuda
