// Appending rows and sealing pages on the device. Sealed bytes are those of the CPU's encoder after conversion, but for
// the sign of an endpoint that is zero.
#include "cuda/check.hpp"
#include "cuda/ptx.cuh"
#include "cuda/seal.hpp"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 256;

// ---- append

__global__ void append_kernel(const AppendArgs args, const ExactFormat format) {
  const int sequence = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int length = args.lengths[sequence];
  const int begin = args.tail_begin[sequence];
  const int width = format.key_dim + format.value_dim;
  for (int i = static_cast<int>(threadIdx.x); i < args.rows * width; i += kThreads) {
    const int row = i / width;
    const int d = i % width;
    const int at = length + row - begin;
    const std::int32_t number = args.exact_table[sequence * args.exact_table_stride + 1 + at / kPage];
    std::uint8_t* page =
        args.exact + number * args.exact_stride + static_cast<std::int64_t>(head) * format.page_bytes();
    const std::int64_t source = (static_cast<std::int64_t>(sequence) * args.rows + row) * args.kv_heads + head;
    if (d < format.key_dim) {
      *reinterpret_cast<std::uint16_t*>(page + format.key_at(at % kPage, d)) = args.keys[source * format.key_dim + d];
    } else {
      const int c = d - format.key_dim;
      *reinterpret_cast<std::uint16_t*>(page + format.value_at(at % kPage, c)) =
          args.values[source * format.value_dim + c];
    }
  }
}

__global__ void grow_kernel(std::int32_t* lengths, int sequences, int rows) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < sequences) lengths[i] += rows;
}

// ---- seal

// One grid: minimum, step and its inverse.
struct Grid {
  float min, step, inverse;

  __device__ static Grid of(float min, float max, int levels) {
    const float step = __fdiv_rn(max - min, static_cast<float>(levels));
    return {min, step, step > 0 ? ptx::reciprocal(step) : 0.0F};
  }
  // floor((x - min) / step + 1/2) as the CPU rounds it. The product with the inverse is off by a few ulp, so only where it
  // comes near an integer is the division needed.
  __device__ std::uint32_t code(float x, int levels) const {
    if (!(step > 0)) return 0;
    const float difference = __fsub_rn(x, min);
    float t = __fadd_rn(__fmul_rn(difference, inverse), 0.5F);
    if (fabsf(t - rintf(t)) < 1e-4F) t = __fadd_rn(__fdiv_rn(difference, step), 0.5F);
    return static_cast<std::uint32_t>(fminf(fmaxf(floorf(t), 0.0F), static_cast<float>(levels)));
  }
};

struct Shared {
  std::uint16_t* keys;    // [token][key_dim + 16]
  std::uint16_t* values;  // [token][value_dim + 16]
  Grid* key_grid;         // [channel]
  Grid* value_grid;       // [token]
  double* loudness;       // [channel]
  std::uint8_t* boosted;  // [channel]
  std::uint8_t* list;     // [boosted channels], ascending

  static int bytes(const DeviceFormat& f) {
    return kPage * (f.key.dim + f.value.dim + 32) * 2 + (f.key.dim + kPage) * static_cast<int>(sizeof(Grid)) +
           f.key.dim * 8 + f.key.dim * 2 + 16;
  }
  __device__ Shared(std::uint8_t* base, const DeviceFormat& f) {
    keys = reinterpret_cast<std::uint16_t*>(base);
    values = keys + kPage * (f.key.dim + 16);
    loudness = reinterpret_cast<double*>(values + kPage * (f.value.dim + 16));
    key_grid = reinterpret_cast<Grid*>(loudness + f.key.dim);
    value_grid = key_grid + f.key.dim;
    boosted = reinterpret_cast<std::uint8_t*>(value_grid + kPage);
    list = boosted + f.key.dim;
  }
};

template <bool Bfloat>
__device__ float widen(std::uint16_t x) {
  return ptx::widen2<Bfloat>(x).x;
}

