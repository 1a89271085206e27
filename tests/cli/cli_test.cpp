// Units of the command that need no model: the GGUF reader under damage, recipe lists, parsers of the host's output.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cli/compare.hpp"
#include "cli/errors.hpp"
#include "cli/estimate.hpp"
#include "cli/gguf.hpp"
#include "cli/model.hpp"
#include "cli/recipes.hpp"
#include "cli/table.hpp"
#include "cli/tune.hpp"

namespace kvant::cli {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
void put(Bytes& image, const T& value) {
  const std::size_t at = image.size();
  image.resize(at + sizeof(T));
  std::memcpy(image.data() + at, &value, sizeof(T));
}

void put_text(Bytes& image, const std::string& text) {
  put(image, std::uint64_t{text.size()});
  for (const char c : text) image.push_back(static_cast<std::byte>(c));
}

void put_number(Bytes& image, const std::string& key, std::uint32_t value) {
  put_text(image, key);
  put(image, std::uint32_t{4});
  put(image, value);
}

Bytes small_model() {
  Bytes image;
  for (const char c : std::string("GGUF")) image.push_back(static_cast<std::byte>(c));
  put(image, std::uint32_t{3});
  put(image, std::uint64_t{0});
  put(image, std::uint64_t{5});
  put_text(image, "general.architecture");
  put(image, std::uint32_t{8});
  put_text(image, "llama");
  put_number(image, "llama.block_count", 2);
  put_number(image, "llama.embedding_length", 256);
  put_number(image, "llama.attention.head_count", 4);
  put_text(image, "llama.attention.head_count_kv");
  put(image, std::uint32_t{9});
  put(image, std::uint32_t{5});
  put(image, std::uint64_t{2});
  put(image, std::int32_t{1});
  put(image, std::int32_t{2});
  return image;
}

TEST(Gguf, ReadsArraysPerLayer) {
  const ModelShape model = model_shape(GgufMetadata::parse(small_model()));
  ASSERT_EQ(model.layers.size(), 2U);
  EXPECT_EQ(model.layers[0], (LayerShape{1, 64, 64, 0}));
  EXPECT_EQ(model.layers[1], (LayerShape{2, 64, 64, 0}));
}

TEST(Gguf, EveryPrefixIsRefused) {
  const Bytes whole = small_model();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const Bytes part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_THROW(GgufMetadata::parse(part), CliError) << length;
  }
}

// Damaged files are either read or refused with CliError; nothing else may happen (the sanitizers watch).
TEST(Gguf, DamageNeverEscapes) {
  std::mt19937 random(7);
  const Bytes whole = small_model();
  for (int round = 0; round < 20000; ++round) {
    Bytes image = whole;
    for (int flips = 0; flips < 3; ++flips) image[random() % image.size()] = static_cast<std::byte>(random());
    try {
      static_cast<void>(model_shape(GgufMetadata::parse(image)));
    } catch (const CliError& error) {
      EXPECT_NE(std::string(error.what()), "");
    }
  }
}

TEST(Recipes, CommaRule) {
  using List = std::vector<std::string>;
  EXPECT_EQ(split_recipes("f16,kivi:k=4,v=4,stock:q8_0"), (List{"f16", "kivi:k=4,v=4", "stock:q8_0"}));
  EXPECT_EQ(split_recipes("kivi:k=2,v=2,window=0;kitty"), (List{"kivi:k=2,v=2,window=0", "kitty"}));
  EXPECT_EQ(split_recipes("  kitty \n kivi , f16 ,"), (List{"kitty", "kivi", "f16"}));
  EXPECT_EQ(split_recipes("stock:q8_0/q4_0,kivi"), (List{"stock:q8_0/q4_0", "kivi"}));
  EXPECT_EQ(split_recipes("f16,k=kitty,v=kivi:4,sink=4"), (List{"f16", "k=kitty,v=kivi:4,sink=4"}));
  EXPECT_EQ(split_recipes("layers=0-1:kivi:k=8,v=8,3:f16,*:kitty,stock:q8_0"),
            (List{"layers=0-1:kivi:k=8,v=8,3:f16,*:kitty", "stock:q8_0"}));
  EXPECT_EQ(split_recipes(""), List{});
}

TEST(Recipes, RowsBeginWithTheBaseAndAreUnique) {
  const std::vector<RowSpec> rows = parse_rows({"kivi,stock:f16,kivi", "stock:q8_0/q4_0"});
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_TRUE(rows[0].stock());
  EXPECT_EQ(to_text(*rows[1].recipe).substr(0, 5), "kivi:");
  EXPECT_EQ(rows[2].key_type, "q8_0");
  EXPECT_EQ(rows[2].value_type, "q4_0");
  EXPECT_THROW(parse_rows({"kivi:k=4,v"}), CliError);
}

TEST(Recipes, DefaultRowsAreTheMethodsBetweenStockTypes) {
  // Of the methods, f16 is the base and waterfill is what the presets are.
  EXPECT_EQ(parse_rows({}).size(), presets().size() + methods().size() - 2 + 3);
  EXPECT_EQ(parse_recipe_lists({}).size(), presets().size() + methods().size() - 1);
}

