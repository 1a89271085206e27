// The KVQuant functions on the reference's vectors: every "must" and "close" case bit for bit, every "quirk" case as
// the table in src/methods/kvquant/README.md says.
#include <gtest/gtest.h>

#include "kvant/error.hpp"
#include "kvant/kvquant.hpp"
#include "reference/golden.hpp"

namespace kvant::kvquant {
namespace {

using golden::Buffer;
using golden::Case;
using golden::Json;
using golden::Tensor;

template <typename T>
Strided<T> grid(std::vector<std::byte>& bytes, const std::vector<std::int64_t>& shape) {
  bytes.resize(sizeof(T));
  Strided<T> result;
  result.rank = static_cast<int>(shape.size());
  for (std::size_t axis = 0; axis < shape.size(); ++axis) result.extent[axis] = shape[axis];
  result.stride = dense_strides(result.rank, result.extent);
  std::int64_t size = 1;
  for (const std::int64_t extent : shape) size *= extent;
  bytes.resize(static_cast<std::size_t>(size) * sizeof(T) + 1);
  result.data = reinterpret_cast<T*>(bytes.data());
  return result;
}

Strided<const std::int32_t> codes_of(const Tensor& tensor) {
  Strided<const std::int32_t> codes;
  codes.data = tensor.i32();
  codes.rank = static_cast<int>(tensor.shape.size());
  for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) codes.extent[axis] = tensor.shape[axis];
  codes.stride = dense_strides(codes.rank, codes.extent);
  return codes;
}

void expect_equal(const Case& c, const Json& want, const void* got) {
  EXPECT_EQ(golden::difference(c.tensor_of(want), got, want.at("compare")), "") << c.id();
}

void run_split(const Case& c, bool batched) {
  const Tensor& x = c.arg_tensor("x");
  std::vector<std::byte> inliers;
  std::vector<std::byte> mask;
  std::vector<std::byte> values;
  const auto split = [&](auto... out) {
    const double fraction = c.number("outlier_fraction");
    batched ? split_dense_sparse_batched(x.array(), fraction, out...) : split_dense_sparse(x.array(), fraction, out...);
  };
  split(grid<float>(inliers, x.shape), grid<bool>(mask, x.shape), grid<float>(values, x.shape));
  const Json& returns = c.json.at("returns");
  expect_equal(c, returns.at("inliers"), inliers.data());
  expect_equal(c, returns.at("outlier_mask"), mask.data());
  expect_equal(c, returns.at("outlier_vals"), values.data());
}

void run_fit(const Case& c, bool batched) {
  const Tensor& x = c.arg_tensor("x");
  std::vector<std::int64_t> shape = x.shape;
  const std::int64_t bits = c.integer("bits");
  shape[shape.size() - 2] = bits < 0 ? 1 : std::int64_t{1} << bits;
  std::vector<std::byte> levels;
  const Strided<float> out = grid<float>(levels, shape);
  batched ? fit_nuq_levels_batched(x.array(), bits, c.integer("n_iters"), out)
          : fit_nuq_levels(x.array(), bits, c.integer("n_iters"), out);
  expect_equal(c, c.json.at("returns")[0], levels.data());
}

void run_quantize(const Case& c, bool batched) {
  const Tensor& x = c.arg_tensor("x");
  std::vector<std::byte> codes;
  const Strided<std::int32_t> out = grid<std::int32_t>(codes, x.shape);
  batched ? quantize_nuq_batched(x.array(), c.arg_tensor("levels").array(), out)
          : quantize_nuq(x.array(), c.arg_tensor("levels").array(), out);
  expect_equal(c, c.json.at("returns")[0], codes.data());
}

void run_dequant(const Case& c, bool batched) {
  const Tensor& codes = c.arg_tensor("codes");
  Buffer out(DType::f16, codes.shape);
  batched ? dequant_nuq_batched(codes_of(codes), c.arg_tensor("levels").array(), out.array())
          : dequant_nuq(codes_of(codes), c.arg_tensor("levels").array(), out.array());
  expect_equal(c, c.json.at("returns")[0], out.bytes.data());
}

const std::vector<std::string> kErrorsToo = {"function", "error"};

// Runs the cases of a function: refused ones must be quirks and throw, all others must give the reference's bits.
template <typename Run, typename Refused>
int run_all(const std::string& name, const Run& run, const Refused& refused,
            const std::vector<std::string>& kinds = {"function"}) {
  int count = 0;
  for (const std::string& kind : kinds) {
    for (const Case& c : golden::cases_of(kind, "kvquant." + name)) {
      ++count;
      if (c.kind() == "error" || refused(c)) {
        EXPECT_FALSE(c.must()) << c.id();
        EXPECT_THROW(run(c), Error) << c.id();
      } else {
        run(c);
      }
    }
  }
  return count;
}

bool is_finite(const Tensor& tensor) {
  if (tensor.type != golden::Type::f32) return true;
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    if (!std::isfinite(tensor.f32()[i])) return false;
  }
  return true;
}

