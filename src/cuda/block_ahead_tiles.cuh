// From block pages to the tiles of warpgroup matrix instructions: core matrices of 8 rows by 8 depth indices, 128 bytes
// each, [token / 8][channel / 8] for keys and values alike.
//
// A lane has a row of each of four row tiles and, twice, eight depth indices of it (RowWords): 16 bytes of a core
// matrix, one store wherever the row belongs. Eight lanes fill a core matrix, which meets every bank once.
#pragma once

#include "cuda/block_outliers.cuh"
#include "cuda/prefill_tiles.cuh"
#include "cuda/wgmma.cuh"

namespace kvant::cuda {

// Dimensions are compiled in because the matrix instructions' operands are, and whether keys are turned as in
// BlockConfig; everything else about pages comes with the launch.
template <int KeyDim, int ValueDim, bool Bfloat, bool Turned = false>
struct BlockAheadConfig {
  static constexpr KeyFormat key{2, KeyDim};  // formats: for their dimensions
  static constexpr ValueFormat value{2, ValueDim};
  static constexpr ExactFormat exact{KeyDim, ValueDim};
  static constexpr bool bfloat = Bfloat;
  static constexpr bool turned = Turned;
  static constexpr bool cells = false;
  // Warpgroups as those of PrefillConfig.
  static constexpr int warps = 8;
  static constexpr int unpack_warps = 4;
  static constexpr int unpack_threads = unpack_warps * 32;
  static constexpr int first_unpack_thread = warps * 32;
  static constexpr int threads = first_unpack_thread + unpack_threads;
  static_assert(unpack_threads == kPage);
  static constexpr int m_tiles = ValueDim <= 128 ? 2 : 1;
  static constexpr int vectors = warps * m_tiles * 16;
  static constexpr int blocks = 1;  // of a multiprocessor
  static constexpr int unpack_registers = 88;
  static constexpr int multiply_registers = 208;
  static constexpr int key_tiles = KeyDim / 16;
  static constexpr int value_tiles = ValueDim / 16;

  // Shared memory: queries; barriers; the work of unpacking; the buffers of tiles, each with the token in each of its
  // places; and as many pages as there is room for.
  static constexpr int barrier_offset = vectors * KeyDim * 2;
  static constexpr int most_buffers = KeyDim + ValueDim <= 256 ? 4 : 2;
  // Blocks of a cluster that share what they unpack, at most: it takes a third buffer.
  static constexpr int ranks = most_buffers > 2 ? 2 : 1;
  static constexpr int row_ends_offset = barrier_offset + most_buffers * 16;
  static constexpr int angles_offset = BlockWork(row_ends_offset + vectors * 4).end;
  static constexpr int slots_offset = angles_offset + (Turned ? block_angle_bytes(KeyDim) : 0);
  static constexpr int entries_offset = slots_offset + 2 * SlotRoom::bytes;  // of the page table, of two pages by turns
  static constexpr int page_barrier_offset = entries_offset + 8;             // of the copies of a page
  static constexpr int keys_offset = (page_barrier_offset + 8 + 127) / 128 * 128;
  static constexpr int key_depth_stride = kCoreBytes;
  static constexpr int key_row_stride = KeyDim / 8 * kCoreBytes;
  static constexpr int key_tile_bytes = kStageTokens * KeyDim * 2;
  static constexpr int value_depth_stride = ValueDim / 8 * kCoreBytes;
  static constexpr int value_tile_bytes = kStageTokens * ValueDim * 2;
  static constexpr int tile_bytes = key_tile_bytes + value_tile_bytes + kCoreBytes;
  static_assert(kStageTokens <= kCoreBytes);