constexpr const char* kStatistics =
    "Mean PPL(Q)                   :  20.187040 ±   1.305533\n"
    "Mean PPL(base)                :  19.411215 ±   1.268369\n"
    "Cor(ln(PPL(Q)), ln(PPL(base))):  99.30%\n"
    "Mean PPL(Q)/PPL(base)         :   1.039968 ±   0.008050\n"
    "Mean    KLD:   0.045855 ±   0.001959\n"
    "99.9%   KLD:   1.231980\n"
    "99.0%   KLD:   0.315110\n"
    "Same top p: 87.586 ± 0.729 %\n";

TEST(Compare, ReadsTheHostsStatistics) {
  const Quality quality = parse_kl_statistics(kStatistics);
  EXPECT_DOUBLE_EQ(quality.ppl, 20.187040);
  EXPECT_DOUBLE_EQ(quality.kld, 0.045855);
  EXPECT_DOUBLE_EQ(quality.kld_p99, 0.315110);
  EXPECT_DOUBLE_EQ(quality.same_top, 87.586);
  EXPECT_DOUBLE_EQ(parse_base_ppl(kStatistics), 19.411215);
  EXPECT_DOUBLE_EQ(parse_final_ppl("x\nFinal estimate: PPL = 19.4213 +/- 1.27005\n"), 19.4213);
}

TEST(Compare, MissingStatisticsAreAnError) {
  EXPECT_THROW(parse_kl_statistics("Mean PPL(Q): nothing"), CliError);
  EXPECT_THROW(parse_final_ppl(""), CliError);
}

TEST(Estimate, StockTypesAreTheirBits) {
  const ModelShape model = model_shape(GgufMetadata::parse(small_model()));
  const Estimate f16 = estimate_stock(model, "f16", "f16", 1024, 512);
  const Estimate mixed = estimate_stock(model, "q8_0", "q4_0", 1024, 512);
  EXPECT_EQ(f16.total(), 1024U * 3 * 128 * 2);
  EXPECT_DOUBLE_EQ(f16.bits(), 16);
  EXPECT_DOUBLE_EQ(mixed.bits(), 6.5);
}

TEST(Estimate, HeadsAreCountedInMoreThan32Bits) {
  ModelShape model;
  model.layers = {{1 << 16, 1 << 16, 1 << 16, 0}};
  model.numbers = {0};
  EXPECT_DOUBLE_EQ(estimate_stock(model, "f16", "f16", 1024, 512).bits_asymptotic, 16);
}

TEST(Estimate, ShortContextsAreAllOpen) {
  const ModelShape model = model_shape(GgufMetadata::parse(small_model()));
  const Estimate estimate = estimate_recipe(model, parse_layer_recipes("kivi"), 100, 512);
  EXPECT_EQ(estimate.sealed, 0U);
  EXPECT_GT(estimate.open, 0U);
}

TEST(Table, AlignsAndEscapesNothing) {
  Table table({"a", "b"});
  table.add({"long name", "1"});
  EXPECT_EQ(table.text(), "a          b\nlong name  1\n");
  EXPECT_EQ(table.markdown(), "| a | b |\n|---|---:|\n| long name | 1 |\n");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
}

// Three layers of different width and sensitivity: every assignment of rungs under the budget is tried.
TEST(Tune, GreedyAllocationIsCloseToTheBestOfAllAssignments) {
  ModelShape model;
  model.layers = {{2, 64, 64, 0}, {1, 64, 64, 0}, {2, 64, 64, 0}};
  model.numbers = {0, 1, 2};
  std::vector<Recipe> ladder = {parse_recipe("kivi:k=4,v=4"), parse_recipe("kivi:k=2,v=2"),
                                parse_recipe("kivi:k=3,v=3")};
  const RungCosts costs = rung_costs(model, ladder);
  EXPECT_EQ(ladder[0], parse_recipe("kivi:k=2,v=2"));  // sorted by cost
  const Sensitivity sensitivity{0.003, {0.1, 0.5, 0.01}, {0.6, 0.1, 0.02}};
  const auto error = [&](const std::vector<int>& rungs) {
    double sum = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      sum += (sensitivity.layer[i] - 0.003) * (sensitivity.rung[static_cast<std::size_t>(rungs[i])] - 0.003) / 0.597;
    }
    return sum;
  };
  for (const double budget : {2.375, 2.6, 2.9, 3.3, 3.9, 4.375, 16.0}) {
    const std::vector<int> chosen = allocate(costs, sensitivity, budget);
    EXPECT_LE(mean_bits(costs, chosen), budget);
    double best = 1e9;
    for (int code = 0; code < 27; ++code) {
      const std::vector<int> rungs = {code % 3, code / 3 % 3, code / 9};
      if (mean_bits(costs, rungs) <= budget) best = std::min(best, error(rungs));
    }
    EXPECT_LE(error(chosen), 1.25 * best + 1e-12) << budget;
  }
  EXPECT_EQ(best_uniform(costs, 3.5), (std::vector<int>{1, 1, 1}));
  EXPECT_THROW(best_uniform(costs, 2.3), CliError);
}

}  // namespace
}  // namespace kvant::cli
