// Codes, planes and packed vectors for tests of the product kernels.
#pragma once

#include <random>
#include <vector>

#include "base/aligned.hpp"
#include "support/data.hpp"
#include "tiles/plane.hpp"

namespace kvant::testing {

// Codes of a tile as an encoder leaves them: [depth][stride] bytes, stride = rows padded to 16 with zeros.
struct Codes {
  int rows = 0;
  int depth = 0;
  int stride = 0;
  std::vector<std::uint8_t> data;

  std::uint8_t at(int d, int row) const { return data[static_cast<std::size_t>(d * stride + row)]; }
};

inline Codes random_codes(int rows, int depth, int width, std::uint32_t seed) {
  Codes codes{rows, depth, base::round_up(rows, tiles::kLanes), {}};
  codes.data.resize(static_cast<std::size_t>(depth * codes.stride));
  std::mt19937 generator(seed);
  for (int d = 0; d < depth; ++d) {
    for (int row = 0; row < rows; ++row) {
      codes.data[static_cast<std::size_t>(d * codes.stride + row)] =
          static_cast<std::uint8_t>(generator() & ((1U << width) - 1));
    }
  }
  return codes;
}

// An aligned buffer with a guard behind it; `intact` tells whether the guard was written.
class Plane {
 public:
  Plane(int bits, int rows, int depth)
      : size_(tiles::plane_bytes(bits, rows, depth)), bytes_(base::allocate_aligned(size_ + kGuard)) {
    std::memset(bytes_.get(), 0xA5, size_ + kGuard);
  }
  std::byte* data() { return bytes_.get(); }
  std::string text() const { return {reinterpret_cast<const char*>(bytes_.get()), size_}; }
  bool intact() const {
    return std::all_of(bytes_.get() + size_, bytes_.get() + size_ + kGuard,
                       [](std::byte b) { return b == std::byte{0xA5}; });
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_;
  base::AlignedBytes bytes_;
};

inline Plane pack(const tiles::Kernels& set, const Codes& codes, int bits, int shift,
                  const std::vector<std::uint16_t>& index = {}) {
  const int depth = index.empty() ? codes.depth : static_cast<int>(index.size());
  Plane plane(bits, codes.rows, depth);
  set.pack_plane(codes.data.data(), codes.stride, index.empty() ? nullptr : index.data(), bits, shift, codes.rows,
                 depth, plane.data());
  return plane;
}

// x = v * step as one kernel set packs it, with min 1 everywhere.
struct PackedX {
  std::vector<std::int32_t> words;
  std::vector<float> scale;
  std::vector<float> bias;
};

inline PackedX pack_x(const tiles::Kernels& set, const std::vector<float>& v, int vectors, int depth,
                      const std::vector<float>& step, bool wide, float mid) {
  const auto n = static_cast<std::size_t>(vectors);
  PackedX x{std::vector<std::int32_t>(tiles::packed_words(depth, vectors), 0x7E7E7E7E), std::vector<float>(n),
            std::vector<float>(n, 10.0F)};
  const std::vector<float> mids(static_cast<std::size_t>(base::round_up(depth, tiles::kDepthPad)), mid);
  std::vector<float> middles;
  for (int i = 0; i < depth; ++i) middles.push_back(1.0F + mid * step[static_cast<std::size_t>(i)]);
  tiles::PackArgs args;
  args.v = v.data();
  args.v_stride = depth;
  args.step = step.data();
  args.middle = middles.data();
  args.depth = depth;
  args.vectors = vectors;
  args.wide = wide;
  args.mid = mids.data();
  args.x = x.words.data();
  args.scale = x.scale.data();
  args.bias = x.bias.data();
  set.pack_x(args);
  return x;
}

// out[vector][padded row] after one multiply_codes over `start`.
inline std::vector<float> multiply(const tiles::Kernels& set, Plane& plane, int bits, int rows, int depth,
                                   const PackedX& x, int vectors, bool wide, const std::vector<float>& factor,
                                   float start = 0) {
  const int stride = base::round_up(rows, tiles::kLanes);
  std::vector<float> out(static_cast<std::size_t>(vectors * stride), start);
  const tiles::CodePlane whole{plane.data(), bits, 0, 0, depth};
  set.multiply_codes({&whole,
                      1,
                      rows,
                      x.words.data(),
                      depth,
                      vectors,
                      wide,
                      factor.data(),
                      out.data(),
                      stride,
                      tiles::Start::add,
                      nullptr,
                      nullptr,
                      {}});
  return out;
}

// The integers inside a packed x, read with a plane that holds the unit matrix: [vector][depth].
inline std::vector<float> unpack_x(const tiles::Kernels& set, const PackedX& x, int depth, int vectors, bool wide) {
  Codes unit{depth, depth, base::round_up(depth, tiles::kLanes), {}};
  unit.data.resize(static_cast<std::size_t>(depth * unit.stride));
  for (int d = 0; d < depth; ++d) unit.data[static_cast<std::size_t>(d * unit.stride + d)] = 1;
  Plane plane = pack(set, unit, 1, 0);
  const std::vector<float> ones(static_cast<std::size_t>(vectors), 1.0F);
  const std::vector<float> padded = multiply(set, plane, 1, depth, depth, x, vectors, wide, ones);
  std::vector<float> integers;
  for (int n = 0; n < vectors; ++n) {
    integers.insert(integers.end(), padded.begin() + n * unit.stride, padded.begin() + n * unit.stride + depth);
  }
  return integers;
}

constexpr int kRowCounts[] = {3, 16, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256};
constexpr int kDepths[] = {4, 5, 20, 40, 64, 80, 128, 256};

// About a third of the channels, in ascending order, at least one.
inline std::vector<std::uint16_t> some_channels(int depth, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<std::uint16_t> index;
  for (int d = 0; d < depth; ++d) {
    if (generator() % 3 == 0) index.push_back(static_cast<std::uint16_t>(d));
  }
  if (index.empty()) index.push_back(static_cast<std::uint16_t>(depth - 1));
  return index;
}

}  // namespace kvant::testing