  KVANT_BOTH static constexpr BlockWork work() { return BlockWork(row_ends_offset + vectors * 4); }
  // Buffers come before a second page; large pages leave room for fewer of them.
  KVANT_BOTH static constexpr int buffers(const BlockFormat& format) {
    constexpr bool spare = most_buffers > 2;
    return spare && keys_offset + most_buffers * tile_bytes + block_slot_bytes(format) > kMostSharedBytes
               ? most_buffers - 1
               : most_buffers;
  }
  KVANT_BOTH static constexpr int raw_offset(const BlockFormat& format) {
    return keys_offset + buffers(format) * tile_bytes;
  }
  KVANT_BOTH static constexpr int raw_slots(const BlockFormat& format) {
    return raw_offset(format) + 2 * block_slot_bytes(format) <= kMostSharedBytes ? 2 : 1;
  }
  static constexpr int shared_bytes(const BlockFormat& format) {
    return raw_offset(format) + raw_slots(format) * block_slot_bytes(format);
  }

  static __device__ __forceinline__ int unpack_thread() { return static_cast<int>(threadIdx.x) - first_unpack_thread; }
};

// Bytes from the start of a tile to the first of a row's eight elements in a core matrix. row_stride: to the next eight
// rows.
__device__ __forceinline__ int core_row_at(int row, int row_stride) {
  return row / 8 * row_stride + row % 8 * 16;
}

template <class C>
struct CoreElements {
  __device__ explicit CoreElements(const BlockFormat& /*format*/) {}

  static __device__ __forceinline__ std::uint16_t* key(std::uint8_t* keys, int place, int channel) {
    return element(keys + channel / 8 * C::key_depth_stride + core_row_at(place, C::key_row_stride), channel);
  }
  static __device__ __forceinline__ std::uint16_t* value(std::uint8_t* values, int place, int channel) {
    return element(values + place / 8 * C::value_depth_stride + core_row_at(channel, kCoreBytes), place);
  }

 private:
  static __device__ __forceinline__ std::uint16_t* element(std::uint8_t* row, int depth) {
    return reinterpret_cast<std::uint16_t*>(row + depth % 8 * 2);
  }
};

// Eight depth indices in a row.
class OctetDequantizer {
 public:
  __device__ __forceinline__ OctetDequantizer(const float2* grid, bool wide)
      : first_(grid, wide), second_(grid + 4, wide) {}

  // Of row tile j: its h-th eight depth indices.
  template <BlockCodes Codes>
  __device__ __forceinline__ void expand(const StepCodes& codes, int j, int h, float (&x)[2][4]) const {
    if constexpr (has_table(Codes)) {
      constexpr int distance = pair_distance(Codes);
      const int odd = j / distance % 2;
      const int low = j - odd * distance;
      first_.expand_paired(codes[low][2 * h], codes[low + distance][2 * h], odd, x[0]);
      second_.expand_paired(codes[low][2 * h + 1], codes[low + distance][2 * h + 1], odd, x[1]);
    } else {
      first_.expand(codes[j][2 * h], x[0]);
      second_.expand(codes[j][2 * h + 1], x[1]);
    }
  }

 private:
  BlockDequantizer first_, second_;
};

// BlockPage's sequence of calls.
template <class C>
class CorePage : public BlockPage<C, CoreElements<C>, ListedSlots<C>> {
  using Page = BlockPage<C, CoreElements<C>, ListedSlots<C>>;
  using Page::f_;
  using Page::grids_;
  using Page::planes_;
  using Page::raw_;

 public:
  using Page::Page;

#ifdef KVANT_WGMMA
  // As the base's, with copies that complete on a barrier of one arrival.
  __device__ void fetch(const std::uint8_t* block, std::uint8_t* raw, std::uint32_t barrier) {
    const std::uint8_t* page = this->page_of(block);
    if (C::unpack_thread() == 0) {
      const std::uint32_t to = ptx::shared_address(raw);
      const int grid_bytes = f_.value.shared_grid != 0 ? kPage * 4 : 0;
      ptx::barrier_expect(barrier, static_cast<std::uint32_t>(f_.head_bytes + grid_bytes));
      ptx::bulk_copy(to, block, static_cast<std::uint32_t>(f_.head_bytes), barrier);
      if (grid_bytes > 0) ptx::bulk_copy(to + f_.head_bytes, page + f_.value.min_offset, grid_bytes, barrier);
    }
    if (f_.value.outliers.slots > 0) this->slots_.fetch(f_, page, this->head_);
  }
#endif
  // Starts to copy the list of outliers of the page that was fetched last.
  __device__ void fetch_list() const {
    if (f_.value.outliers.slots > 0) this->slots_.fetch_list(f_);
  }

