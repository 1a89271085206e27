// tiles: the online softmax of a page against fp64, with masks, soft cap, hidden rows and values that are not finite.
#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One vector's running softmax over several pages, as attention drives it.
struct Running {
  float maximum = kHidden;
  float sum = 0;
  std::vector<double> weights;  // of all cells so far, rescaled by the alphas

  void add(const tiles::Kernels& set, std::vector<float> scores, const std::vector<float>& mask, float slope,
           float softcap) {
    const float* row = mask.empty() ? nullptr : mask.data();
    float alpha = -1;
    set.softmax({scores.data(), static_cast<std::int64_t>(scores.size()), 1, static_cast<int>(scores.size()), &row,
                 &slope, softcap, &maximum, &sum, &alpha});
    for (double& weight : weights) weight *= alpha;
    weights.insert(weights.end(), scores.begin(), scores.end());
  }
};

// Final logits in fp64.
std::vector<double> logits_of(const std::vector<float>& scores, const std::vector<float>& mask, float slope,
                              float softcap) {
  std::vector<double> logits(scores.begin(), scores.end());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (softcap > 0) logits[i] = softcap * std::tanh(logits[i] / softcap);
    if (mask.empty()) continue;
    logits[i] = mask[i] == kHidden ? kHidden : logits[i] + static_cast<double>(slope) * mask[i];
  }
  return logits;
}

void expect_softmax(const Running& running, const std::vector<double>& logits) {
  const double peak = *std::max_element(logits.begin(), logits.end());
  ASSERT_NEAR(running.maximum, peak, 1e-5 * std::max(1.0, std::fabs(peak)));
  double total = 0;
  for (const double logit : logits) total += std::exp(logit - peak);
  ASSERT_NEAR(running.sum, total, 1e-5 * total);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_NEAR(running.weights[i], std::exp(logits[i] - peak), 1e-5) << i;
    if (logits[i] == kHidden) {
      ASSERT_EQ(running.weights[i], 0.0) << i;
    }
  }
}

struct Softmax : ::testing::TestWithParam<tiles::Kernels> {
  const tiles::Kernels& set = GetParam();
};

TEST_P(Softmax, PagesOfEveryLengthEqualFp64) {
  for (const float scale : {0.01F, 1.0F, 30.0F}) {
    for (const float softcap : {0.0F, 5.0F, 50.0F}) {
      for (const int cells : {16, 32, 112, 128, 256}) {
        Running running;
        std::vector<double> logits;
        for (std::uint32_t page = 0; page < 3; ++page) {
          const auto scores = testing::random_floats(static_cast<std::size_t>(cells), page + 1, scale);
          running.add(set, scores, {}, 1, softcap);
          const auto more = logits_of(scores, {}, 1, softcap);
          logits.insert(logits.end(), more.begin(), more.end());
          expect_softmax(running, logits);
        }
      }
    }
  }
}

TEST_P(Softmax, MasksAndSlopes) {
  for (const float slope : {1.0F, 0.25F}) {
    for (const float softcap : {0.0F, 3.0F}) {
      Running running;
      std::vector<double> logits;
      for (std::uint32_t page = 0; page < 4; ++page) {
        const auto scores = testing::random_floats(64, page + 1, 4.0F);
        auto mask = testing::random_floats(64, page + 20, 2.0F);
        for (std::size_t i = 0; i < mask.size(); i += 1 + page) mask[i] = kHidden;  // page 0: all of them
        running.add(set, scores, mask, slope, softcap);
        const auto more = logits_of(scores, mask, slope, softcap);
        logits.insert(logits.end(), more.begin(), more.end());
        if (page > 0) expect_softmax(running, logits);
      }
    }
  }
}

TEST_P(Softmax, NothingVisibleLeavesTheStateAlone) {
  const std::vector<float> hidden(32, kHidden);
  Running running;
  running.add(set, testing::random_floats(32, 1), hidden, 1, 0);
  EXPECT_EQ(running.maximum, kHidden);
  EXPECT_EQ(running.sum, 0.0F);
  for (const double weight : running.weights) EXPECT_EQ(weight, 0.0);
  running.add(set, std::vector<float>(32, 2.0F), {}, 1, 0);
  EXPECT_EQ(running.maximum, 2.0F);
  EXPECT_FLOAT_EQ(running.sum, 32.0F);
  const Running before = running;
  running.add(set, testing::random_floats(32, 1), hidden, 1, 0);
  EXPECT_EQ(running.maximum, before.maximum);
  EXPECT_EQ(running.sum, before.sum);
}

TEST_P(Softmax, HiddenCellsMayHoldAnything) {
  std::vector<float> scores = testing::random_floats(48, 3);
  std::vector<float> mask(48, 0.0F);
  std::vector<float> clean = scores;
  for (std::size_t i = 0; i < 48; i += 5) {
    mask[i] = kHidden;
    scores[i] = i % 2 == 0 ? kNan : std::numeric_limits<float>::infinity();
    clean[i] = 0;
  }
  for (const float softcap : {0.0F, 8.0F}) {
    Running a, b;
    a.add(set, scores, mask, 1, softcap);
    b.add(set, clean, mask, 1, softcap);
    EXPECT_EQ(a.weights, b.weights);
    EXPECT_EQ(a.sum, b.sum);
  }
}

// A NaN that is visible must not turn into a small weight or an empty row.
TEST_P(Softmax, VisibleNanReachesTheResult) {
  for (std::size_t at = 0; at < 32; ++at) {
    for (const float other : {1.0F, kNan}) {
      for (const float softcap : {0.0F, 8.0F}) {
        std::vector<float> scores(32, other);
        scores[at] = kNan;
        Running running;
        running.add(set, scores, {}, 1, softcap);
        ASSERT_TRUE(std::isnan(running.sum)) << at;
        running.add(set, std::vector<float>(32, 3.0F), {}, 1, softcap);
        ASSERT_TRUE(std::isnan(running.sum)) << at;
      }
    }
  }
}

TEST_P(Softmax, OnlyVisibleScoreIsNan) {
  for (std::size_t at = 0; at < 64; ++at) {
    std::vector<float> scores(64, 1.0F);
    std::vector<float> mask(64, kHidden);
    scores[at] = kNan;
    mask[at] = 0;
    Running running;
    running.add(set, scores, mask, 1, 0);
    ASSERT_TRUE(std::isnan(running.sum)) << at;
  }
}

TEST_P(Softmax, FarApartScoresUnderflowToZero) {
  std::vector<float> scores(16, -200000.0F);
  scores[4] = 4800.0F;
  Running running;
  running.add(set, scores, {}, 1, 0);
  EXPECT_FLOAT_EQ(running.sum, 1.0F);
  running.add(set, std::vector<float>(16, 9000.0F), {}, 1, 0);
  EXPECT_FLOAT_EQ(running.sum, 16.0F);
  EXPECT_EQ(running.weights[4], 0.0);
}

TEST_P(Softmax, Rescale) {
  for (const int rows : {16, 48, 80, 256}) {
    std::vector<float> out = testing::random_floats(static_cast<std::size_t>(3 * rows), 4);
    const std::vector<float> before = out;
    const float alpha[] = {0.5F, 1.0F, 0.0F};
    const float bias[] = {1.0F, -2.0F, 0.25F};
    set.rescale(out.data(), rows, 3, rows, alpha, bias);
    for (int i = 0; i < 3 * rows; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_FLOAT_EQ(out[at], before[at] * alpha[i / rows] + bias[i / rows]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernelSet, Softmax, ::testing::ValuesIn(testing::kernel_sets()),
                         testing::kernel_set_name);

}  // namespace
}  // namespace kvant
