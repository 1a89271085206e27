// O1: attention from the codes against fp64 over the library's own decoded keys and values, for every kernel set.
#include <gtest/gtest.h>

#include "support/oracle.hpp"

namespace kvant {
namespace {

using testing::Case;
using testing::ForcedKernel;
using testing::o1_error;

// The recipes whose tiles differ in kind; widths are covered one by one below.
const char* const kRecipes[] = {"f16",
                                "kivi:k=2,v=2",
                                "kivi:k=3,v=3,sink=4,window=0",
                                "kivi:k=4,v=4,window=32",
                                "kitty:boost=0.25,window=0",
                                "kitty:selector=query,boost=0.2,window=0,page=64",
                                "waterfill:k=2.5,v=2,sink=4,window=0",
                                "waterfill:k=3,v=3,high=6,shared=1,window=32,page=64",
                                "waterfill:k=4,low=2,high=6,v=4,rotate=0,window=0,page=32",
                                "waterfill:feedback=1,window=0,sink=2,page=64",
                                "kvquant:window=0",
                                "kvquant:k=4,v=2,outliers=0,voutliers=0.1,window=32,page=32",
                                "k=kvquant:2,v=waterfill:3,sink=3,outliers=0.05,window=0,page=64",
                                "zipcache:window=0",
                                "zipcache:salient=0.3,high=7,low=3,vhigh=5,vlow=1,sink=9,window=20,page=32",
                                "k=zipcache,v=waterfill:3,shared=1,salient=0.05,window=0",
                                "k=waterfill:3,v=zipcache,sink=4,salient=0.9,window=0,page=64"};

bool can_store(const char* recipe, int key_dim) {
  return std::string(recipe).find("waterfill") == std::string::npos || key_dim % 4 == 0;
}

struct KernelAttention : ::testing::TestWithParam<std::string> {};

TEST_P(KernelAttention, HeadSizesAndRecipes) {
  const ForcedKernel forced(GetParam());
  for (const char* text : kRecipes) {
    for (const int dim : {64, 80, 96, 112, 128, 192, 256}) {
      const Case c{{2, dim, dim, DType::f16}, 3, 300, 1};
      EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text << " D=" << dim;
    }
  }
}

TEST_P(KernelAttention, KeyAndValueOfDifferentSize) {
  const ForcedKernel forced(GetParam());
  for (const char* text : kRecipes) {
    for (const auto& [key, value] : {std::pair{192, 128}, std::pair{64, 80}, std::pair{40, 72}, std::pair{5, 3}}) {
      if (!can_store(text, key)) continue;
      const Case c{{1, key, value, DType::f16}, 2, 280, 2};
      EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text << " " << key << "/" << value;
    }
  }
}

TEST_P(KernelAttention, EveryWidth) {
  const ForcedKernel forced(GetParam());
  for (int bits = 1; bits <= 8; ++bits) {
    const std::string text = "kivi:k=" + std::to_string(bits) + ",v=" + std::to_string(9 - bits) + ",window=0";
    const Case c{{2, 64, 64, DType::f16}, 4, 256, 3};
    EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text;
  }
}

TEST_P(KernelAttention, GroupsAndQueryRows) {
  const ForcedKernel forced(GetParam());
  for (const auto& [heads, group] :
       {std::pair{1, 1}, std::pair{3, 3}, std::pair{4, 7}, std::pair{1, 8}, std::pair{2, 16}}) {
    // The last one makes several blocks of query rows; the fp64 reference sets how many this test can afford.
    for (const std::int64_t rows : {1, 2, 8, heads * group > 9 ? 25 : 100}) {
      const Case c{{heads, 64, 64, DType::f16}, group, 300, rows};
      EXPECT_LT(o1_error(parse_recipe("kivi:k=2,v=2,window=0"), c), testing::kTolerance)
          << heads << "x" << group << " " << rows;
      EXPECT_LT(o1_error(parse_recipe("kitty:sink=5"), c), testing::kTolerance) << heads << "x" << group << " " << rows;
      for (const char* text : {"waterfill:sink=5,shared=1", "kvquant:sink=5"}) {
        EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text << heads << "x" << group << " " << rows;
      }
    }
  }
}

TEST_P(KernelAttention, LengthsAroundPagesAndSinks) {
  const ForcedKernel forced(GetParam());
  for (const std::int64_t tokens : {1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 384}) {
    for (const char* text : {"kivi:k=4,v=4,window=0", "kitty:window=16,sink=32", "kivi:page=32,k=2,window=0,sink=4",
                             "waterfill:window=16,sink=32", "kvquant:page=32,window=0,sink=31"}) {
      const Case c{{1, 64, 64, DType::f16}, 3, tokens, 1};
      EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text << " S=" << tokens;
    }
  }
}

TEST_P(KernelAttention, TypesOfRows) {
  const ForcedKernel forced(GetParam());
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const char* text : kRecipes) {
      const Case c{{2, 64, 64, dtype}, 3, 300, 20};
      EXPECT_LT(o1_error(parse_recipe(text), c), testing::kTolerance) << text << " " << name_of(dtype);
    }
  }
}

TEST_P(KernelAttention, SoftCapSinksAndWindows) {
  const ForcedKernel forced(GetParam());
  const std::vector<float> sinks = {0.5F, 3.0F, -2.0F, 8.0F};
  AttentionOptions options;
  options.softcap = 5.0F;
  options.sinks = sinks.data();
  options.scale = 0.3F;
  for (const std::int64_t window : {1, 20, 100, 200, 1000}) {
    options.sliding_window = window;
    const Case c{{2, 64, 64, DType::f16}, 2, 350, 70};
    EXPECT_LT(o1_error(parse_recipe("kivi:k=4,v=4,window=0"), c, options), testing::kTolerance) << window;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, KernelAttention, ::testing::ValuesIn(kernel_names()),
                         [](const auto& info) { return info.param; });

// An 8-bit x costs accuracy: 1.4e-2 with a flat softmax (design.md section 2), more with the loud channels used here.
TEST(Attention, EightBitX) {
  const Case c{{2, 128, 128, DType::f16}, 4, 512, 1};
  const double wide = o1_error(parse_recipe("kivi:k=2,v=2,window=0"), c);
  const double narrow = o1_error(parse_recipe("kivi:k=2,v=2,window=0,x=8"), c);
  EXPECT_LT(narrow, 6e-2);
  EXPECT_GT(narrow, wide * 4);
}

}  // namespace
}  // namespace kvant