  // tokens: where the stage's go, a byte per place, if they have an order.
  __device__ __forceinline__ void unpack(int half, std::uint8_t* keys, std::uint8_t* values,
                                         std::uint8_t* tokens) const {
    constexpr int key_jobs = C::key.dim / kStep;
    constexpr int value_jobs = (C::value_tiles + 3) / 4 * 2;  // 32 tokens by 64 channels
    for (int job = C::unpack_thread() / 32; job < key_jobs + value_jobs; job += C::unpack_warps) {
      if (job < key_jobs) {
        unpack_keys(f_.key, 0, 0, half, job, keys);
        if (f_.rest.rows > 0) unpack_keys(f_.rest, 1, Page::kRestGrid, half, job, keys);
      } else {
        unpack_values((job - key_jobs) / 2, (job - key_jobs) % 2, half, values);
      }
    }
    const int place = C::unpack_thread();
    if (f_.tokens_offset >= 0 && place < kStageTokens) {
      tokens[place] = raw_[f_.tokens_offset + half * kStageTokens + place];
    }
  }

 private:
  static __device__ __forceinline__ int row() {
    return static_cast<int>(threadIdx.x) % 16;
  }
  // Which of the eight-index groups 4 pair + 2 h + (0 or 1) is this lane's.
  static __device__ __forceinline__ int octet() {
    return static_cast<int>(threadIdx.x) % 32 / 16;
  }

  static __device__ __forceinline__ uint4 pack(const float (&x)[2][4]) {
    return {ptx::narrow2<C::bfloat>(x[0][0], x[0][1]), ptx::narrow2<C::bfloat>(x[0][2], x[0][3]),
            ptx::narrow2<C::bfloat>(x[1][0], x[1][1]), ptx::narrow2<C::bfloat>(x[1][2], x[1][3])};
  }
  template <BlockCodes Codes>
  static __device__ __forceinline__ OctetDequantizer dequantizer(const BlockTile& tile, const float2* grid) {
    // What the tile says, known to the compiler but for codes of any kind.
    return {grid, Codes == BlockCodes::any ? tile.wide != 0 : has_table(Codes)};
  }

  // Channels 32 pair to 32 pair + 31 of the half's places that the tile has.
  __device__ __forceinline__ void unpack_keys(const BlockTile& tile, int number, int grid, int half, int pair,
                                              std::uint8_t* keys) const {
    const int origin = tile.first - half * kStageTokens;  // the place of the tile's first row
    const int begin = max(0, origin);
    const int end = min(kStageTokens, origin + tile.rows);
    if (begin >= end) return;
#pragma unroll 1
    for (int chunk = (begin - origin) / kStageTokens; chunk <= (end - 1 - origin) / kStageTokens; ++chunk) {
      const int place = origin + chunk * kStageTokens;
      with_codes(tile, chunk, [&](const auto kind) {
        constexpr BlockCodes kCodes = decltype(kind)::value;
        StepCodes codes;
        load_step<kCodes, 0, RowWords>(tile, planes_ + number * kBlockPlanes, raw_, chunk, row(),
                                       8 * pair + 2 * octet(), codes);
        const bool whole = begin <= place && place + kStageTokens <= end;
        if (kCodes == BlockCodes::any && tile.order_offset >= 0) {
          scatter_keys(tile, grid, pair, place, begin, end, codes, keys);
        } else if (has_four_tiles(kCodes) && whole) {
          store_keys<kCodes, true>(tile, grid, pair, place, begin, end, codes, keys);
        } else {
          store_keys<kCodes, false>(tile, grid, pair, place, begin, end, codes, keys);
        }
      });
    }
  }

