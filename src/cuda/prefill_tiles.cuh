// From pages to tiles of 64 tokens in shared memory, in half precision. All that depends on the format of sealed pages
// is in PageTiles; a format that needs more than kivi and kitty do adds a specialization of it. How a tile lies in
// shared memory is the business of the Engine (prefill_mma.cuh, prefill_wgmma.cuh) whose matrix instructions read it.
//
// What is handed from one to the other is a unit: 16 rows by 16 depth indices, 8 values per lane 4g + t as two uint2:
//   keys    rows are tokens:   .x channels 4t, 4t + 1, .y channels 4t + 2, 4t + 3; of tokens g (first) and g + 8
//   (second) values  rows are channels: .x tokens 2t, 2t + 1, .y tokens 2t + 8, 2t + 9; of channels g and g + 8
#pragma once

#include "cuda/decode_unit.cuh"
#include "cuda/prefill_cells.cuh"

namespace kvant::cuda {

constexpr int kMostSharedBytes = 227 * 1024;  // of a block, where there are warpgroup instructions
constexpr int kCoreBytes = 128;               // of a core matrix, 8 rows by 16 bytes of depth (prefill_wgmma.cuh)
// From the keys of 8 channels of a stage to those of the next 8: what a lane stores for both meets other banks.
constexpr int kKeyCoreStride = kStageTokens / 8 * kCoreBytes + kCoreBytes / 2;

// F: key, value, rotated, bfloat. Wgmma: for the warpgroup instructions of sm_90a, else those of sm_80.
template <class F, bool Wgmma>
struct PrefillConfig {
  static constexpr KeyFormat key = F::key;
  static constexpr ValueFormat value = F::value;
  static constexpr ExactFormat exact{F::key.dim, F::value.dim};
  static constexpr bool bfloat = F::bfloat;
  static constexpr bool wgmma = Wgmma;
  static constexpr int rotation = F::rotated ? value.dim & -value.dim : 1;  // channels of a block of the transform
  static constexpr bool cells = key.sorted();  // how tiles lie in shared memory: prefill_cells.cuh
  // Warps that multiply, and those that unpack: the same ones, or a warpgroup of its own (prefill_ahead.cuh).
  static constexpr int warps = Wgmma ? 8 : 4;
  static constexpr int unpack_warps = 4;
  static constexpr int unpack_threads = unpack_warps * 32;
  static constexpr int first_unpack_thread = Wgmma ? warps * 32 : 0;
  static constexpr int threads = first_unpack_thread + unpack_threads;
  static_assert(Wgmma || warps == unpack_warps);
  // Row tiles of 16 vectors per warp: one's softmax has the other's products beside it, or they share what they read.
  // The outputs of longer heads leave registers for one only.
  static constexpr int m_tiles = value.dim <= 128 ? 2 : 1;
  static constexpr int vectors = warps * m_tiles * 16;
  static constexpr int blocks = Wgmma ? 1 : 2;  // of a multiprocessor
  // Of a thread, which the warpgroups take from each other: together what the launch gives them (65536 / threads each).
  static constexpr int unpack_registers = 88;
  static constexpr int multiply_registers = 208;
  static constexpr int key_tiles = key.dim / 16;
  static constexpr int value_tiles = value.dim / 16;

  // Bytes of half a page as it lies in global memory: endpoints, lists and 1-bit planes serve both halves. Sorted keys
  // come whole behind everything else: their size is known at the launch.
  static constexpr int raw_key_bytes = key.sorted() ? 0 : key.codes_offset() + key.half_codes_bytes();
  static constexpr int raw_bytes = raw_key_bytes + value.half_bytes();

