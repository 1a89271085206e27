// The shared group quantizer on the reference's vectors.
#include "kvant/group_quant.hpp"

#include <gtest/gtest.h>

#include "kvant/error.hpp"
#include "reference/golden.hpp"

namespace kvant {
namespace {

using golden::Buffer;
using golden::Case;

void expect_quant_dequant(const Case& c) {
  const golden::Tensor& x = c.arg_tensor("x");
  Buffer out(DType::f16, x.shape);
  group_quant_dequant(x.array(), static_cast<int>(c.integer("b")), c.integer("group_size"), out.array());
  const auto& want = c.json.at("returns")[0];
  EXPECT_EQ(golden::difference(c.tensor_of(want), out, want.at("compare")), "") << c.id();
}

// What the reference does with widths outside 1..8 (NaN for 0, floats above 8) is refused here.
bool is_refused(const Case& c) {
  return c.integer("b") < 1 || c.integer("b") > 8 || c.integer("group_size") < 1;
}

TEST(GroupQuant, GoldenQuantDequant) {
  for (const Case& c : golden::cases_of("function", "_quant_utils._group_quant_dequant")) {
    if (is_refused(c)) {
      EXPECT_FALSE(c.must()) << c.id();
      EXPECT_THROW(expect_quant_dequant(c), Error) << c.id();
    } else {
      expect_quant_dequant(c);
    }
  }
  for (const Case& c : golden::cases_of("function", "_quant_utils._group_quant_dequant_batched")) {
    expect_quant_dequant(c);
  }
}

TEST(GroupQuant, GoldenErrors) {
  for (const Case& c : golden::cases_of("error", "_quant_utils._group_quant_dequant")) {
    const golden::Tensor& x = c.arg_tensor("x");
    Buffer out(DType::f16, x.shape);
    EXPECT_THROW(group_quant_dequant(x.array(), static_cast<int>(c.integer("b")), c.integer("group_size"), out.array()),
                 Error)
        << c.id();
  }
}

}  // namespace
}  // namespace kvant
