// The kernels that run per instruction set. One table per set; every table computes the same integer sums, so products
// from codes agree between sets up to the float operations around them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::tiles {

// Largest magnitudes of a quantized x: 127 * 256 + 127 splits into two signed bytes, 127 is one.
constexpr float kWideMax = 32639.0F;
constexpr float kNarrowMax = 127.0F;
// The finest step of x. A smaller one (softmax weights of a page far below the maximum) has no finite inverse.
constexpr float kFinestX = 2e-38F;

// Rounds x[n][d] = v[n][channel(d)] * step[channel(d)] to integers for multiply_codes.
struct PackArgs {
  const float* v = nullptr;  // [vectors][v_stride]
  std::int64_t v_stride = 0;
  const float* step = nullptr;           // [channels]
  const std::uint16_t* index = nullptr;  // null: channel(d) = d, else index[d]
  int depth = 0;
  int vectors = 0;
  bool wide = true;           // 16-bit x, else 8-bit
  float mid = 0;              // mean code of the planes that this x meets
  std::int32_t* x = nullptr;  // out: packed_words(depth, vectors) words, layout private to the kernel set
  float* scale = nullptr;     // out [vectors]: x = scale * integer
  float* bias = nullptr;     // in/out [vectors]: += mid * sum(x - scale * integer), the rounding error of the mean code
  float* scratch = nullptr;  // round_up(depth, 32) floats
};

// Words that a packed x takes, zero padding up to kDepthPad included.
constexpr std::size_t packed_words(int depth, int vectors) {
  return static_cast<std::size_t>((depth + 31) / 32) * 8 * 2 * static_cast<std::size_t>(vectors);
}

// out[n][row] += factor[n] * sum_d code[d][row] * integer_x[n][d]
struct CodeProduct {
  const std::byte* plane = nullptr;  // src/tiles/plane.hpp, 64-byte aligned
  int bits = 0;
  int rows = 0;
  int depth = 0;
  const std::int32_t* x = nullptr;
  int vectors = 0;
  bool wide = true;
  const float* factor = nullptr;  // [vectors]
  float* out = nullptr;           // [vectors][out_stride], rows padded to 16 are written
  std::int64_t out_stride = 0;
};

// out[n][row] += sum_d v[n][d] * tile[d][row]: the same product for rows that are not quantized.
struct RowProduct {
  const void* tile = nullptr;  // [depth][tile_stride] in `type`, rows readable up to a multiple of 16
  DType type = DType::f16;
  std::int64_t tile_stride = 0;
  int rows = 0;
  int depth = 0;
  const float* v = nullptr;  // [vectors][v_stride]
  std::int64_t v_stride = 0;
  int vectors = 0;
  float* out = nullptr;
  std::int64_t out_stride = 0;
};

// One page of the online softmax: scores become exp(score - new maximum); maximum and sum of each vector move on.
struct SoftmaxArgs {
  float* scores = nullptr;  // [vectors][stride], in: logits without mask, out: weights
  std::int64_t stride = 0;
  int vectors = 0;
  int cells = 0;                       // a multiple of 16
  const float* const* mask = nullptr;  // [vectors] rows of `cells` addends, or null entries; null: no mask at all
  const float* slope = nullptr;        // [vectors] multiplies the mask
  float softcap = 0;
  float* maximum = nullptr;  // [vectors]
  float* sum = nullptr;      // [vectors]
  float* alpha = nullptr;    // out [vectors]: what earlier outputs must be multiplied by
};

struct Kernels {
  std::string name;
  bool integer_dot = false;  // has 8-bit dot-product instructions

  void (*pack_x)(const PackArgs&) = nullptr;
  void (*multiply_codes)(const CodeProduct&) = nullptr;
  void (*multiply_rows)(const RowProduct&) = nullptr;
  void (*softmax)(const SoftmaxArgs&) = nullptr;
  // out[n][r] = out[n][r] * alpha[n] + bias[n]
  void (*rescale)(float* out, std::int64_t stride, int vectors, int rows, const float* alpha,
                  const float* bias) = nullptr;
  // sum a[i] * b[i]
  float (*dot)(const float* a, const float* b, int n) = nullptr;

  void (*widen)(const void* from, DType type, float* to, std::int64_t n) = nullptr;
  void (*narrow)(const float* from, void* to, DType type, std::int64_t n) = nullptr;
  void (*min_max)(const float* x, int n, float* min, float* max) = nullptr;
  // code = clamp(floor((x - min) / step + 0.5), 0, levels); all 0 when step is 0
  void (*quantize)(const float* x, int n, float min, float step, int levels, std::uint8_t* codes) = nullptr;
  // x = min + code * step
  void (*dequantize)(const std::uint8_t* codes, int n, float min, float step, float* x) = nullptr;
  // Bits shift..shift+bits-1 of codes[d] (rows of code_stride bytes, index may select them) to and from a plane.
  // `codes` rows must be padded to 16 with zeros for pack; unpack ORs into them.
  void (*pack_plane)(const std::uint8_t* codes, std::int64_t code_stride, const std::uint16_t* index, int bits,
                     int shift, int rows, int depth, std::byte* plane) = nullptr;
  void (*unpack_plane)(const std::byte* plane, int bits, int shift, int rows, int depth, const std::uint16_t* index,
                       std::uint8_t* codes, std::int64_t code_stride) = nullptr;
};

// The set in use (runtime.hpp chooses it) and all sets this CPU can run, best first.
const Kernels& kernels();
const std::vector<Kernels>& all_kernels();

// step of a grid with `levels` + 1 points from min to max; the one formula that encoder, decoder and attention share.
inline float grid_step(float min, float max, int levels) {
  return (max - min) / static_cast<float>(levels);
}

}  // namespace kvant::tiles