// Fragments of an exact page to rows.
__device__ void load_rows(const DeviceFormat& f, const std::uint8_t* exact, const Shared& shared) {
  const int per_tile = f.exact.tile_bytes() / 16;
  for (int i = static_cast<int>(threadIdx.x); i < per_tile * (kPage / kTile); i += kThreads) {
    const uint4 data = reinterpret_cast<const uint4*>(exact)[i];
    const std::uint32_t pairs[4] = {data.x, data.y, data.z, data.w};
    const int tile = i / per_tile;
    int fragment = i % per_tile / 32;
    const int g = i % 32 / 4;
    const int t = i % 4;
    const bool key = fragment < f.key.dim / 16;
    if (!key) fragment -= f.key.dim / 16;
    for (int r = 0; r < 4; ++r) {
      const int row = g + 8 * (r & 1);
      const int k = 2 * t + 8 * (r >> 1);
      if (key) {  // rows are tokens
        std::uint16_t* out = shared.keys + (tile * 16 + row) * (f.key.dim + 16) + fragment * 16 + k;
        *reinterpret_cast<std::uint32_t*>(out) = pairs[r];
      } else {  // rows are channels
        std::uint16_t* out = shared.values + (tile * 16 + k) * (f.value.dim + 16) + fragment * 16 + row;
        out[0] = static_cast<std::uint16_t>(pairs[r]);
        out[f.value.dim + 16] = static_cast<std::uint16_t>(pairs[r] >> 16);
      }
    }
  }
}

// Ranks channels by mean |k|, ties to the lower channel (the sums are exact in binary64), and lists the first `boosted`.
template <bool Bfloat>
__device__ void rank_channels(const DeviceFormat& f, int skip, const Shared& shared) {
  for (int c = static_cast<int>(threadIdx.x); c < f.key.dim; c += kThreads) {
    double sum = 0;
    for (int t = skip; t < kPage; ++t) sum += fabsf(widen<Bfloat>(shared.keys[t * (f.key.dim + 16) + c]));
    shared.loudness[c] = sum;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < f.key.dim; c += kThreads) {
    int rank = 0;
    for (int other = 0; other < f.key.dim; ++other) {
      const double mine = shared.loudness[c];
      const double theirs = shared.loudness[other];
      rank += theirs > mine || (theirs == mine && other < c) ? 1 : 0;
    }
    shared.boosted[c] = rank < f.boosted ? 1 : 0;
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < f.key.dim; c += kThreads) {
    int place = 0;
    for (int other = 0; other < c; ++other) place += shared.boosted[other];
    if (shared.boosted[c] != 0) shared.list[place] = static_cast<std::uint8_t>(c);
  }
}

template <bool Bfloat>
__device__ void fit_keys(const DeviceFormat& f, int skip, const Shared& shared, std::uint8_t* page) {
  for (int c = static_cast<int>(threadIdx.x); c < f.key.dim; c += kThreads) {
    const std::uint16_t* column = shared.keys + c;
    std::uint16_t low = column[skip * (f.key.dim + 16)];
    std::uint16_t high = low;
    for (int t = skip + 1; t < kPage; ++t) {
      const std::uint16_t x = column[t * (f.key.dim + 16)];
      if (widen<Bfloat>(x) < widen<Bfloat>(low)) low = x;
      if (widen<Bfloat>(x) > widen<Bfloat>(high)) high = x;
    }
    const bool boosted = f.boosted > 0 && shared.boosted[c] != 0;
    const int levels = boosted ? 15 : (1 << f.key.bits) - 1;
    shared.key_grid[c] = Grid::of(widen<Bfloat>(low), widen<Bfloat>(high), levels);
    auto* ends = reinterpret_cast<std::uint16_t*>(page + key_endpoint_offset(c));
    ends[0] = boosted ? high : low;
    ends[4] = boosted ? low : high;
  }
}

template <bool Bfloat>
__device__ void fit_values(const DeviceFormat& f, int skip, const Shared& shared, std::uint8_t* page) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int t = static_cast<int>(threadIdx.x) / 32; t < kPage; t += kThreads / 32) {
    float low = INFINITY;
    float high = -INFINITY;
    for (int c = lane; c < f.value.dim; c += 32) {
      const float x = widen<Bfloat>(shared.values[t * (f.value.dim + 16) + c]);
      low = fminf(low, x);
      high = fmaxf(high, x);
    }
    for (int bit = 16; bit > 0; bit >>= 1) {
      low = fminf(low, __shfl_xor_sync(0xFFFFFFFFU, low, bit));
      high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFU, high, bit));
    }
    if (t < skip) low = high = 0;  // endpoints 0 and codes 0: never read, always the same bytes
    if (lane == 0) {
      shared.value_grid[t] = Grid::of(low, high, (1 << f.value.bits) - 1);
      auto* ends = reinterpret_cast<std::uint16_t*>(page + f.key.bytes() + value_endpoint_offset(f.value, t));
      ends[0] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(low, 0));
      ends[64] = static_cast<std::uint16_t>(ptx::narrow2<Bfloat>(high, 0));
    }
  }
}