  // place: of the codes' first row. Whole: [begin, end) has all of them.
  template <BlockCodes Codes, bool Whole>
  __device__ __forceinline__ void store_keys(const BlockTile& tile, int grid, int pair, int place, int begin, int end,
                                             const StepCodes& codes, std::uint8_t* keys) const {
    // Row tiles are two core matrices apart, whatever place they begin at. Places below 0 are not stored.
    const int own = place + row();
    std::uint8_t* to =
        keys + (4 * pair + octet()) * C::key_depth_stride + (own >> 3) * C::key_row_stride + (own & 7) * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto dequantize = dequantizer<Codes>(tile, grids_ + grid + 8 * (4 * pair + 2 * h + octet()));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!Whole && (place + (j + 1) * kTile <= begin || place + j * kTile >= end)) continue;
        float x[2][4];
        dequantize.template expand<Codes>(codes, j, h, x);
        if (!Whole && (own + j * kTile < begin || own + j * kTile >= end)) continue;
        *reinterpret_cast<uint4*>(to + 2 * h * C::key_depth_stride + 2 * j * C::key_row_stride) = pack(x);
      }
    }
  }

  // Where channels have an order.
  __device__ __forceinline__ void scatter_keys(const BlockTile& tile, int grid, int pair, int place, int begin, int end,
                                               const StepCodes& codes, std::uint8_t* keys) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int index = 8 * (4 * pair + 2 * h + octet());
      const auto dequantize = dequantizer<BlockCodes::any>(tile, grids_ + grid + index);
      const std::uint8_t* channels = raw_ + tile.order_offset + index;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int own = place + j * kTile + row();
        if (own < begin || own >= end) continue;
        float x[2][4];
        dequantize.template expand<BlockCodes::any>(codes, j, h, x);
        const uint4 packed = pack(x);
        const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          *CoreElements<C>::key(keys, own, channels[i]) =
              static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)) & 0xFFFFU);
        }
      }
    }
  }

  // Of a chunk of four row tiles tokens 32 pair to 32 pair + 31 of the half.
  __device__ __forceinline__ void unpack_values(int chunk, int pair, int half, std::uint8_t* values) const {
    const int four = (half * 2 + pair) * 8 + 2 * octet();
    with_codes(f_.value, chunk, [&](const auto kind) {
      constexpr BlockCodes kCodes = decltype(kind)::value;
      StepCodes codes;
      load_step<kCodes, C::value_tiles, RowWords>(f_.value, planes_ + 2 * kBlockPlanes, raw_, chunk, row(), four,
                                                  codes);
      if (!has_table(kCodes) && f_.value.factor_offset >= 0) {
        store_values<kCodes, true>(chunk, pair, four, codes, values);
      } else {
        store_values<kCodes, false>(chunk, pair, four, codes, values);
      }
    });
  }

  // Scaled: channels have factors; methods with tables have none.
  template <BlockCodes Codes, bool Scaled>
  __device__ __forceinline__ void store_values(int chunk, int pair, int four, const StepCodes& codes,
                                               std::uint8_t* values) const {
    const int channel = chunk * 4 * kTile + row();
    std::uint8_t* to = values + (4 * pair + octet()) * C::value_depth_stride + core_row_at(channel, kCoreBytes);
    float factors[4] = {1, 1, 1, 1};
#pragma unroll
    for (int j = 0; j < 4 && Scaled; ++j) {
      if (4 * chunk + j >= C::value_tiles) break;
      factors[j] = Page::widen(Page::load16(raw_ + f_.value.factor_offset + 2 * (channel + j * kTile)));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto dequantize = dequantizer<Codes>(f_.value, grids_ + Page::kValueGrid + kFour * (four + 4 * h));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (C::value_tiles % 4 != 0 && 4 * chunk + j >= C::value_tiles) break;
        float x[2][4];
        dequantize.template expand<Codes>(codes, j, h, x);
#pragma unroll
        for (int i = 0; i < 8 && Scaled; ++i) x[i / 4][i % 4] *= factors[j];
        *reinterpret_cast<uint4*>(to + 2 * h * C::value_depth_stride + 2 * j * kCoreBytes) = pack(x);
      }
    }
  }
};

}  // namespace kvant::cuda
