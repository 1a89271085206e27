// Rows of the fault list that concern state: growing, trimming, reordering, forking, saving and starting again.
#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant {
namespace {

using testing::append;
using testing::filled;
using testing::make_rows;
using testing::Rows;

constexpr CacheShape kShape{2, 32, 24, DType::f16};
const char* const kRecipes[] = {"kivi:k=4,v=4,page=32,window=32", "kivi:k=2,v=2,page=32,window=32,sink=4",
                                "kitty:page=32,window=32,sink=0", "waterfill:page=32,window=32",
                                "kvquant:page=32,window=32",      "zipcache:page=32,window=32"};

Rows slice(const Rows& rows, std::int64_t first, std::int64_t count) {
  Rows part = rows;
  part.tokens = count;
  const auto cut = [&](std::vector<float>& all, int dim) {
    const std::int64_t row = std::int64_t{rows.shape.kv_heads} * dim;
    all = std::vector<float>(all.begin() + first * row, all.begin() + (first + count) * row);
  };
  cut(part.keys, rows.shape.key_dim);
  cut(part.values, rows.shape.value_dim);
  cut(part.queries, 2 * rows.shape.key_dim);
  return part;
}

// Attention of the last token by two query heads per KV head.
std::vector<float> answer(const Cache& cache) {
  return testing::attend(cache, testing::random_queries(1, 4, 32), 1, 4).out;
}

void expect_o1(const Cache& cache, std::int64_t rows = 1) {
  const auto queries = testing::random_queries(rows, 4, cache.shape().key_dim);
  const auto expected = testing::expected_from(cache.store(), cache.length(), queries, rows, 4,
                                               testing::causal_bias(4, cache.length(), rows, 0));
  const auto result = testing::attend(cache, queries, rows, 4);
  ASSERT_LT(testing::relative_error(result.out, expected.out), testing::kTolerance);
  for (std::size_t i = 0; i < result.lse.size(); ++i) ASSERT_NEAR(result.lse[i], expected.lse[i], 2e-3);
}

TEST(Faults, D29_D30_WindowFollowsThePositionNotTheCall) {
  const Rows rows = make_rows(kShape, 1064, 1);
  for (const char* recipe : kRecipes) {
    Cache cache(parse_recipe(recipe), kShape);
    append(cache, rows, 0, 64);
    for (std::int64_t t = 64; t < 1064; ++t) {
      append(cache, rows, t, 1);
      ASSERT_LE(cache.counts().open_pages * 32, 32 + 32 + 31) << t;  // window, the page it is in, the page being filled
    }
    ASSERT_TRUE(cache.save() == filled(recipe, rows).save());
  }
  const Rows forty = slice(rows, 0, 40);
  for (const std::vector<std::int64_t>& chunks :
       {std::vector<std::int64_t>{32, 8}, {7, 33}, std::vector<std::int64_t>(40, 1)}) {
    Cache cache(parse_recipe("kivi:page=32,window=0"), kShape);
    std::int64_t done = 0;
    for (const std::int64_t count : chunks) {
      append(cache, forty, done, count);
      done += count;
    }
    EXPECT_TRUE(cache.save() == filled("kivi:page=32,window=0", forty).save());
  }
}

// A batch has no code path of its own: each sequence stores what it stores alone (no padding, no neighbours).
TEST(Faults, D32_D43_D46_BatchesStoreWhatSequencesStoreAlone) {
  const std::vector<std::int64_t> lengths = {5, 64, 20};
  std::vector<Rows> prompts;
  for (std::size_t i = 0; i < 3; ++i) prompts.push_back(make_rows(kShape, lengths[i], static_cast<std::uint32_t>(i)));
  std::vector<std::vector<std::byte>> plain;
  for (const float scale : {1.0F, 100.0F}) {
    for (float& x : prompts[0].keys) x *= scale;
    std::vector<Cache> batch;
    for (const Rows& prompt : prompts) batch.push_back(filled("kivi:k=2,page=32,window=0", prompt));
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(batch[i].save() == filled("kivi:k=2,page=32,window=0", prompts[i]).save());
      if (scale == 1.0F) plain.push_back(batch[i].save());
      EXPECT_TRUE(i == 0 || batch[i].save() == plain[i]) << "request 0 changed request " << i;
    }
  }
}