  // Shared memory.
  static constexpr int keys_offset = vectors * key.dim * 2;  // queries come first
  static constexpr int key_tile_bytes = cells   ? cell_tile_bytes(key.dim)
                                        : Wgmma ? key.dim / 8 * kKeyCoreStride
                                                : kStageTokens * key.dim * 2;
  // Of core matrices of a key tile (prefill_wgmma.cuh): to the next 8 channels, and to the next 8 tokens.
  static constexpr int key_depth_stride = cells ? kCoreBytes : kKeyCoreStride;
  static constexpr int key_row_stride = cells ? cell_stride(key.dim) : kCoreBytes;
  static constexpr int values_offset = keys_offset + key_tile_bytes;
  static constexpr int tile_bytes =
      key_tile_bytes + (cells ? cell_tile_bytes(value.dim) : kStageTokens * value.dim * 2);
  // Of tiles: the one whose values are multiplied, the one whose keys are, and those to unpack into, where there is
  // room. Blocks of a cluster that unpack for each other, at most (prefill_ahead.cuh), need several of them.
  static constexpr int buffers = !Wgmma ? 1 : key.dim <= 128 ? 4 : 2;
  static constexpr int ranks = buffers > 2 ? 2 : 1;
  static constexpr int raw_offset = keys_offset + buffers * tile_bytes;
  static constexpr int rank_bytes = key.high_steps > 0 ? unpack_warps* key.dim : 0;
  static constexpr int barrier_bytes = Wgmma ? buffers * 16 : 0;
  static constexpr int row_ends_bytes = Wgmma ? vectors * 4 : 0;
  // Half pages ahead of the one that is unpacked, where there is room. Sorted keys: a page of them.
  static constexpr bool two_raw =
      Wgmma &&
      (key.sorted() ? key.dim <= 128
                    : raw_offset + 2 * raw_bytes + rank_bytes + barrier_bytes + row_ends_bytes <= kMostSharedBytes);
  static constexpr int raw_slots = two_raw ? 2 : 1;
  static constexpr int rank_offset = raw_offset + raw_slots * raw_bytes;
  static constexpr int barrier_offset = rank_offset + rank_bytes;
  static constexpr int row_ends_offset = barrier_offset + barrier_bytes;
  static constexpr int shared_bytes = row_ends_offset + row_ends_bytes;
  static_assert(barrier_offset % 16 == 0);

  // Pages of sorted keys behind all that: of very wide ones there is room for one.
  KVANT_BOTH static constexpr int sorted_keys(int key_bytes) {
    return !key.sorted() ? 0 : two_raw && shared_bytes + 2 * key_bytes <= kMostSharedBytes ? 2 : 1;
  }
  // This thread's number among those that unpack.
  static __device__ __forceinline__ int unpack_thread() { return static_cast<int>(threadIdx.x) - first_unpack_thread; }
};

// Bytes below 128 as floats: 128 + code, the byte as the highest bits of the mantissa of 128.
class ByteRaiser {
 public:
  __device__ __forceinline__ float raise(std::uint32_t codes, int byte) const {
    return __uint_as_float(__byte_perm(codes, base_, 0x7044U | static_cast<unsigned>(byte) << 8));
  }

 private:
  std::uint32_t base_ = ptx::hidden_constant<0x43000000U>();
};

// Turn the four codes of a word into two pairs of 16-bit floats: low + code * step, with a low and a step per byte.
// Interleaved: bytes 0 and 2 make the first pair, else bytes 0 and 1.

// In binary32, rounded once.
template <bool Bfloat, bool Interleaved>
class WideDequantizer {
 public:
  // with_high: expand() is given further bits.
  __device__ __forceinline__ WideDequantizer(const float (&low)[4], const float (&step)[4], bool with_high = false) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low_[i] = fmaf(with_high ? -640.0F : -128.0F, step[i], low[i]);
      step_[i] = step[i];
    }
  }

  // shift: of the codes inside their bytes. `high`: bits of weight 4 at the same place.
  template <bool WithHigh>
  __device__ __forceinline__ uint2 expand(std::uint32_t codes, std::uint32_t high, int shift) const {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = fmaf(bytes_.raise(codes >> shift, i), step_[i], low_[i]);
      if constexpr (WithHigh) x[i] = fmaf(bytes_.raise(high >> shift, i), 4 * step_[i], x[i]);
    }
    return {ptx::narrow2<Bfloat>(x[0], x[Interleaved ? 2 : 1]), ptx::narrow2<Bfloat>(x[Interleaved ? 1 : 2], x[3])};
  }
  __device__ __forceinline__ uint2 expand(std::uint32_t codes, int shift) const {
    return expand<false>(codes, 0, shift);
  }

 private:
  ByteRaiser bytes_;
  float low_[4], step_[4];
};

