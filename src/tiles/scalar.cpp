#include "tiles/scalar.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/half.hpp"
#include "tiles/plane.hpp"

namespace kvant::tiles {
namespace {

// x is kept as [vectors][depth padded] 16-bit integers; two words per quad and vector leave room for exactly that.
void pack_x(const PackArgs& a) {
  const int padded = base::round_up(a.depth, kDepthPad);
  const float limit = a.wide ? kWideMax : kNarrowMax;
  auto* out = reinterpret_cast<std::int16_t*>(a.x);
  std::memset(out, 0, packed_words(a.depth, a.vectors) * sizeof(std::int32_t));
  for (int n = 0; n < a.vectors; ++n) {
    const float* v = a.v + n * a.v_stride;
    float peak = limit * kFinestX;
    bool finite = true;
    for (int d = 0; d < a.depth; ++d) {
      const float value = v[d] * a.step[d];
      finite &= std::isfinite(value);
      peak = std::max(peak, std::fabs(value));
    }
    a.scale[n] = a.bias[n] = std::numeric_limits<float>::quiet_NaN();
    if (!finite) continue;
    a.scale[n] = peak / limit;
    const float inverse = 1.0F / a.scale[n];
    float exact = 0;
    float integers = 0;
    for (int d = 0; d < a.depth; ++d) {
      const float rounded = std::nearbyint(v[d] * a.step[d] * inverse);
      out[static_cast<std::int64_t>(n) * padded + d] = static_cast<std::int16_t>(rounded);
      exact += v[d] * a.middle[d];
      integers += a.mid[d] * rounded;
    }
    a.bias[n] = exact - a.scale[n] * integers;
  }
}

int code_at(const std::byte* plane, int bits, int tiles, int lane_tile, int lane, int depth) {
  const int quad = depth / kQuad;
  const int per_group = quads_per_group(bits, tiles);
  const int position = (quad % per_group) * tiles + lane_tile;
  const int byte = (quad / per_group) * kGroupBytes + lane * kQuad + depth % kQuad;
  return (static_cast<int>(plane[byte]) >> (position * bits)) & ((1 << bits) - 1);
}

// One plane as one row sees it.
struct RowPlane {
  const CodePlane* plane;
  const std::byte* block;
  int tiles;
  int tile;  // of the row, in its block
};

std::vector<RowPlane> find_row(const CodeProduct& a, int row) {
  std::vector<RowPlane> found;
  for (int i = 0; i < a.count; ++i) {
    for_each_block(a.planes[i].bits, a.rows, a.planes[i].depth, [&](int first, int tiles, std::size_t offset) {
      const int tile = row / kLanes - first;
      if (tile >= 0 && tile < tiles) found.push_back({&a.planes[i], a.planes[i].plane + offset, tiles, tile});
    });
  }
  return found;
}

// The code of depth index d, all planes joined.
int joined_code(const std::vector<RowPlane>& planes, int row, int d) {
  int code = 0;
  for (const RowPlane& p : planes) {
    const int inside = d - p.plane->first;
    if (inside < 0 || inside >= p.plane->depth) continue;
    code += code_at(p.block, p.plane->bits, p.tiles, p.tile, row % kLanes, inside) << p.plane->shift;
  }
  return code;
}

void multiply_codes(const CodeProduct& a) {
  const auto* x = reinterpret_cast<const std::int16_t*>(a.x);
  const int padded = base::round_up(a.x_depth, kDepthPad);
  std::vector<int> codes(static_cast<std::size_t>(a.x_depth));
  for (int row = 0; row < base::round_up(a.rows, kLanes); ++row) {
    const std::vector<RowPlane> planes = find_row(a, row);
    for (int d = 0; d < a.x_depth; ++d) {
      const int code = joined_code(planes, row, d);
      codes[static_cast<std::size_t>(d)] = a.table != nullptr ? a.table[code] : code;
    }
    for (int n = 0; n < a.vectors; ++n) {
      float& out = a.out[n * a.out_stride + row];
      if (a.start == Start::replace) out = a.bias[n];
      if (a.start == Start::rescale) out = out * a.alpha[n] + a.bias[n];
      for (int begin = 0; begin < a.x_depth; begin += kSumDepth) {
        std::int64_t sum = 0;
        for (int d = begin; d < std::min(begin + kSumDepth, a.x_depth); ++d) {
          sum += codes[static_cast<std::size_t>(d)] * x[std::ptrdiff_t{n} * padded + d];
        }
        out = out + a.factor[n] * static_cast<float>(sum);
      }
    }
  }
}

void multiply_rows(const RowProduct& a) {
  for (int n = 0; n < a.vectors; ++n) {
    for (int row = 0; row < a.rows; ++row) {
      float sum = 0;
      for (int d = 0; d < a.depth; ++d) {
        sum += a.v[n * a.v_stride + d] * base::load_float(a.tile, a.type, d * a.tile_stride + row);
      }
      a.out[n * a.out_stride + row] += sum;
    }
  }
}

void multiply_sparse(const SparseProduct& a) {
  for (int n = 0; n < a.vectors; ++n) {
    for (int i = 0; i < a.count; ++i) {
      a.out[n * a.out_stride + a.rows[i]] += a.v[n * a.v_stride + a.depths[i]] * a.values[i];
    }
  }
}

void softmax(const SoftmaxArgs& a) {
  for (int n = 0; n < a.vectors; ++n) {
    float* s = a.scores + n * a.stride;
    const float* mask = a.mask != nullptr ? a.mask[n] : nullptr;
    float peak = a.maximum[n];
    bool bad = !(peak < std::numeric_limits<float>::infinity());
    for (int i = 0; i < a.cells; ++i) {
      if (a.softcap > 0) s[i] = a.softcap * std::tanh(s[i] / a.softcap);
      if (mask != nullptr)
        s[i] = mask[i] == -std::numeric_limits<float>::infinity() ? mask[i] : s[i] + a.slope[n] * mask[i];
      bad |= !(s[i] < std::numeric_limits<float>::infinity());
      peak = std::max(peak, s[i]);
    }
    if (bad) {  // a NaN or infinity among the visible scores is the result, not a small weight
      std::fill(s, s + a.cells, std::numeric_limits<float>::quiet_NaN());
      a.maximum[n] = a.sum[n] = s[0];
      a.alpha[n] = 1;
      continue;
    }
    if (peak == -std::numeric_limits<float>::infinity()) {  // nothing visible yet: -inf minus -inf would be NaN
      std::fill(s, s + a.cells, 0.0F);
      a.alpha[n] = 1;
      continue;
    }
    a.alpha[n] = std::exp(a.maximum[n] - peak);
    float sum = 0;
    for (int i = 0; i < a.cells; ++i) {
      s[i] = std::exp(s[i] - peak);
      sum += s[i];
    }
    a.sum[n] = a.sum[n] * a.alpha[n] + sum;
    a.maximum[n] = peak;
  }
}

void rescale(float* out, std::int64_t stride, int vectors, int rows, const float* alpha, const float* bias) {
  for (int n = 0; n < vectors; ++n) {
    for (int r = 0; r < rows; ++r) out[n * stride + r] = out[n * stride + r] * alpha[n] + bias[n];
  }
}

float dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void load_grid(const void* min, const void* max, DType type, const float* inverse, int n, float* middle, float* step) {
  for (int i = 0; i < n; ++i) {
    const float low = base::load_float(min, type, i);
    const float high = base::load_float(max, type, i);
    middle[i] = 0.5F * low + 0.5F * high;
    step[i] = (high - low) * inverse[i];
  }
}

void gather_lanes(const float* lanes, const std::uint16_t* order, int n, int vectors, float* to, std::int64_t stride) {
  for (int v = 0; v < vectors; ++v) {
    for (int i = 0; i < n; ++i) to[v * stride + i] = lanes[4 * order[i] + v];
  }
}

void widen(const void* from, DType type, float* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = base::load_float(from, type, i);
}

void narrow(const float* from, void* to, DType type, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) base::store_float(to, type, i, from[i]);
}

void min_max(const float* x, int n, float* min, float* max) {
  *min = *std::min_element(x, x + n);
  *max = *std::max_element(x, x + n);
}

void quantize(const float* x, int n, float min, float step, int levels, std::uint8_t* codes) {
  for (int i = 0; i < n; ++i) {
    const float code = step > 0 ? std::floor((x[i] - min) / step + 0.5F) : 0.0F;
    codes[i] = static_cast<std::uint8_t>(std::clamp(code, 0.0F, static_cast<float>(levels)));
  }
}

void dequantize(const std::uint8_t* codes, int n, float min, float step, float* x) {
  for (int i = 0; i < n; ++i) x[i] = min + static_cast<float>(codes[i]) * step;
}

double add_lanes(const double (&lane)[8]) {
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

LineSums line_sums(const std::uint8_t* codes, const float* x, int n) {
  LineSums sums;
  double value[8] = {};
  double product[8] = {};
  for (int i = 0; i < n; ++i) {
    sums.code += codes[i];
    sums.code_square += codes[i] * codes[i];
    value[i % 8] += static_cast<double>(x[i]);
    product[i % 8] += static_cast<double>(codes[i]) * static_cast<double>(x[i]);
  }
  sums.value = add_lanes(value);
  sums.product = add_lanes(product);
  return sums;
}

double grid_error(const std::uint8_t* codes, const float* x, int n, float min, float step) {
  double error[8] = {};
  for (int i = 0; i < n; ++i) {
    const float point = min + static_cast<float>(codes[i]) * step;
    const double difference = static_cast<double>(x[i]) - static_cast<double>(point);
    error[i % 8] += difference * difference;
  }
  return add_lanes(error);
}

void add_rows(const float* rows, std::int64_t stride, const float* factors, int count, int n, float* out) {
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < n; ++i) out[i] += factors[k] * rows[k * stride + i];
  }
}

