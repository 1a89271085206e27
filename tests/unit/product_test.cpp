// tiles: products with codes against 64-bit integers, with rows against fp64, and the rounding of x.
#include <gtest/gtest.h>

#include <numeric>

#include "support/tile_data.hpp"

namespace kvant {
namespace {

using testing::Codes;
using testing::PackedX;
using testing::Plane;
using testing::scalar;

struct Product : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

// Integers up to the limit, the limit itself among them: with steps of 1 they are packed unchanged.
std::vector<float> random_integers(int vectors, int depth, bool wide, std::uint32_t seed) {
  const int limit = static_cast<int>(wide ? tiles::kWideMax : tiles::kNarrowMax);
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> uniform(-limit, limit);
  std::vector<float> v(static_cast<std::size_t>(vectors * depth));
  for (float& x : v) x = static_cast<float>(uniform(generator));
  for (int n = 0; n < vectors; ++n) {
    v[static_cast<std::size_t>(n * depth + n % depth)] = static_cast<float>(n % 2 == 0 ? limit : -limit);
  }
  return v;
}

// Integer sums over kSumDepth depth indices at a time, each turned into float once.
std::vector<float> int64_reference(const Codes& codes, const std::vector<float>& v, int vectors,
                                   const std::vector<float>& factor, float start) {
  std::vector<float> out(static_cast<std::size_t>(vectors * codes.stride));
  for (int n = 0; n < vectors; ++n) {
    for (int row = 0; row < codes.stride; ++row) {
      float& total = out[static_cast<std::size_t>(n * codes.stride + row)] = start;
      for (int first = 0; first < codes.depth; first += tiles::kSumDepth) {
        std::int64_t sum = 0;
        for (int d = first; d < std::min(first + tiles::kSumDepth, codes.depth); ++d) {
          sum += std::int64_t{codes.at(d, row)} *
                 static_cast<std::int64_t>(v[static_cast<std::size_t>(n * codes.depth + d)]);
        }
        const float product = factor[static_cast<std::size_t>(n)] * static_cast<float>(sum);
        total = total + product;
      }
    }
  }
  return out;
}

void check_product(const tiles::Kernels& set, const Codes& codes, int bits, const std::vector<float>& v, int vectors,
                   bool wide) {
  const std::vector<float> step(static_cast<std::size_t>(codes.depth), 1.0F);
  std::vector<float> factor;
  for (int n = 0; n < vectors; ++n) factor.push_back(0.37F * static_cast<float>(n - 2));
  const PackedX x = testing::pack_x(set, v, vectors, codes.depth, step, wide, 0);
  for (const float scale : x.scale) ASSERT_EQ(scale, 1.0F);
  Plane plane = testing::pack(set, codes, bits, 0);
  ASSERT_EQ(testing::multiply(set, plane, bits, codes.rows, codes.depth, x, vectors, wide, factor, 3.5F),
            int64_reference(codes, v, vectors, factor, 3.5F))
      << bits << " bits, " << codes.rows << " x " << codes.depth << ", " << vectors << " vectors, wide " << wide;
}

TEST_P(Product, CodesEqualIntegersForEveryShape) {
  for (const int bits : {1, 2, 4}) {
    for (const int rows : testing::kRowCounts) {
      for (const int depth : testing::kDepths) {
        const Codes codes = testing::random_codes(rows, depth, bits, static_cast<std::uint32_t>(rows + depth));
        const int vectors = 1 + (rows + depth) % 7;
        check_product(set, codes, bits, random_integers(vectors, depth, true, 1), vectors, true);
        check_product(set, codes, bits, random_integers(vectors, depth, false, 2), vectors, false);
      }
    }
  }
}

TEST_P(Product, CodesEqualIntegersForEveryVectorCount) {
  for (const int bits : {1, 2, 4}) {
    for (int vectors = 1; vectors <= 7; ++vectors) {
      for (const int rows : {16, 112}) {
        const Codes codes = testing::random_codes(rows, 44, bits, 3);
        check_product(set, codes, bits, random_integers(vectors, 44, true, 4), vectors, true);
        check_product(set, codes, bits, random_integers(vectors, 44, false, 5), vectors, false);
      }
    }
  }
}

// Blocks of prompt rows, and what is left over of 4, 8 and 16 vectors.
TEST_P(Product, ManyVectorsEqualIntegers) {
  for (const int vectors : {8, 9, 15, 16, 17, 31, 40, 96}) {
    for (const auto& [rows, depth] : {std::pair{64, 64}, std::pair{112, 44}, std::pair{128, 320}}) {
      const Codes codes = testing::random_codes(rows, depth, 4, static_cast<std::uint32_t>(vectors));
      for (const bool wide : {true, false}) {
        check_product(set, codes, 4, random_integers(vectors, depth, wide, 6), vectors, wide);
      }
    }
  }
}

// Inside and outside of a scope, which some sets need for speed only; scopes may be nested.
TEST_P(Product, ScopesChangeNothing) {
  const Codes codes = testing::random_codes(64, 64, 2, 1);
  const tiles::ProductScope outer(set);
  check_product(set, codes, 2, random_integers(5, 64, true, 2), 5, true);
  {
    const tiles::ProductScope inner(set);
    check_product(set, codes, 2, random_integers(5, 64, true, 2), 5, true);
  }
  check_product(set, codes, 2, random_integers(5, 64, true, 2), 5, true);
}

// Saturation and overflow: the largest codes and x of the longest depth there is.
TEST_P(Product, LargestSumsAreExact) {
  for (const int bits : {1, 2, 4}) {
    for (const bool wide : {true, false}) {
      for (const float sign : {1.0F, -1.0F}) {
        Codes codes{64, 1024, 64, {}};
        codes.data.assign(1024 * 64, static_cast<std::uint8_t>((1 << bits) - 1));
        const float limit = wide ? tiles::kWideMax : tiles::kNarrowMax;
        check_product(set, codes, bits, std::vector<float>(1024, sign * limit), 1, wide);
        std::vector<float> half(1024, sign * (wide ? 32384.0F : limit));  // low byte -128
        half[0] = sign * limit;
        check_product(set, codes, bits, half, 1, wide);
      }
    }
  }
}

// Codes that stand for the bytes of a table: the same product as with those bytes as codes.
TEST_P(Product, TablesReplaceCodesExactly) {
  for (const int width : {2, 3, 4}) {
    std::vector<std::uint8_t> table(tiles::kTableSize);
    for (int c = 1; c < 1 << width; ++c)
      table[static_cast<std::size_t>(c)] = static_cast<std::uint8_t>(255 - 13 * (c % 5) - c);
    for (const auto& [rows, depth] : {std::pair{64, 1024}, std::pair{3, 5}, std::pair{112, 44}, std::pair{128, 128}}) {
      Codes codes = testing::random_codes(rows, depth, width, static_cast<std::uint32_t>(rows + depth));
      std::vector<Plane> data;
      std::vector<tiles::CodePlane> planes;
      for (int shift = 0; shift < width;) {
        const int bits = width - shift >= 4 ? 4 : (width - shift >= 2 ? 2 : 1);
        data.push_back(testing::pack(set, codes, bits, shift));
        planes.push_back({data.back().data(), bits, shift, 0, depth});
        shift += bits;
      }
      const int vectors = 1 + depth % 6;
      for (const bool wide : {true, false}) {
        const std::vector<float> v = random_integers(vectors, depth, wide, 9);
        const std::vector<float> step(static_cast<std::size_t>(depth), 1.0F);
        const std::vector<float> factor(static_cast<std::size_t>(vectors), 0.37F);
        const PackedX x = testing::pack_x(set, v, vectors, depth, step, wide, 0);
        std::vector<float> out(static_cast<std::size_t>(vectors * codes.stride), 3.5F);
        tiles::CodeProduct product{planes.data(), static_cast<int>(planes.size()),
                                   rows,          x.words.data(),
                                   depth,         vectors,
                                   wide,          factor.data(),
                                   out.data(),    codes.stride};
        product.table = table.data();
        set.multiply_codes(product);
        Codes levels = codes;
        for (std::uint8_t& code : levels.data) code = table[code];
        ASSERT_EQ(out, int64_reference(levels, v, vectors, factor, 3.5F)) << width << " " << rows << "x" << depth;
      }
    }
  }
}

// A run of depth indices whose codes have `width` bits, and the planes that hold them: 4-bit planes at the top.
struct Segment {
  int first = 0;
  int depth = 0;
  int width = 0;
};

struct Planes {
  std::vector<Plane> data;
  std::vector<tiles::CodePlane> list;