// Words of one lane of a quad. code(row tile position, row in tile, depth in step) gives a code; row in tile < 16.
template <int Positions, class Code>
__device__ uint4 make_quad(int lane, const Code& code) {
  std::uint32_t words[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
#pragma unroll
      for (int p = 0; p < Positions; ++p) {
        word |= code(p, lane / 4 + 8 * (r & 1), 16 * (r >> 1) + 4 * (lane % 4) + b) << (8 * b + 8 / Positions * p);
      }
    }
    words[r] = word;
  }
  return {words[0], words[1], words[2], words[3]};
}

// One lane's words of a quad of the main plane: nibbles for 4-bit codes, two low bits else.
template <class CodeAt>
__device__ uint4 make_codes(int bits, int group, int lane, const CodeAt& code_at) {
  const auto code = [&](int p, int row, int depth) {
    const std::uint32_t c = code_at(tile_of(bits, group, p) * kTile + row, depth);
    return bits == 4 ? c : c & 3U;
  };
  return bits == 4 ? make_quad<2>(lane, code) : make_quad<4>(lane, code);
}

// One lane's words of the 1-bit plane that serves groups 2 * pair and 2 * pair + 1.
template <class CodeAt>
__device__ uint4 make_plane1(int pair, int groups, int lane, const CodeAt& code_at) {
  const auto code = [&](int bit, int row, int depth) -> std::uint32_t {
    // The inverse of plane1_bit.
    const int group = 2 * pair + (bit % 4 < 2 ? 1 : 0);
    const int position = bit / 4 * 2 + bit % 2;
    if (group >= groups) return 0;
    return code_at(tile_of(3, group, position) * kTile + row, depth) >> 2;
  };
  return make_quad<8>(lane, code);
}

// Replaces rows by codes in place.
template <bool Bfloat>
__device__ void quantize(const DeviceFormat& f, int skip, const Shared& shared) {
  const int key_stride = f.key.dim + 16;
  for (int i = static_cast<int>(threadIdx.x); i < kPage * f.key.dim; i += kThreads) {
    const int token = i / f.key.dim;
    const int channel = i % f.key.dim;
    std::uint16_t& x = shared.keys[token * key_stride + channel];
    const int levels = f.boosted > 0 && shared.boosted[channel] != 0 ? 15 : (1 << f.key.bits) - 1;
    x = static_cast<std::uint16_t>(token < skip ? 0 : shared.key_grid[channel].code(widen<Bfloat>(x), levels));
  }
  const int value_stride = f.value.dim + 16;
  for (int i = static_cast<int>(threadIdx.x); i < kPage * f.value.dim; i += kThreads) {
    const int token = i / f.value.dim;
    std::uint16_t& x = shared.values[token * value_stride + i % f.value.dim];
    x = static_cast<std::uint16_t>(
        token < skip ? 0 : shared.value_grid[token].code(widen<Bfloat>(x), (1 << f.value.bits) - 1));
  }
}