bool refuses_x(const Case& c) {
  return !is_finite(c.arg_tensor("x"));
}
bool refuses_fit(const Case& c) {
  return refuses_x(c) || c.integer("bits") < 1;
}
bool refuses_nothing(const Case&) {
  return false;
}

TEST(KvquantFunctions, GoldenSplit) {
  EXPECT_EQ(run_all(
                "split_dense_sparse", [](const Case& c) { run_split(c, false); }, refuses_x, kErrorsToo),
            20);
  EXPECT_EQ(run_all(
                "split_dense_sparse_batched", [](const Case& c) { run_split(c, true); }, refuses_x),
            1);
}

TEST(KvquantFunctions, GoldenFit) {
  EXPECT_EQ(run_all(
                "fit_nuq_levels", [](const Case& c) { run_fit(c, false); }, refuses_fit, kErrorsToo),
            21);
  EXPECT_EQ(run_all(
                "fit_nuq_levels_batched", [](const Case& c) { run_fit(c, true); }, refuses_fit, kErrorsToo),
            20);
}

TEST(KvquantFunctions, GoldenQuantize) {
  EXPECT_EQ(run_all(
                "quantize_nuq", [](const Case& c) { run_quantize(c, false); }, refuses_x),
            18);
  EXPECT_EQ(run_all(
                "quantize_nuq_batched", [](const Case& c) { run_quantize(c, true); }, refuses_x),
            18);
}

TEST(KvquantFunctions, GoldenDequant) {
  EXPECT_EQ(run_all(
                "dequant_nuq", [](const Case& c) { run_dequant(c, false); }, refuses_nothing),
            17);
  EXPECT_EQ(run_all(
                "dequant_nuq_batched", [](const Case& c) { run_dequant(c, true); }, refuses_nothing),
            16);
}

TEST(KvquantFunctions, GoldenRoundTrip) {
  const auto run = [](const Case& c) {
    const Tensor& x = c.arg_tensor("x");
    Buffer out(DType::f16, x.shape);
    nuq_quant_dequant(x.array(), c.integer("bits"), c.number("outlier_fraction"), c.integer("lloyd_iters"),
                      out.array());
    expect_equal(c, c.json.at("returns")[0], out.bytes.data());
  };
  EXPECT_EQ(run_all("nuq_quant_dequant", run, refuses_x), 5);
}

// Not to the bit: the reference squares with a power function.
TEST(KvquantFunctions, GoldenDistortion) {
  const auto run = [](const Case& c) {
    const double want = golden::to_number(c.json.at("returns")[0].at("value"));
    const double got = nuq_distortion(c.arg_tensor("x").array(), c.arg_tensor("levels").array());
    EXPECT_NEAR(got, want, 1e-6 * want) << c.id();
  };
  EXPECT_EQ(run_all("nuq_distortion", run, refuses_x), 16);
}

}  // namespace
}  // namespace kvant::kvquant