// In binary16, at half the price. The step is rounded as well: by up to 2^-12 of the range, since codes count from the
// middle. They are scaled down to 2 and less, so that a step cannot overflow and is subnormal only where the range
// almost is.
template <bool Interleaved, int Bits>
class HalfDequantizer {
 public:
  __device__ __forceinline__ HalfDequantizer(const float (&low)[4], const float (&step)[4]) {
    constexpr int second = Interleaved ? 2 : 1;  // byte of the first pair's second element
    constexpr int first = Interleaved ? 1 : 2;   // byte of the second pair's first element
    float base[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) base[i] = fmaf(kMiddle * kScale, step[i], low[i]);
    low_[0] = __floats2half2_rn(base[0], base[second]);
    low_[1] = __floats2half2_rn(base[first], base[3]);
    step_[0] = __floats2half2_rn(step[0] * kScale, step[second] * kScale);
    step_[1] = __floats2half2_rn(step[first] * kScale, step[3] * kScale);
  }

  __device__ __forceinline__ uint2 expand(std::uint32_t codes, int shift) const {
    const float unit = 1.0F / (static_cast<float>(1 << shift) * kScale);
    return {pair(codes, Interleaved ? 0x4240 : 0x4140, unit, 0), pair(codes, Interleaved ? 0x4341 : 0x4342, unit, 1)};
  }

 private:
  static constexpr float kScale = 1 << (Bits - 2);
  static constexpr float kMiddle = Bits == 2 ? 1 : 2;  // in scaled codes

  __device__ __forceinline__ std::uint32_t pair(std::uint32_t codes, unsigned selector, float unit, int i) const {
    const std::uint32_t raised = __byte_perm(codes, 0x64646464U, selector);  // 1024 + byte
    const __half2 code = __hfma2(*reinterpret_cast<const __half2*>(&raised), __float2half2_rn(unit),
                                 __float2half2_rn(-1024.0F * unit - kMiddle));
    const __half2 x = __hfma2(code, step_[i], low_[i]);
    return *reinterpret_cast<const std::uint32_t*>(&x);
  }

  __half2 low_[2], step_[2];
};

// Errors of values reach the output as they are, those of keys times the spread of the scores.
template <class C, bool Interleaved>
using ValueDequantizer =
    std::conditional_t<C::bfloat, WideDequantizer<C::bfloat, Interleaved>, HalfDequantizer<Interleaved, C::value.bits>>;

// Of the codes of position p inside their bytes.
__device__ constexpr int code_shift(int bits, int p) {
  return bits == 2 ? 2 * p : 4 * (p % 2);
}

// Of the tokens 2t, 2t + 8, 2t + 1, 2t + 9 of token tile `tile` of half a page of values: the order of a word's bytes.
template <class C>
struct ValueGrid {
  float low[4], step[4];

  __device__ __forceinline__ ValueGrid(const std::uint8_t* half_page, int tile, int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* ends = half_page + (2 * t + i) * 16 + tile * 4;
      const float2 min = ptx::widen2<C::bfloat>(*reinterpret_cast<const std::uint32_t*>(ends));
      const float2 max = ptx::widen2<C::bfloat>(*reinterpret_cast<const std::uint32_t*>(ends + 128));
      low[2 * i] = min.x;
      low[2 * i + 1] = min.y;
      step[2 * i] = (max.x - min.x) * (1.0F / static_cast<float>((1 << C::value.bits) - 1));
      step[2 * i + 1] = (max.y - min.y) * (1.0F / static_cast<float>((1 << C::value.bits) - 1));
    }
  }
};

// A multiple of 16 bytes.
template <class C, int Bytes>
__device__ __forceinline__ void copy_async(std::uint8_t* to, const std::uint8_t* from) {
  constexpr int all = C::unpack_threads * 16;
  const int mine = C::unpack_thread() * 16;
  const std::uint32_t address = ptx::shared_address(to + mine);
#pragma unroll
  for (int i = 0; i < Bytes; i += all) {
    if (i + all <= Bytes || mine < Bytes - i)
      ptx::async_copy16(address + static_cast<std::uint32_t>(i), from + mine + i);
  }
}

