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

// Depth indices of a tile at most: channels of a head.
constexpr int kMaxDepth = 1024;
// Integer sums run over this many depth indices (0..255, 256..511, ...), then become float: 8-bit codes times a 16-bit
// x reach 255 * 32639 * 256 = 2130673920, just below 2^31.
constexpr int kSumDepth = 256;

// Rounds x[n][i] = v[n][i] * step[i] to integers for multiply_codes.
struct PackArgs {
  const float* v = nullptr;  // [vectors][v_stride]
  std::int64_t v_stride = 0;
  const float* step = nullptr;    // [depth]
  const float* middle = nullptr;  // [depth] min + mid * step
  int depth = 0;
  int vectors = 0;
  bool wide = true;            // 16-bit x, else 8-bit
  const float* mid = nullptr;  // [round_up(depth, 64)] the mean code that x[n][i] meets
  std::int32_t* x = nullptr;   // out: packed_words(depth, vectors) words, layout private to the kernel set
  float* scale = nullptr;      // out [vectors]: x = scale * integer
  // out [vectors]: sum v * min + sum mid * (v * step - scale * integer), the grid's minimum and the rounding error at
  // the mean code, as sum v * middle - scale * sum mid * integer. NaN where v * step is not finite.
  float* bias = nullptr;
};

// Words of one vector, two for four depth indices, zero padding up to a multiple of 64 included.
constexpr std::int64_t vector_words(int depth) {
  return std::int64_t{(depth + 63) / 64} * 16 * 2;
}

// Words that a packed x takes. A product may read 16 rows of 16 words past its end, for results that nobody wants.
constexpr std::size_t packed_words(int depth, int vectors) {
  return static_cast<std::size_t>(vector_words(depth) * vectors) + 16 * 16;
}

// A plane (src/tiles/plane.hpp, 64-byte aligned) over the depth indices first..first+depth-1 of x; its bits are worth
// 2^shift. `first` is a multiple of kQuad.
struct CodePlane {
  const std::byte* plane = nullptr;
  int bits = 0;  // 1, 2 or 4
  int shift = 0;
  int first = 0;
  int depth = 0;
};

// Codes of a table at most: 4 bits.
constexpr int kTableSize = 16;