__device__ void pack_keys(const DeviceFormat& f, const Shared& shared, std::uint8_t* page) {
  const auto code = [&](int token, int channel) -> std::uint32_t {
    return shared.keys[token * (f.key.dim + 16) + channel];
  };
  const int quads = f.key.groups() * f.key.quads_per_group();
  for (int i = static_cast<int>(threadIdx.x); i < quads * 32; i += kThreads) {
    const int group = i / 32 / f.key.quads_per_group();
    const int step = i / 32 % f.key.quads_per_group();
    const uint4 words = make_codes(f.key.bits, group, i % 32, [&](int token, int depth) -> std::uint32_t {
      if (step < f.key.steps()) return code(token, step * kStep + depth);
      const int entry = (step - f.key.steps()) * kStep + depth;
      return entry < f.boosted ? code(token, shared.list[entry]) >> 2 : 0;
    });
    reinterpret_cast<uint4*>(page + f.key.codes_offset())[i] = words;
  }
  if (f.key.bits == 3) {
    for (int i = static_cast<int>(threadIdx.x); i < f.key.steps() * 32; i += kThreads) {
      reinterpret_cast<uint4*>(page + f.key.plane1_offset())[i] = make_plane1(
          0, f.key.groups(), i % 32, [&](int token, int depth) { return code(token, i / 32 * kStep + depth); });
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < f.key.high_steps * kStep; i += kThreads) {
    page[f.key.index_offset() + i] = i < f.boosted ? shared.list[i] : 0;
  }
}

__device__ void pack_values(const DeviceFormat& f, const Shared& shared, std::uint8_t* page) {
  // depth: a slot of the 32-token step `step`.
  const auto code = [&](int channel, int step, int depth) -> std::uint32_t {
    const int token = step * kStep + (depth & 16) + (depth >> 1 & 7) + 8 * (depth & 1);
    return channel < f.value.dim ? shared.values[token * (f.value.dim + 16) + channel] : 0;
  };
  const int per_half = f.value.groups() * 2 * 32;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * per_half; i += kThreads) {
    const int half = i / per_half;
    const int group = i % per_half / 64;
    const int step = 2 * half + i / 32 % 2;
    const uint4 words =
        make_codes(f.value.bits, group, i % 32, [&](int channel, int depth) { return code(channel, step, depth); });
    reinterpret_cast<uint4*>(page + half * f.value.half_bytes() + f.value.codes_offset())[i % per_half] = words;
  }
  const int ones = f.value.plane1_groups() * 2 * 32;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * ones; i += kThreads) {
    const int half = i / ones;
    const int pair = i % ones / 64;
    const int step = 2 * half + i / 32 % 2;
    reinterpret_cast<uint4*>(page + half * f.value.half_bytes() + f.value.plane1_offset())[i % ones] = make_plane1(
        pair, f.value.groups(), i % 32, [&](int channel, int depth) { return code(channel, step, depth); });
  }
}

template <bool Bfloat>
__global__ void __launch_bounds__(kThreads) seal_kernel(const SealArgs args, const DeviceFormat f) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  const Shared shared(memory, f);
  const SealJob job = args.jobs[blockIdx.x];
  const auto head = static_cast<std::int64_t>(blockIdx.y);
  std::uint8_t* page = args.pages + job.page * args.page_stride + head * (f.key.bytes() + f.value.bytes());
  load_rows(f, args.exact + job.exact_page * args.exact_stride + head * f.exact.page_bytes(), shared);
  __syncthreads();
  if (f.boosted > 0) {
    rank_channels<Bfloat>(f, job.skip, shared);
    __syncthreads();
  }
  fit_keys<Bfloat>(f, job.skip, shared, page);
  fit_values<Bfloat>(f, job.skip, shared, page);
  __syncthreads();
  quantize<Bfloat>(f, job.skip, shared);
  __syncthreads();
  pack_keys(f, shared, page);
  pack_values(f, shared, page + f.key.bytes());
}

}  // namespace

void launch_append(const DeviceFormat& format, const AppendArgs& args, int sequences, void* stream) {
  const dim3 grid(static_cast<unsigned>(sequences), static_cast<unsigned>(args.kv_heads));
  append_kernel<<<grid, kThreads, 0, as_stream(stream)>>>(args, format.exact);
  grow_kernel<<<(sequences + 255) / 256, 256, 0, as_stream(stream)>>>(args.lengths, sequences, args.rows);
  check(cudaGetLastError(), "launch of the append kernels");
}

void launch_seal(const DeviceFormat& format, const SealArgs& args, int jobs, void* stream) {
  const dim3 grid(static_cast<unsigned>(jobs), static_cast<unsigned>(args.kv_heads));
  const int shared = Shared::bytes(format);
  const auto kernel = format.bfloat ? &seal_kernel<true> : &seal_kernel<false>;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "shared memory of the seal kernel");
  kernel<<<grid, kThreads, static_cast<std::size_t>(shared), as_stream(stream)>>>(args, format);
  check(cudaGetLastError(), "launch of the seal kernel");
}

}  // namespace kvant::cuda