// Sealed pages of one format. fetch() starts to copy half a page into `raw`; unpack() makes tiles of it, copy_exact()
// of four unquantized 16-token tiles. Every thread that unpacks calls them; between fetch() and unpack() the copies
// must have arrived and these threads must have met. `sorted`: where sorted keys go.
template <class C, class Engine>
struct PageTiles {
  // fresh: nothing of the page is in `raw` yet.
  static __device__ __forceinline__ void fetch(const DecodeArgs& /*args*/, std::uint8_t* raw, std::uint8_t* /*sorted*/,
                                               const std::uint8_t* page, int half, bool /*fresh*/) {
    constexpr int head = C::key.codes_offset();
    constexpr int codes = C::key.half_codes_bytes();
    copy_async<C, head>(raw, page);
    copy_async<C, codes>(raw + head, page + head + half * codes);
    copy_async<C, C::value.half_bytes()>(raw + C::raw_key_bytes, page + C::key.bytes() + half * C::value.half_bytes());
  }

  // ranks: room for key.dim bytes of this warp, where channels have a second plane.
  static __device__ __forceinline__ void unpack(const DecodeArgs& args, const std::uint8_t* raw,
                                                const std::uint8_t* /*sorted*/, int half, std::uint8_t* keys,
                                                std::uint8_t* values, std::uint8_t* ranks) {
    constexpr int key_jobs = C::key.groups() / 2 * C::key.steps();
    constexpr int jobs = key_jobs + C::value.groups() * 2;
    if constexpr (C::key.high_steps > 0) rank_channels(raw, args.boosted, ranks);
    for (int job = C::unpack_thread() / 32; job < jobs; job += C::unpack_warps) {
      if (job < key_jobs) {
        unpack_keys(raw, half, job / C::key.steps(), job % C::key.steps(), ranks, keys);
      } else {
        unpack_values(raw + C::raw_key_bytes, (job - key_jobs) / 2, (job - key_jobs) % 2, values);
      }
    }
  }

  // Straight from global memory.
  static __device__ void copy_exact(const std::uint8_t* tiles, std::uint8_t* keys, std::uint8_t* values) {
    const int thread = C::unpack_thread();
    for (int unit = thread / 32; unit < kStageTiles * C::key_tiles; unit += C::unpack_warps) {
      const int tile = unit / C::key_tiles;
      Engine::copy_keys(tiles + tile * C::exact.tile_bytes() + unit % C::key_tiles * kQuadBytes, keys, tile,
                        unit % C::key_tiles);
    }
    for (int unit = thread / 32; unit < kStageTiles * C::value_tiles; unit += C::unpack_warps) {
      const int tile = unit / C::value_tiles;
      const std::uint8_t* from = tiles + tile * C::exact.tile_bytes() + C::exact.key_bytes() +
                                 unit % C::value_tiles * kQuadBytes + thread % 32 * 16;
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      Engine::store_values(values, tile, unit % C::value_tiles, {x.x, x.z}, {x.y, x.w});
    }
  }

 private:
  static constexpr std::uint8_t kNoRank = 255;