  void add(const tiles::Kernels& set, const Codes& codes, int bits, int shift, int first, int depth) {
    std::vector<std::uint16_t> index(static_cast<std::size_t>(depth));
    std::iota(index.begin(), index.end(), static_cast<std::uint16_t>(first));
    data.push_back(testing::pack(set, codes, bits, shift, index));
    list.push_back({data.back().data(), bits, shift, first, depth});
  }
  void add(const tiles::Kernels& set, const Codes& codes, const Segment& run) {
    for (int left = run.width; left > 0;) {
      const int bits = left >= 4 ? 4 : (left >= 2 ? 2 : 1);
      left -= bits;
      add(set, codes, bits, left, run.first, run.depth);
    }
  }
};

// Random codes of each run's width, 0 outside of the runs.
Codes codes_of(int rows, int depth, const std::vector<Segment>& runs) {
  const Codes random = testing::random_codes(rows, depth, 8, static_cast<std::uint32_t>(rows * depth));
  Codes codes{rows, depth, random.stride, std::vector<std::uint8_t>(random.data.size())};
  for (const Segment& run : runs) {
    for (int i = run.first * codes.stride; i < (run.first + run.depth) * codes.stride; ++i) {
      codes.data[static_cast<std::size_t>(i)] = random.data[static_cast<std::size_t>(i)] & ((1 << run.width) - 1);
    }
  }
  return codes;
}

void check_planes(const tiles::Kernels& set, const Codes& codes, const Planes& planes, int vectors, bool wide) {
  const std::vector<float> v = random_integers(vectors, codes.depth, wide, 21);
  std::vector<float> factor;
  for (int n = 0; n < vectors; ++n) factor.push_back(0.37F * static_cast<float>(n - 2));
  const PackedX x = testing::pack_x(set, v, vectors, codes.depth,
                                    std::vector<float>(static_cast<std::size_t>(codes.depth), 1.0F), wide, 0);
  std::vector<float> out(static_cast<std::size_t>(vectors * codes.stride), 1.5F);
  set.multiply_codes({planes.list.data(),
                      static_cast<int>(planes.list.size()),
                      codes.rows,
                      x.words.data(),
                      codes.depth,
                      vectors,
                      wide,
                      factor.data(),
                      out.data(),
                      codes.stride,
                      tiles::Start::add,
                      nullptr,
                      nullptr,
                      {}});
  ASSERT_EQ(out, int64_reference(codes, v, vectors, factor, 1.5F))
      << codes.rows << " x " << codes.depth << ", " << vectors << " vectors, wide " << wide;
}

TEST_P(Product, PlanesOfEveryWidthAddUp) {
  for (int width = 1; width <= 8; ++width) {
    for (const int rows : {16, 48, 80, 112, 128, 256}) {
      for (const int depth : {5, 37, 64, 128, 256}) {
        SCOPED_TRACE(width);
        const Codes codes = codes_of(rows, depth, {{0, depth, width}});
        Planes planes;
        planes.add(set, codes, {0, depth, width});
        for (const bool wide : {true, false}) check_planes(set, codes, planes, 1 + (rows + depth + width) % 12, wide);
      }
    }
  }
}

TEST_P(Product, RunsOfDepthHaveTheirOwnWidths) {
  const std::vector<std::vector<Segment>> cases = {
      {{0, 4, 6}, {4, 12, 5}, {16, 20, 4}, {36, 28, 3}, {64, 40, 2}, {104, 24, 1}},
      {{0, 20, 3}, {20, 12, 4}, {32, 5, 2}},          // the last run ends inside a quad
      {{20, 12, 4}, {0, 20, 1}},                      // in any order
      {{8, 8, 2}, {40, 13, 7}},                       // indices that no plane covers
      {{0, 4, 8}, {4, 4, 1}, {8, 4, 8}, {12, 4, 1}},  // runs shorter than a group
  };
  for (const std::vector<Segment>& runs : cases) {
    const Segment& last =
        *std::max_element(runs.begin(), runs.end(), [](auto& a, auto& b) { return a.first < b.first; });
    for (const int rows : {16, 32, 48, 64, 112, 128}) {
      for (int vectors = 1; vectors <= 12; ++vectors) {
        const Codes codes = codes_of(rows, last.first + last.depth, runs);
        Planes planes;
        for (const Segment& run : runs) planes.add(set, codes, run);
        for (const bool wide : {true, false}) check_planes(set, codes, planes, vectors, wide);
      }
    }
  }
}

// Planes over prefixes, over the middle, and across the end of another: every way in which two can meet.
TEST_P(Product, PlanesMayOverlapInAnyWay) {
  for (const auto& [first, depth] : std::vector<std::pair<int, int>>{{0, 24}, {12, 16}, {28, 12}, {0, 40}}) {
    for (const int rows : {16, 80, 128}) {
      Codes codes = codes_of(rows, 40, {{0, 40, 6}});
      const int end = first + depth;
      // bits 0-1 on all indices, bits 2-5 on one part, bits 6-7 on a part that overlaps that one
      for (int d = 0; d < 40; ++d) {
        for (int row = 0; row < rows; ++row) {
          std::uint8_t& code = codes.data[static_cast<std::size_t>(d * codes.stride + row)];
          const int high = d >= 20 && d < 36 ? (code << 4) & 0xC0 : 0;
          code = static_cast<std::uint8_t>((d >= first && d < end ? code : code & 3) | high);
        }
      }
      for (const bool reversed : {false, true}) {
        Planes planes;
        planes.add(set, codes, 2, 0, 0, 40);
        planes.add(set, codes, 4, 2, first, depth);
        planes.add(set, codes, 2, 6, 20, 16);
        if (reversed) std::reverse(planes.list.begin(), planes.list.end());
        for (const bool wide : {true, false}) check_planes(set, codes, planes, 5, wide);
      }
    }
  }
}

// 8-bit codes and 16-bit x at their limits: sums of 256 depth indices reach 2^31 - 2^24, longer ones are split.
TEST_P(Product, LargestEightBitSumsAreExact) {
  for (const int depth : {256, 512, 1024}) {
    Codes codes{16, depth, 16, std::vector<std::uint8_t>(static_cast<std::size_t>(depth * 16), 255)};
    Planes planes;
    planes.add(set, codes, {0, depth, 8});
    for (const float sign : {1.0F, -1.0F}) {
      const std::vector<float> v(static_cast<std::size_t>(depth), sign * tiles::kWideMax);
      const PackedX x = testing::pack_x(set, v, 1, depth, std::vector<float>(v.size(), 1.0F), true, 0);
      std::vector<float> out(16, 0.0F);
      set.multiply_codes({planes.list.data(),
                          2,
                          16,
                          x.words.data(),
                          depth,
                          1,
                          true,
                          x.scale.data(),
                          out.data(),
                          16,
                          tiles::Start::add,
                          nullptr,
                          nullptr,
                          {}});
      for (const float sum : out) ASSERT_NEAR(sum, sign * 255.0 * 32639.0 * depth, 1024.0) << depth;
    }
  }
}

TEST_P(Product, XIsRoundedToNearestAndBiasHasMinimumAndError) {
  for (const bool wide : {true, false}) {
    for (const int depth : testing::kDepths) {
      const std::vector<float> v = testing::random_floats(static_cast<std::size_t>(3 * depth), 17);
      const std::vector<float> step = testing::random_floats(static_cast<std::size_t>(depth), 18);
      const PackedX x = testing::pack_x(set, v, 3, depth, step, wide, 1.5F);
      const std::vector<float> integers = testing::unpack_x(set, x, depth, 3, wide);
      ASSERT_EQ(integers,
                testing::unpack_x(scalar(), testing::pack_x(scalar(), v, 3, depth, step, wide, 1.5F), depth, 3, wide));
      for (int n = 0; n < 3; ++n) {
        const double scale = x.scale[static_cast<std::size_t>(n)];
        double error = 0, minimum = 0;
        for (int d = 0; d < depth; ++d) {
          const auto at = static_cast<std::size_t>(n * depth + d);
          const double exact = static_cast<double>(v[at]) * step[static_cast<std::size_t>(d)];
          ASSERT_LE(std::fabs(exact - scale * integers[at]), 0.501 * scale) << depth << " " << d;
          error += exact - scale * integers[at];
          minimum += v[at];
        }
        ASSERT_NEAR(x.bias[static_cast<std::size_t>(n)], minimum + 1.5 * error, 0.02 * scale + 1e-5) << depth;
      }
    }
  }
}

TEST_P(Product, ZeroAndTinyXStayFinite) {
  const std::vector<float> step(40, 0.5F);
  // Softmax weights of a page far below the maximum: the largest is small enough that limit / largest overflows.
  for (const float peak : {0.0F, 1e-45F, 1e-40F, 1e-37F, 1e-35F, 1e-33F, 1e-30F, 1e-20F}) {
    std::vector<float> v(40, 0.0F);
    v[7] = peak;
    v[9] = peak * 0.25F;
    for (const bool wide : {true, false}) {
      const PackedX x = testing::pack_x(set, v, 1, 40, step, wide, 7.5F);
      ASSERT_TRUE(std::isfinite(x.scale[0])) << peak;
      ASSERT_NEAR(x.bias[0], 1.25F * peak, peak * 1e-2F + 1e-37F) << peak;
      const Codes codes = testing::random_codes(32, 40, 4, 3);
      Plane plane = testing::pack(set, codes, 4, 0);
      for (const float out : testing::multiply(set, plane, 4, 32, 40, x, 1, wide, x.scale)) {
        ASSERT_TRUE(std::isfinite(out)) << peak;
        ASSERT_LE(std::fabs(out), peak * 16) << peak;
      }
    }
  }
}

TEST_P(Product, NanAndInfinityReachTheResult) {
  const std::vector<float> step(70, 1.0F);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const int at : {0, 3, 15, 16, 33, 69}) {
      std::vector<float> v = testing::random_floats(3 * 70, 5);
      v[static_cast<std::size_t>(70 + at)] = bad;  // the second of three vectors
      for (const bool wide : {true, false}) {
        const PackedX x = testing::pack_x(set, v, 3, 70, step, wide, 1.5F);
        Codes codes = testing::random_codes(48, 70, 2, 3);
        Plane plane = testing::pack(set, codes, 2, 0);
        const std::vector<float> out = testing::multiply(set, plane, 2, 48, 70, x, 3, wide, x.scale);
        for (int i = 0; i < 3 * 48; ++i) {
          ASSERT_EQ(std::isfinite(out[static_cast<std::size_t>(i)]), i / 48 != 1) << bad << " at " << at;
        }
      }
    }
  }
}