// Memory that a product asks for while it computes: pages lie anywhere, so no hardware prefetcher finds the next one,
// and asking for all of it at once would wait for the memory instead.
struct Ahead {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// What a product does with the `out` that is there.
enum class Start : std::uint8_t {
  add,      // out + product
  replace,  // bias[n] + product
  rescale,  // out * alpha[n] + bias[n] + product
};

// out[n][row] += factor[n] * sum_i code[i][row] * integer_x[n][i], where a code is the sum of what the planes that
// cover depth index i say and fits 8 bits; with a table, code c stands for table[c]; at most 32 planes. Sums are
// integers over kSumDepth depth indices, each converted to float once.
struct CodeProduct {
  const CodePlane* planes = nullptr;
  int count = 0;
  int rows = 0;
  const std::int32_t* x = nullptr;
  int x_depth = 0;  // depth of pack_x, 1 to kMaxDepth
  int vectors = 0;
  bool wide = true;
  const float* factor = nullptr;  // [vectors]
  float* out = nullptr;           // [vectors][out_stride], rows padded to 16 are written
  std::int64_t out_stride = 0;
  Start start = Start::add;
  const float* alpha = nullptr;  // [vectors]
  const float* bias = nullptr;   // [vectors]
  Ahead ahead = {};
  const std::uint8_t* table = nullptr;  // [kTableSize], for codes of at most 4 bits
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
  Ahead ahead = {};
};

// out[n][rows[i]] += v[n][depths[i]] * values[i], for i in order: outliers beside a tile. Vectors become lanes, so that
// an entry is one multiply-add for up to 16 of them.
struct SparseProduct {
  const float* values = nullptr;  // [count]
  const std::uint16_t* rows = nullptr;
  const std::uint16_t* depths = nullptr;
  int count = 0;
  int row_count = 0;  // rows and depth of the tile
  int depth = 0;
  const float* v = nullptr;  // [vectors][v_stride]
  std::int64_t v_stride = 0;
  int vectors = 0;
  float* out = nullptr;  // [vectors][out_stride]
  std::int64_t out_stride = 0;
  float* scratch = nullptr;  // 16 * (row_count + depth) floats
};

// How 16 rows of a tile are turned: pair p at row j by the angle of lane (p, j) plus that of the block.
struct TurnBlock {
  const float* lane_cosines = nullptr;  // [pairs][16]
  const float* lane_sines = nullptr;
  const float* cosines = nullptr;  // [pairs]
  const float* sines = nullptr;
};

constexpr int kMostRowTiles = 16;

// out[d][row] = min[d] + step[d] * table[code] with pairs of channels turned: pair p is channel x = p * pair_step and
// y = x + pair_distance, and becomes (x cos - y sin, x sin + y cos). Channels from 2 * pairs on stay as they are.
struct TurnedTile {
  const CodePlane* planes = nullptr;  // over the whole depth; the first one has shift 0
  int count = 0;                      // 1 or 2: codes of 2 to 4 bits
  int rows = 0;                       // 32, 64, 128 or 256, those of a page
  int depth = 0;
  const std::uint8_t* table = nullptr;  // [kTableSize]
  const float* min = nullptr;           // [depth]
  const float* step = nullptr;
  int pairs = 0;  // 1 to depth / 2
  int pair_step = 1;
  int pair_distance = 1;
  const TurnBlock* blocks = nullptr;  // [rows / 16]
  float* out = nullptr;               // [depth][out_stride]
  std::int64_t out_stride = 0;
};

// sincos goes over this many angles at a time.
constexpr int kSinCosStep = 8;
// Radians of a turn, and the Taylor terms of sin(x) / x and cos(x) in x^2: for |x| <= pi / 4 the next one is below
// 1e-11.
constexpr double kTurn = 6.283185307179586;
constexpr double kSineTerms[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
constexpr double kCosineTerms[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600};

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

// Sums for the least-squares line from codes to values. The sums of doubles run in eight lanes (element i in lane i %
// 8) that are added as ((0+4)+(2+6))+((1+5)+(3+7)), so every kernel set has the same bits.
struct LineSums {
  std::int64_t code = 0;         // sum c
  std::int64_t code_square = 0;  // sum c * c
  double value = 0;              // sum x
  double product = 0;            // sum c * x
};

// What begin_products keeps of the thread.
struct alignas(64) ThreadState {
  std::byte bytes[64];
};

struct Kernels {
  std::string name;
  bool integer_dot = false;  // has 8-bit dot-product instructions

  // Null, or: put this thread into the state that multiply_codes computes in, and back. Optional, multiply_codes does
  // it alone where it has to; worth it around many products.
  void (*begin_products)(ThreadState& before) = nullptr;
  void (*end_products)(const ThreadState& before) = nullptr;

  void (*pack_x)(const PackArgs&) = nullptr;
  void (*multiply_codes)(const CodeProduct&) = nullptr;
  void (*multiply_rows)(const RowProduct&) = nullptr;
  void (*multiply_sparse)(const SparseProduct&) = nullptr;
  void (*softmax)(const SoftmaxArgs&) = nullptr;
  // out[n][r] = out[n][r] * alpha[n] + bias[n]
  void (*rescale)(float* out, std::int64_t stride, int vectors, int rows, const float* alpha,
                  const float* bias) = nullptr;
  // sum a[i] * b[i]
  float (*dot)(const float* a, const float* b, int n) = nullptr;

  // middle[i] = (min[i] + max[i]) / 2 and step[i] = (max[i] - min[i]) * inverse[i], ends in `type`; inverse: 1 / levels
  void (*load_grid)(const void* min, const void* max, DType type, const float* inverse, int n, float* middle,
                    float* step) = nullptr;
  // to[v][i] = lanes[order[i]][v], up to four vectors, lanes [...][4]
  void (*gather_lanes)(const float* lanes, const std::uint16_t* order, int n, int vectors, float* to,
                       std::int64_t stride) = nullptr;

  void (*widen)(const void* from, DType type, float* to, std::int64_t n) = nullptr;
  void (*narrow)(const float* from, void* to, DType type, std::int64_t n) = nullptr;
  void (*min_max)(const float* x, int n, float* min, float* max) = nullptr;
  // code = clamp(floor((x - min) / step + 0.5), 0, levels); all 0 when step is 0
  void (*quantize)(const float* x, int n, float min, float step, int levels, std::uint8_t* codes) = nullptr;
  // x = min + code * step
  void (*dequantize)(const std::uint8_t* codes, int n, float min, float step, float* x) = nullptr;
  LineSums (*line_sums)(const std::uint8_t* codes, const float* x, int n) = nullptr;
  // sum (x - (min + code * step))^2 in double, the grid's value in float; lanes as in LineSums
  double (*grid_error)(const std::uint8_t* codes, const float* x, int n, float min, float step) = nullptr;
  // out[i] += factors[0] * rows[0][i], then factors[1] * rows[1][i] and so on, each rounded twice: the same on every
  // set.
  void (*add_rows)(const float* rows, std::int64_t stride, const float* factors, int count, int n,
                   float* out) = nullptr;
  // Walsh-Hadamard transform of every `block` consecutive values, in place and not normalised; block is a power of two
  // that divides n. The same additions in the same tree on every set.
  void (*hadamard)(float* x, int n, int block) = nullptr;
  // Of turns[i] full turns; n is a multiple of kSinCosStep. The same bits on every set, right to a rounding of float.
  void (*sincos)(const double* turns, int n, float* cosines, float* sines) = nullptr;
  void (*turn_tile)(const TurnedTile&) = nullptr;
  // Bits shift..shift+bits-1 of codes[d] (rows of code_stride bytes, index may select them) to and from a plane.
  // `codes` rows must be padded to 16 with zeros for pack; unpack ORs into them.
  void (*pack_plane)(const std::uint8_t* codes, std::int64_t code_stride, const std::uint16_t* index, int bits,
                     int shift, int rows, int depth, std::byte* plane) = nullptr;
  void (*unpack_plane)(const std::byte* plane, int bits, int shift, int rows, int depth, const std::uint16_t* index,
                       std::uint8_t* codes, std::int64_t code_stride) = nullptr;
};

// begin_products to end_products of a scope.
class ProductScope {
 public:
  explicit ProductScope(const Kernels& kernels) : kernels_(kernels) {
    if (kernels_.begin_products != nullptr) kernels_.begin_products(before_);
  }
  ~ProductScope() {
    if (kernels_.end_products != nullptr) kernels_.end_products(before_);
  }
  ProductScope(const ProductScope&) = delete;
  ProductScope& operator=(const ProductScope&) = delete;

 private:
  const Kernels& kernels_;
  ThreadState before_;
};

// The set in use (runtime.hpp chooses it) and all sets this CPU can run, best first.
const Kernels& kernels();
const std::vector<Kernels>& all_kernels();
// The best set with matrix products in plain arithmetic: for tests, on every CPU, of all that surrounds AMX.
Kernels emulated_matrix_kernels();

// step of a grid with `levels` + 1 points from min to max; the one formula that encoder, decoder and attention share.
inline float grid_step(float min, float max, int levels) {
  return (max - min) / static_cast<float>(levels);
}

}  // namespace kvant::tiles