TEST(Faults, D36_TrimBelowASealedGroup) {
  const Rows rows = make_rows(kShape, 100, 2);
  for (const char* recipe : kRecipes) {
    // Inside the window: as if the dropped tokens had never been there.
    Cache cache(parse_recipe(recipe), kShape);
    append(cache, rows, 0, 60);
    cache.trim(20);
    append(cache, rows, 70, 30);
    Cache fresh(parse_recipe(recipe), kShape);
    append(fresh, rows, 0, 40);
    append(fresh, rows, 70, 30);
    EXPECT_EQ(cache.length(), 70);
    EXPECT_TRUE(cache.save() == fresh.save()) << recipe;
    // Deeper: the survivors of a sealed page keep their decoded values, the rest is right.
    Cache deep = filled(recipe, rows);
    const auto decoded = testing::read_all(deep.store(), Side::key, 20);
    deep.trim(80);
    append(deep, rows, 20, 60);
    EXPECT_EQ(deep.length(), 80);
    const auto now = testing::read_all(deep.store(), Side::key, 20);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < now.size(); ++i) {
      error += (now[i] - decoded[i]) * (now[i] - decoded[i]);
      norm += decoded[i] * decoded[i];
    }
    EXPECT_LT(error, 0.05 * norm);
    expect_o1(deep, 5);
  }
}

TEST(Faults, D37_DraftsAreRolledBackInABatch) {
  std::mt19937 random(4);
  const std::vector<std::int64_t> lengths = {17, 31, 40};
  for (std::size_t row = 0; row < 3; ++row) {
    const Rows rows = make_rows(kShape, lengths[row] + 1000, static_cast<std::uint32_t>(row));
    Cache drafted(parse_recipe(kRecipes[0]), kShape);
    append(drafted, rows, 0, lengths[row]);
    std::int64_t length = lengths[row];
    for (int round = 0; round < 200; ++round) {
      append(drafted, rows, length, 4);
      const auto rejected = static_cast<std::int64_t>(random() % 4);
      drafted.trim(rejected);
      length += 4 - rejected;
      ASSERT_EQ(drafted.length(), length);
    }
    append(drafted, rows, length, 4);
    EXPECT_TRUE(drafted.save() == filled(kRecipes[0], slice(rows, 0, length + 4)).save());
    EXPECT_EQ(drafted.counts().reopens, 0) << "a rollback inside the window must not touch sealed pages";
  }
}

TEST(Faults, D38_CuttingToAPrefixFreesTheRest) {
  const Rows rows = make_rows(kShape, 253, 5);
  for (const char* recipe : kRecipes) {
    Cache cache = filled(recipe, rows);
    const auto before = cache.bytes();
    cache.trim(253 - 17);
    append(cache, rows, 17, 27);
    EXPECT_EQ(cache.length(), 44);
    EXPECT_LT(cache.bytes().sealed + cache.bytes().open, before.sealed + before.open);
    expect_o1(cache, 3);
  }
}

TEST(Faults, D41_D42_ReordersMoveWholeSequencesBitForBit) {
  for (const char* recipe : kRecipes) {
    std::vector<Cache> batch;
    std::vector<Rows> rows;
    for (std::uint32_t i = 0; i < 3; ++i) {
      rows.push_back(make_rows(kShape, 170, 10 + i));
      batch.push_back(filled(recipe, slice(rows.back(), 0, 100)));
    }
    std::vector<std::size_t> origin = {0, 1, 2};
    std::mt19937 random(6);
    for (int round = 0; round < 50; ++round) {
      const std::vector<std::int64_t> order =
          round == 0 ? std::vector<std::int64_t>{2, 0, 1}
                     : std::vector<std::int64_t>{static_cast<std::int64_t>(random() % 3), 1, 2};
      batch = gather(batch, order);
      origin = {origin[static_cast<std::size_t>(order[0])], origin[1], origin[2]};
      if (round == 0) origin = {2, 0, 1};
    }
    for (std::size_t i = 0; i < 3; ++i) {
      const Rows& own = rows[origin[i]];
      ASSERT_TRUE(batch[i].save() == filled(recipe, slice(own, 0, 100)).save());
      batch[i].trim(5);
      append(batch[i], own, 95, 75);
      ASSERT_TRUE(batch[i].save() == filled(recipe, own).save());  // both parts of the store were moved
    }
    const std::vector<std::int64_t> select = {1};
    EXPECT_TRUE(gather(batch, select).front().save() == batch[1].save());
  }
}