void hadamard(float* x, int n, int block) {
  for (int half = 1; half < block; half *= 2) {
    for (int i = 0; i < n; ++i) {
      if ((i & half) != 0) continue;
      const float sum = x[i] + x[i + half];
      x[i + half] = x[i] - x[i + half];
      x[i] = sum;
    }
  }
}

template <std::size_t N>
double polynomial(double x, const double (&terms)[N]) {
  double sum = terms[N - 1];
  for (std::size_t i = N - 1; i-- > 0;) sum = sum * x + terms[i];
  return sum;
}

void sincos(const double* turns, int n, float* cosines, float* sines) {
  for (int i = 0; i < n; ++i) {
    const double rest = turns[i] - std::nearbyint(turns[i]);
    const double quarter = std::nearbyint(rest * 4);
    const double x = (rest - quarter * 0.25) * kTurn;
    const double sine = x * polynomial(x * x, kSineTerms);
    const double cosine = polynomial(x * x, kCosineTerms);
    const auto place = static_cast<int>(quarter) & 3;  // a quarter on: (cos, sin) becomes (-sin, cos)
    cosines[i] = static_cast<float>(place == 0 ? cosine : (place == 1 ? -sine : (place == 2 ? -cosine : sine)));
    sines[i] = static_cast<float>(place == 0 ? sine : (place == 1 ? cosine : (place == 2 ? -sine : -cosine)));
  }
}