  // Which entry of the list of boosted channels a channel is.
  static __device__ void rank_channels(const std::uint8_t* raw, int boosted, std::uint8_t* ranks) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = lane; i < C::key.dim; i += 32) ranks[i] = kNoRank;
    __syncwarp();
    for (int i = lane; i < boosted; i += 32) ranks[raw[C::key.index_offset() + i]] = static_cast<std::uint8_t>(i);
    __syncwarp();
  }

  // The second plane's codes of the channels of one word, brought from where the list put them.
  static __device__ __forceinline__ std::uint32_t gather_high(const std::uint8_t* codes, std::uint32_t ranks, int g,
                                                              int row_half) {
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int rank = static_cast<int>(ranks >> (8 * b) & 0xFFU);
      if (rank == kNoRank) continue;
      const int quad = C::key.steps() + rank / kStep;
      const int lane = 4 * g + rank % 16 / 4;
      const int word_at = row_half + rank % kStep / 16 * 2;
      word |= static_cast<std::uint32_t>(codes[quad * kQuadBytes + lane * 16 + word_at * 4 + rank % 4]) << (8 * b);
    }
    return word;
  }

  // `group`: of this half, the others are not in `raw`.
  static __device__ __forceinline__ void unpack_keys(const std::uint8_t* raw, int half, int group, int step,
                                                     const std::uint8_t* ranks, std::uint8_t* keys) {
    constexpr int bits = C::key.bits;
    constexpr int per_group = tiles_per_group(bits);
    constexpr bool with_high = C::key.high_steps > 0;
    const Lane lane;
    const std::uint8_t* codes = raw + C::key.codes_offset() + group * C::key.quads_per_group() * kQuadBytes;
    CodeWords<bits> words;
    words.load(codes + step * kQuadBytes, raw + C::key.plane1_offset() + step * kQuadBytes, half != 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 ends = *reinterpret_cast<const uint4*>(raw + step * 128 + h * 64 + lane.t * 16);
      const float2 a[2] = {ptx::widen2<C::bfloat>(ends.x), ptx::widen2<C::bfloat>(ends.y)};
      const float2 b[2] = {ptx::widen2<C::bfloat>(ends.z), ptx::widen2<C::bfloat>(ends.w)};
      const float one[4] = {a[0].x, a[0].y, a[1].x, a[1].y};
      const float other[4] = {b[0].x, b[0].y, b[1].x, b[1].y};
      float low[4], span[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float range = other[i] - one[i];
        // Boosted channels have their maximum first and 15 levels instead of 3.
        low[i] = with_high ? fminf(one[i], other[i]) : one[i];
        span[i] = (with_high ? fmaxf(range, range * -0.2F) : range) * (1.0F / static_cast<float>((1 << bits) - 1));
      }
      const WideDequantizer<C::bfloat, false> dequantizer(low, span, with_high);
      std::uint32_t high[2] = {0, 0};
      if constexpr (with_high) {
        const auto rank = *reinterpret_cast<const std::uint32_t*>(ranks + step * kStep + h * 16 + lane.t * 4);
        if (rank != 0xFFFFFFFFU) {
          high[0] = gather_high(codes, rank, lane.g, 0);
          high[1] = gather_high(codes, rank, lane.g, 1);
        }
      }
#pragma unroll
      for (int p = 0; p < per_group; ++p) {
        std::uint32_t w[4];
        words.fragment(p, w);
        const std::uint32_t mask = 0x03030303U << (2 * p);
        Engine::store_keys(keys, group * per_group + p, step * 2 + h,
                           dequantizer.template expand<with_high>(w[2 * h], high[0] & mask, code_shift(bits, p)),
                           dequantizer.template expand<with_high>(w[2 * h + 1], high[1] & mask, code_shift(bits, p)));
      }
    }
  }

  // half_page: the value half in `raw`. Bytes of a word are tokens 2t, 2t + 8, 2t + 1, 2t + 9.
  static __device__ __forceinline__ void unpack_values(const std::uint8_t* half_page, int group, int step,
                                                       std::uint8_t* values) {
    constexpr int bits = C::value.bits;
    constexpr int per_group = tiles_per_group(bits);
    const Lane lane;
    CodeWords<bits> words;
    words.load(half_page + C::value.codes_offset() + (group * 2 + step) * kQuadBytes,
               half_page + C::value.plane1_offset() + (group / 2 * 2 + step) * kQuadBytes, group % 2 != 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int tile = step * 2 + h;
      const ValueGrid<C> grid(half_page, tile, lane.t);
#pragma unroll
      for (int p = 0; p < per_group; ++p) {
        if (group * per_group + p >= C::value_tiles) break;
        std::uint32_t w[4];
        words.fragment(p, w);
        const int channel_tile = group * per_group + p;
        const int shift = code_shift(bits, p);
        const ValueDequantizer<C, true> dequantizer(grid.low, grid.step);
        Engine::store_values(values, tile, channel_tile, dequantizer.expand(w[2 * h], shift),
                             dequantizer.expand(w[2 * h + 1], shift));
      }
    }
  }
};

}  // namespace kvant::cuda