TEST_P(Product, RowsEqualFp64) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int rows : testing::kRowCounts) {
      for (const int depth : {1, 5, 64, 129}) {
        const int vectors = 1 + (rows + depth) % 7;
        const int padded = base::round_up(rows, 16);
        const std::vector<float> tile = testing::random_floats(static_cast<std::size_t>(depth * padded), 5);
        const std::vector<std::byte> bytes = testing::as_type(tile, type);
        const std::vector<float> v = testing::random_floats(static_cast<std::size_t>(vectors * depth), 6);
        std::vector<float> out(static_cast<std::size_t>(vectors * padded), 2.0F);
        set.multiply_rows({bytes.data(), type, padded, rows, depth, v.data(), depth, vectors, out.data(), padded, {}});
        for (int n = 0; n < vectors; ++n) {
          for (int row = 0; row < rows; ++row) {
            double sum = 2, magnitude = 2;
            for (int d = 0; d < depth; ++d) {
              const double x = base::load_float(bytes.data(), type, d * padded + row);
              const double term = x * v[static_cast<std::size_t>(n * depth + d)];
              sum += term;
              magnitude += std::fabs(term);
            }
            ASSERT_NEAR(out[static_cast<std::size_t>(n * padded + row)], sum, 2e-6 * magnitude) << rows << "x" << depth;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, Product, ::testing::ValuesIn(testing::product_sets()),
                         testing::kernel_set_name);

}  // namespace
}  // namespace kvant