void turn_tile(const TurnedTile& a) {
  const auto value = [&](int d, int row) {
    int code = 0;
    for (int k = 0; k < a.count; ++k) {
      const CodePlane& plane = a.planes[k];
      for_each_block(plane.bits, a.rows, plane.depth, [&](int first, int tiles, std::size_t offset) {
        const int tile = row / kLanes - first;
        if (tile < 0 || tile >= tiles) return;
        code |= code_at(plane.plane + offset, plane.bits, tiles, tile, row % kLanes, d) << plane.shift;
      });
    }
    return a.min[d] + a.step[d] * static_cast<float>(a.table[code]);
  };
  for (int row = 0; row < a.rows; ++row) {
    float* out = a.out + row;
    const TurnBlock& block = a.blocks[row / kLanes];
    for (int pair = 0; pair < a.pairs; ++pair) {
      const float c = block.lane_cosines[pair * kLanes + row % kLanes];
      const float s = block.lane_sines[pair * kLanes + row % kLanes];
      const float cosine = block.cosines[pair] * c - block.sines[pair] * s;
      const float sine = block.cosines[pair] * s + block.sines[pair] * c;
      const int first = pair * a.pair_step;
      const float x = value(first, row);
      const float y = value(first + a.pair_distance, row);
      out[first * a.out_stride] = x * cosine - y * sine;
      out[(first + a.pair_distance) * a.out_stride] = x * sine + y * cosine;
    }
    for (int d = 2 * a.pairs; d < a.depth; ++d) out[d * a.out_stride] = value(d, row);
  }
}