TEST(Faults, D44_DroppingARowMovesNobodysWritePosition) {
  std::vector<Cache> batch;
  std::vector<Rows> rows;
  for (std::uint32_t i = 0; i < 3; ++i) {
    rows.push_back(make_rows(kShape, 50 - 4 * std::int64_t{i}, 20 + i));
    batch.push_back(filled(kRecipes[0], slice(rows[i], 0, rows[i].tokens - 3)));
  }
  const std::vector<std::int64_t> keep = {1, 2};
  batch = gather(batch, keep);
  for (std::size_t i = 0; i < 2; ++i) {
    const Rows& own = rows[i + 1];
    append(batch[i], own, own.tokens - 3, 3);
    EXPECT_TRUE(batch[i].save() == filled(kRecipes[0], own).save());
  }
}

TEST(Faults, D48_D65_TheSameRequestTwiceIsTheSame) {
  const Rows a = make_rows(kShape, 300, 30);
  const Rows b = make_rows(kShape, 200, 31);
  for (const char* recipe : kRecipes) {
    Cache cache = filled(recipe, a);
    const auto image = cache.save();
    const auto cold = answer(cache);
    EXPECT_EQ(answer(cache), cold) << "reading changed something";
    // Prefix hit: another request starts from the first 256 tokens of the stored one.
    Cache warm = cache.fork();
    warm.trim(32);
    append(warm, a, 268, 32);
    EXPECT_TRUE(warm.save() == image);
    EXPECT_EQ(answer(warm), cold);
    // Another sequence in between.
    cache.clear();
    EXPECT_EQ(cache.length(), 0);
    append(cache, b, 0, 200);
    EXPECT_TRUE(cache.save() == filled(recipe, b).save());
    cache.clear();
    append(cache, a, 0, 300);
    EXPECT_TRUE(cache.save() == image);
    EXPECT_EQ(answer(cache), cold);
  }
}

TEST(Faults, D49_ForksThatOutliveTheirParentAreIndependent) {
  const Rows prompt = make_rows(kShape, 137, 40);
  for (const char* recipe : kRecipes) {
    std::vector<Cache> forks;
    {
      const Cache parent = filled(recipe, prompt);
      for (int i = 0; i < 3; ++i) forks.push_back(parent.fork());
    }
    for (std::uint32_t i = 0; i < 3; ++i) {
      const Rows tail = make_rows(kShape, 90, 41 + i);
      append(forks[i], tail, 0, 90);
      Cache alone = filled(recipe, prompt);
      append(alone, tail, 0, 90);
      EXPECT_TRUE(forks[i].save() == alone.save()) << recipe << " fork " << i;
      EXPECT_EQ(answer(forks[i]), answer(alone));
    }
  }
}

TEST(Faults, D53_ParametersTravelWithTheData) {
  for (const int page : {32, 64, 128, 256}) {
    const Rows rows = make_rows({1, 8, 8, DType::f16}, 300, 50);
    const std::string recipe = "kivi:k=3,v=5,window=0,page=" + std::to_string(page);
    const Cache loaded = Cache::load(filled(recipe, rows).save());
    EXPECT_EQ(loaded.recipe().page, page);
    EXPECT_EQ(loaded.recipe(), parse_recipe(recipe));
    expect_o1(loaded, 4);
  }
}

TEST(Faults, D71_LengthIsRightAfterEveryCall) {
  const Rows rows = make_rows(kShape, 79, 60);
  for (const char* recipe : kRecipes) {
    Cache cache = filled(recipe, slice(rows, 0, 70));
    EXPECT_EQ(cache.length(), 70);
    std::vector<std::vector<float>> answers;
    for (int round = 0; round < 3; ++round) {
      append(cache, rows, 70, 9);
      EXPECT_EQ(cache.length(), 79);
      answers.push_back(answer(cache));
      cache.trim(9);
      EXPECT_EQ(cache.length(), 70);
    }
    EXPECT_EQ(answers[0], answers[2]);
    EXPECT_EQ(answers[0], answers[1]);
  }
}

}  // namespace
}  // namespace kvant
