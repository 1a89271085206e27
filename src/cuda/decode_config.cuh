// Compile-time side of the decode kernel: one instance per recipe, shape and split.
#pragma once

#include "cuda/page_format.hpp"

namespace kvant::cuda {

// Warps of a block, a multiple of the four schedulers: as many slots as keep 75 to 150 KB in flight on a
// multiprocessor. More makes blocks unequal (README.md), fewer leaves the memory waiting. Two blocks of vectors need
// twice the registers.
constexpr int decode_warps(const KeyFormat& key, const ValueFormat& value, int n_tiles, bool half, bool cluster) {
  // Sorted keys: their budget is not known here; presets have about as many bits as the values.
  const KeyFormat usual = key.sorted() ? KeyFormat{0, key.dim, 0, key.dim * value.bits / kFour} : key;
  const int slot = usual.bytes() + value.bytes();
  // Widths per channel take more instructions, which more warps overlap: with 12 they are 10 % faster than with 8.
  if (12 * slot <= (key.sorted() ? 165000 : 115200) && n_tiles == 1 && !half && !cluster) return 12;
  return 8 * slot <= 150000 ? 8 : 4;
}

template <int KeyBits, int ValueBits, int HighSteps, int KeyDim, int ValueDim, bool Rotated, int NTiles, bool Half,
          bool Bfloat, int Warps>
struct DecodeConfig {
  static constexpr KeyFormat key{KeyBits, KeyDim, HighSteps};
  static constexpr ValueFormat value{ValueBits, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool sorted = key.sorted();
  static constexpr int rotation = Rotated ? ValueDim & -ValueDim : 1;  // channels of a block of the Hadamard transform
  static constexpr int n_tiles = NTiles;  // blocks of 4 query vectors: two columns each of the 8 of an MMA
  static constexpr int vectors = 4 * NTiles;
  static constexpr bool half = Half;  // a unit is half a page
  static constexpr bool bfloat = Bfloat;
  static constexpr int warps = Warps;
  static constexpr int threads = Warps * 32;

  static constexpr int units_per_page = Half ? 2 : 1;
  static constexpr int unit_tokens = kPage / units_per_page;
  static constexpr int token_tiles = unit_tokens / kTile;
  static constexpr int steps = key.steps();
  static constexpr int all_steps = steps + HighSteps;
  static constexpr int value_tiles = ValueDim / kTile;
  static constexpr int key_positions = KeyBits == 2 ? 4 : 2;  // per byte once 3-bit codes are joined
  static constexpr int value_positions = ValueBits == 2 ? 4 : 2;

  // Bytes of a slot. A half unit leaves out the other half's codes, but for sorted keys. Sorted keys: their bytes come
  // with the arguments, so that one kernel serves every budget.
  static constexpr int key_bytes = sorted ? 0 : key.codes_offset() + (Half ? 1 : 2) * key.half_codes_bytes();
  static constexpr int value_bytes = (Half ? 1 : 2) * value.half_bytes();
  // Bulk copies that move bytes within their line of 128 take longer (README.md): unless every tile begins with a line,
  // slots have room to begin where their tile does.
  static constexpr bool shifted = sorted || key.bytes() % kLine != 0 || value.half_bytes() % kLine != 0;
  static constexpr int slot_room(int bytes) { return shifted ? shifted_bytes(bytes) : bytes; }
  static constexpr int value_slot_bytes = slot_room(value_bytes);
  static constexpr int fixed_slot_bytes = value_slot_bytes + (sorted ? 0 : slot_room(key_bytes));

  // Sums stay exact in the 23 bits of a float's mantissa: steps of 32 depth indices that one accumulator may take.
  static constexpr int max_code = KeyBits == 2 ? 3 << 6 : (KeyBits == 3 ? 7 : 15) << 4;
  static constexpr int chunk_steps = (1 << 22) / (max_code * 128 * kStep);
  static constexpr int chunks = (all_steps + chunk_steps - 1) / chunk_steps;
  static_assert(chunk_steps >= 4);
  static_assert(255 * 255 * unit_tokens < (1 << 23), "sums of whole bytes of value codes");
  static_assert(!(Half && KeyBits == 3), "the 1-bit plane of 3-bit keys serves whole pages");
  static_assert(HighSteps == 0 || KeyBits == 2);

  // Shared memory. Slots come first where their size is known, else last.
  static constexpr int merge_stride = ValueDim + 8;  // spreads the four heads of a warp over the banks
  static constexpr int barrier_offset = sorted ? 0 : Warps * fixed_slot_bytes;
  static constexpr int merge_offset = barrier_offset + Warps * 16;
  static constexpr int state_offset = merge_offset + Warps * vectors * merge_stride * 4;
  static constexpr int flag_offset = state_offset + Warps * vectors * 8;
  // Sorted keys: queries as [channel][vector], and per warp the bytes of q * step by place in the page.
  static constexpr int query_offset = flag_offset + 16;
  // The latter lie where the warp puts its outputs once it has no more pages.
  static constexpr int x_stride = KeyDim / kFour + 4;  // words of a row; spreads rows over the banks
  static constexpr int end_offset = query_offset + (sorted ? vectors * KeyDim * 4 : 0);
  static_assert(!sorted || 2 * vectors * x_stride <= vectors * merge_stride, "the bytes fit in place of the outputs");
  static constexpr int slots_offset = sorted ? (end_offset + kLine - 1) / kLine * kLine : 0;
  // Without the keys of the slots if these are sorted.
  static constexpr int shared_bytes = sorted ? slots_offset + Warps * fixed_slot_bytes : end_offset;
};

}  // namespace kvant::cuda