void pack_plane(const std::uint8_t* codes, std::int64_t code_stride, const std::uint16_t* index, int bits, int shift,
                int rows, int depth, std::byte* plane) {
  std::memset(plane, 0, plane_bytes(bits, rows, depth));
  for_each_block(bits, rows, depth, [&](int first, int tiles, std::size_t offset) {
    const int per_group = quads_per_group(bits, tiles);
    for (int d = 0; d < depth; ++d) {
      const std::uint8_t* row_codes = codes + (index != nullptr ? index[d] : d) * code_stride + first * kLanes;
      const int quad = d / kQuad;
      for (int row = 0; row < tiles * kLanes; ++row) {
        const int position = (quad % per_group) * tiles + row / kLanes;
        const int code = (row_codes[row] >> shift) & ((1 << bits) - 1);
        plane[offset + (quad / per_group) * kGroupBytes + (row % kLanes) * kQuad + d % kQuad] |=
            static_cast<std::byte>(code << (position * bits));
      }
    }
  });
}

void unpack_plane(const std::byte* plane, int bits, int shift, int rows, int depth, const std::uint16_t* index,
                  std::uint8_t* codes, std::int64_t code_stride) {
  for_each_block(bits, rows, depth, [&](int first, int tiles, std::size_t offset) {
    for (int d = 0; d < depth; ++d) {
      std::uint8_t* row_codes = codes + (index != nullptr ? index[d] : d) * code_stride + first * kLanes;
      for (int row = 0; row < tiles * kLanes; ++row) {
        row_codes[row] |= code_at(plane + offset, bits, tiles, row / kLanes, row % kLanes, d) << shift;
      }
    }
  });
}

}  // namespace

Kernels scalar_kernels() {
  Kernels k;
  k.name = "scalar";
  k.pack_x = pack_x;
  k.multiply_codes = multiply_codes;
  k.multiply_rows = multiply_rows;
  k.multiply_sparse = multiply_sparse;
  k.softmax = softmax;
  k.rescale = rescale;
  k.dot = dot;
  k.load_grid = load_grid;
  k.gather_lanes = gather_lanes;
  k.widen = widen;
  k.narrow = narrow;
  k.min_max = min_max;
  k.quantize = quantize;
  k.dequantize = dequantize;
  k.line_sums = line_sums;
  k.grid_error = grid_error;
  k.add_rows = add_rows;
  k.hadamard = hadamard;
  k.sincos = sincos;
  k.turn_tile = turn_tile;
  k.pack_plane = pack_plane;
  k.unpack_plane = unpack_plane;
  return k;
}

}  // namespace kvant::tiles
