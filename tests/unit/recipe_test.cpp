// methods: the text form of recipes, its errors, and what the layouts of recipes cost.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "support/data.hpp"

namespace kvant {
namespace {

using testing::expect_error;

Recipe random_recipe(std::mt19937& random) {
  const auto pick = [&](auto... choices) {
    const int list[] = {choices...};
    return list[random() % sizeof...(choices)];
  };
  Recipe recipe = parse_recipe(std::array{"kivi", "kitty", "waterfill", "kvquant", "zipcache"}[random() % 5]);
  recipe.page = pick(32, 64, 128, 256);
  recipe.sink = static_cast<int>(random() % static_cast<unsigned>(recipe.page + 1));
  recipe.window = static_cast<int>(random() % 65537);
  recipe.x_bits = pick(8, 16);
  const int value_bits = 1 + static_cast<int>(random() % 8);
  if (auto* values = std::get_if<KiviValues>(&recipe.value)) values->bits = value_bits;
  if (auto* values = std::get_if<WaterfillValues>(&recipe.value)) {
    *values = {value_bits, pick(0, 1) != 0, pick(0, 1) != 0, pick(0, 1) != 0 ? Grid::range : Grid::least_squares};
  }
  if (auto* keys = std::get_if<WaterfillKeys>(&recipe.key)) {
    keys->low = pick(1, 2, 3);
    keys->high = keys->low + pick(0, 1, 2, 3);
    keys->bits = keys->low + (keys->high - keys->low) * (static_cast<double>(random()) / std::mt19937::max());
    keys->grid = pick(0, 1) != 0 ? Grid::range : Grid::least_squares;
    keys->feedback = pick(0, 1) != 0;
  }
  const auto share = [&] { return 0.1 * static_cast<double>(random()) / static_cast<double>(std::mt19937::max()); };
  if (auto* keys = std::get_if<KvquantKeys>(&recipe.key)) *keys = {pick(2, 3, 4), share(), false, pick(0, 1) != 0};
  if (auto* values = std::get_if<KvquantValues>(&recipe.value)) *values = {pick(2, 3, 4), share(), false};
  if (auto* values = std::get_if<ZipcacheValues>(&recipe.value)) {
    values->low = pick(1, 2, 3, 4);
    values->high = values->low + pick(1, 2, 3, 4);
    values->salient = (1 + static_cast<double>(random() % 98)) / 100;
    values->saliency = pick(0, 1) != 0 ? Saliency::norm : Saliency::attention;
    const int low = pick(1, 2, 3, 4);
    recipe.key = ZipcacheKeys{values->salient, values->saliency, low + pick(1, 2, 3, 4), low};
    if (pick(0, 1) != 0) recipe.key = KiviKeys();
  }
  if (auto* keys = std::get_if<KiviKeys>(&recipe.key)) keys->bits = 1 + static_cast<int>(random() % 8);
  if (auto* keys = std::get_if<KittyKeys>(&recipe.key)) {
    keys->boost = static_cast<double>(random()) / static_cast<double>(std::mt19937::max());
    keys->selector = static_cast<Selector>(random() % 4);
  }
  return recipe;
}

TEST(Recipe, RandomRecipesComeBackFromTheirText) {
  std::mt19937 random(20240601);
  for (int i = 0; i < 3000; ++i) {
    const Recipe recipe = random_recipe(random);
    const std::string text = to_text(recipe);
    ASSERT_EQ(parse_recipe(text), recipe) << text;
    ASSERT_EQ(to_text(parse_recipe(text)), text);
  }
}

TEST(Recipe, EveryKeyIsReadInAnyOrder) {
  const Recipe kivi = parse_recipe("kivi:x=8,page=64,window=7,sink=3,v=5,k=6");
  EXPECT_EQ(to_text(kivi), "kivi:k=6,v=5,sink=3,window=7,page=64,x=8");
  const Recipe kitty = parse_recipe("kitty:v=4,boost=0.125");
  EXPECT_EQ(std::get<KittyKeys>(kitty.key).boost, 0.125);
  EXPECT_EQ(std::get<KiviValues>(kitty.value).bits, 4);
  EXPECT_EQ(to_text(parse_recipe("kitty")), "kitty:boost=0.25,v=2,sink=32,window=128,page=128,x=16");
  EXPECT_EQ(parse_recipe("kitty:selector=magnitude"), parse_recipe("kitty"));
  EXPECT_EQ(to_text(parse_recipe("kitty:selector=range")),
            "kitty:boost=0.25,selector=range,v=2,sink=32,window=128,page=128,x=16");
  EXPECT_EQ(parse_recipe("waterfill:feedback=0"), parse_recipe("waterfill"));
  EXPECT_EQ(to_text(parse_recipe("small:feedback=1")),
            "waterfill:k=2.5,low=1,high=5,grid=ls,feedback=1,v=2,rotate=1,shared=0,vgrid=ls,sink=4,window=128,page=128,"
            "x=16");
  EXPECT_EQ(to_text(parse_recipe("f16")), "f16");
  EXPECT_FALSE(parse_recipe("f16").quantizes());
  EXPECT_TRUE(kivi.quantizes());
}

TEST(Recipe, SidesCombineFreely) {
  const Recipe recipe = parse_recipe("k=kitty,v=kivi:4,boost=0.125,sink=4");
  EXPECT_EQ(std::get<KittyKeys>(recipe.key).boost, 0.125);
  EXPECT_EQ(recipe.sink, 4);
  // Keys and values that one method names have that method's text.
  EXPECT_EQ(to_text(recipe), "kitty:boost=0.125,v=4,sink=4,window=128,page=128,x=16");
  EXPECT_EQ(to_text(parse_recipe("v=kivi:3,k=kivi:2")), "kivi:k=2,v=3,sink=0,window=128,page=128,x=16");
  EXPECT_EQ(to_text(parse_recipe("k=f16,v=f16")), "f16");
}

TEST(Recipe, KeysBeforeRopeSayWhatThatCosts) {
  EXPECT_EQ(to_text(parse_recipe("kvquant:rope=before,k=2,outliers=0.02")),
            "kvquant:k=2,outliers=0.02,rope=before,v=3,voutliers=0.01,sink=1,window=128,page=128,x=16");
  EXPECT_EQ(parse_recipe("kvquant:rope=after"), parse_recipe("kvquant"));
  EXPECT_TRUE(std::get<KvquantKeys>(parse_recipe("k=kvquant:2,v=kivi:4,rope=before").key).before_rope);
  EXPECT_NE(remark(parse_recipe("kvquant:rope=before")).find("float32, of pages decoded and rotated; kvquant is not"),
            std::string::npos);
  EXPECT_EQ(remark(parse_recipe("kvquant")).find("RoPE"), std::string::npos);
}

TEST(Recipe, BothSidesOfZipcacheShareTheirClasses) {
  EXPECT_EQ(to_text(parse_recipe("zipcache")),
            "zipcache:salient=0.6,saliency=attention,high=4,low=2,vhigh=4,vlow=2,sink=0,window=100,page=128,x=16");
  const Recipe both = parse_recipe("zipcache:salient=0.4,saliency=norm,high=3,low=1,vhigh=5");
  EXPECT_EQ(std::get<ZipcacheKeys>(both.key), (ZipcacheKeys{0.4, Saliency::norm, 3, 1}));
  EXPECT_EQ(std::get<ZipcacheValues>(both.value), (ZipcacheValues{0.4, Saliency::norm, 5, 2}));
  EXPECT_EQ(parse_recipe("k=zipcache,v=zipcache,salient=0.4,saliency=norm,high=3,low=1,vhigh=5,window=100"), both);
  EXPECT_EQ(to_text(parse_recipe("k=zipcache,v=kivi:3,salient=0.25")),
            "k=zipcache,v=kivi:3,salient=0.25,saliency=attention,high=4,low=2,sink=0,window=128,page=128,x=16");
  // `low` and `high` are those of the keys, whatever they are.
  EXPECT_EQ(
      to_text(parse_recipe("k=waterfill:3,v=zipcache,low=2,high=4,vlow=1")),
      "k=waterfill:3,v=zipcache,low=2,high=4,grid=ls,salient=0.6,saliency=attention,vhigh=4,vlow=1,sink=0,window=128,"
      "page=128,x=16");
  Recipe apart = both;
  std::get<ZipcacheKeys>(apart.key).salient = 0.5;
  expect_error(ErrorCode::invalid_argument, {"salient", "one set"}, [&] { validate(apart); });
  expect_error(ErrorCode::invalid_argument, {"salient", "'0'", "above 0"}, [] { parse_recipe("zipcache:salient=0"); });
  expect_error(ErrorCode::invalid_argument, {"salient", "'1'"}, [] { parse_recipe("k=kivi,v=zipcache,salient=1"); });
  expect_error(ErrorCode::invalid_argument, {"saliency", "'random'", "norm"},
               [] { parse_recipe("zipcache:saliency=random"); });
  expect_error(ErrorCode::invalid_argument, {"high", "'2'", "3 to 6"}, [] { parse_recipe("zipcache:high=2"); });
  expect_error(ErrorCode::invalid_argument, {"vlow", "'5'"}, [] { parse_recipe("zipcache:vlow=5"); });
}

TEST(Recipe, PresetsAreRecipesThatOptionsMayChange) {
  std::vector<std::string> names;
  for (const PresetInfo& preset : presets()) {
    names.push_back(preset.name);
    EXPECT_EQ(to_text(parse_recipe(preset.name)), preset.recipe);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"small", "balanced", "near-lossless"}));
  Recipe changed = parse_recipe("small");
  changed.sink = 0;
  std::get<WaterfillKeys>(changed.key).bits = 2.25;
  EXPECT_EQ(parse_recipe("small:sink=0,k=2.25"), changed);
  EXPECT_NO_THROW(parse_recipe(kDefaultRecipe));
}

TEST(Recipe, LayersHaveTheirOwnRecipes) {
  const LayerRecipes layers = parse_layer_recipes("layers=0-1:kivi:k=8,sink=4,3:f16,*:kitty:boost=0.5");
  ASSERT_EQ(layers.rules.size(), 3U);
  EXPECT_EQ(layers.at(0), parse_recipe("kivi:k=8,sink=4"));
  EXPECT_EQ(layers.at(1), layers.at(0));
  EXPECT_EQ(layers.at(2), parse_recipe("kitty:boost=0.5"));
  EXPECT_EQ(layers.at(3), parse_recipe("f16"));
  EXPECT_EQ(layers.at(9999), layers.at(2));
  EXPECT_EQ(parse_layer_recipes(to_text(layers)), layers);
  const LayerRecipes same = parse_layer_recipes("kivi:k=3");
  EXPECT_EQ(to_text(same), to_text(parse_recipe("kivi:k=3")));
  EXPECT_EQ(same.at(7), parse_recipe("kivi:k=3"));
  expect_error(ErrorCode::out_of_range, {"layer 3"}, [] { static_cast<void>(LayerRecipes{{{0, 2, Recipe()}}}.at(3)); });
}

TEST(Recipe, BadLayersAreNamedInTheError) {
  struct Bad {
    const char* text;
    std::vector<std::string> parts;
  };
  const Bad cases[] = {
      {"layers=", {"*:RECIPE"}},
      {"layers=0-1:kivi", {"*:RECIPE"}},
      {"layers=kivi", {"'kivi'", "N-M:RECIPE"}},
      {"layers=*", {"'*'", "N-M:RECIPE"}},
      {"layers=3-1:kivi,*:kivi", {"'layers'", "'1'", "3 to 9999"}},
      {"layers=-1:kivi,*:kivi", {"'-1:kivi'"}},
      {"layers=10000:kivi,*:kivi", {"'10000'"}},
      {"layers=1x:kivi,*:kivi", {"'1x'"}},
      {"layers=1:kiwi,*:kivi", {"'kiwi'"}},
      {"layers=1:,*:kivi", {"recipe ''"}},
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(bad.text);
    expect_error(ErrorCode::invalid_argument, bad.parts, [&] { parse_layer_recipes(bad.text); });
  }
}

TEST(Recipe, MethodsAreListedWithTheirDefaults) {
  std::vector<std::string> names;
  for (const MethodInfo& info : methods()) {
    names.push_back(info.name);
    EXPECT_EQ(to_text(parse_recipe(info.name)), info.default_recipe);
    EXPECT_FALSE(info.summary.empty());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"f16", "kivi", "kitty", "waterfill", "kvquant", "zipcache"}));
}

TEST(Recipe, BadTextIsNamedInTheError) {
  struct Bad {
    const char* text;
    std::vector<std::string> parts;
  };
  const Bad cases[] = {
      {"", {"recipe ''", "kivi", "kitty", "f16", "balanced"}},
      {"kiwi", {"'kiwi'", "kivi"}},
      {"Kivi", {"'Kivi'"}},
      {" kivi", {"' kivi'"}},
      {"kivi:", {"''", "key=value"}},
      {"kivi:k", {"'k'", "key=value"}},
      {"kivi:k=4,", {"''", "key=value"}},
      {"kivi:,k=4", {"''", "key=value"}},
      {"kivi:boost=0.5", {"'boost'", "kivi", "k, v, sink, window, page, x"}},
      {"kitty:k=4", {"'k'", "kitty", "boost"}},
      {"f16:k=4", {"'k'", "f16", "none"}},
      {"kivi:k=0", {"'k'", "'0'", "1 to 8"}},
      {"kivi:k=9", {"'k'", "'9'", "1 to 8"}},
      {"kivi:v=-1", {"'v'", "'-1'", "1 to 8"}},
      {"kivi:k=4.0", {"'k'", "'4.0'"}},
      {"kivi:k=", {"'k'", "''"}},
      {"kivi:k= 4", {"'k'", "' 4'"}},
      {"kivi:k=+4", {"'k'", "'+4'"}},
      {"kivi:k=99999999999999999999", {"'k'", "99999999999999999999"}},
      {"kivi:k=4=4", {"'k'", "'4=4'"}},
      {"kivi:k=4,k=4", {"'k'", "twice"}},
      {"kvquant:k=5", {"'k'", "'5'", "2 to 4"}},
      {"kvquant:v=1", {"'v'", "'1'", "2 to 4"}},
      {"kvquant:rope=between", {"'rope'", "'between'", "before or after"}},
      {"kivi:rope=before", {"'rope'", "kivi"}},
      {"k=kivi,v=kvquant,rope=before", {"'rope'"}},
      {"kvquant:outliers=0.2", {"'outliers'", "'0.2'", "0 to 0.1"}},
      {"kvquant:voutliers=-1", {"'voutliers'", "'-1'", "0 to 0.1"}},
      {"k=kvquant:3,v=kivi:4,voutliers=0", {"'voutliers'", "outliers"}},
      {"kivi:sink=129", {"'sink'", "129", "page (128)"}},
      {"kivi:sink=64,page=32", {"'sink'", "page (32)"}},
      {"kivi:window=65537", {"'window'", "65537", "65536"}},
      {"kivi:window=-1", {"'window'", "-1"}},
      {"kivi:page=96", {"'page'", "'96'", "32, 64, 128, 256"}},
      {"kivi:page=0", {"'page'", "'0'"}},
      {"kivi:x=12", {"'x'", "'12'", "8, 16"}},
      {"waterfill:feedback=2", {"'feedback'", "'2'", "0 to 1"}},
      {"k=kivi:4,v=waterfill:4,feedback=1", {"'feedback'", "rotate"}},
      {"kitty:selector=loudness", {"'selector'", "'loudness'", "variance", "query"}},
      {"kitty:boost=1.5", {"'boost'", "1.5", "0 to 1"}},
      {"kitty:boost=-0.1", {"'boost'", "-0.1"}},
      {"kitty:boost=nan", {"'boost'", "nan"}},
      {"kitty:boost=inf", {"'boost'", "inf"}},
      {"kitty:boost=0.25x", {"'boost'", "0.25x"}},
      {"k=kivi:4", {"v=METHOD"}},
      {"v=kivi", {"k=METHOD"}},
      {"k=kiwi,v=kivi", {"'k'", "'kiwi'", "f16, kivi, kitty"}},
      {"k=kivi,v=kitty", {"'v'", "'kitty'", "f16, kivi"}},
      {"k=kitty:2,v=kivi", {"'k'", "'kitty:2'", "without bits"}},
      {"k=kivi:,v=kivi", {"'k'", "''"}},
      {"k=kivi,v=kivi,boost=1", {"'boost'", "k, v, sink"}},
      {"k=f16,v=kivi", {"f16 on one side"}},
      {"k=f16,v=f16,sink=1", {"'sink'", "none"}},
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(bad.text);
    expect_error(ErrorCode::invalid_argument, bad.parts, [&] { parse_recipe(bad.text); });
  }
}

// The fuzzer's job in small, for compilers without libFuzzer: damaged text is refused or is a recipe.
TEST(Recipe, DamagedTextIsRefusedOrSurvivesItsTextForm) {
  const std::string letters = "kvitysnkwdopagexbf=:,.0123456789-+e ";
  std::mt19937 random(99);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = to_text(random_recipe(random));
    for (unsigned n = 0; n <= random() % 3; ++n) {
      const auto at = static_cast<std::ptrdiff_t>(random() % text.size());
      const char letter = letters[random() % letters.size()];
      if (random() % 3 == 0) {
        text.insert(text.begin() + at, letter);
      } else if (random() % 2 == 0 && text.size() > 1) {
        text.erase(text.begin() + at);
      } else {
        text[static_cast<std::size_t>(at)] = letter;
      }
    }
    try {
      const Recipe recipe = parse_recipe(text);
      ASSERT_EQ(parse_recipe(to_text(recipe)), recipe) << text;
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::invalid_argument) << text;
    }
  }
  EXPECT_GT(accepted, 800);
}

TEST(Recipe, StructsAreValidatedWhereverTheyEnter) {
  const auto with = [](auto change) {
    Recipe recipe;
    change(recipe);
    return recipe;
  };
  const Recipe bad[] = {with([](Recipe& r) { r.key = KiviKeys{0}; }),
                        with([](Recipe& r) { r.key = KittyKeys{1.5}; }),
                        with([](Recipe& r) { r.value = KiviValues{9}; }),
                        with([](Recipe& r) { r.key = F16Keys(); }),
                        with([](Recipe& r) { r.value = F16Values(); }),
                        with([](Recipe& r) { r.sink = -1; }),
                        with([](Recipe& r) { r.sink = 129; }),
                        with([](Recipe& r) { r.window = -1; }),
                        with([](Recipe& r) { r.page = 100; }),
                        with([](Recipe& r) { r.x_bits = 4; })};
  for (const Recipe& recipe : bad) {
    expect_error(ErrorCode::invalid_argument, {}, [&] { validate(recipe); });
    expect_error(ErrorCode::invalid_argument, {}, [&] { to_text(recipe); });
    expect_error(ErrorCode::invalid_argument, {}, [&] { make_layout(recipe, CacheShape{}); });
    expect_error(ErrorCode::invalid_argument, {}, [&] { PageStore(recipe, CacheShape{}, 128); });
    expect_error(ErrorCode::invalid_argument, {}, [&] { Cache(recipe, CacheShape{}); });
  }
  Recipe kitty = parse_recipe("kitty");
  std::get<KittyKeys>(kitty.key).boost = std::numeric_limits<double>::quiet_NaN();
  expect_error(ErrorCode::invalid_argument, {"boost"}, [&] { validate(kitty); });
}

TEST(Layout, ShapesOutsideTheirRangeAreNamed) {
  const auto refused = [](const char* name, CacheShape shape) {
    expect_error(ErrorCode::invalid_argument, {name, "1 to 1024"}, [&] { make_layout(Recipe(), shape); });
  };
  for (const int bad : {0, -1, 1025}) {
    refused("kv_heads", {bad, 64, 64, DType::f16});
    refused("key_dim", {1, bad, 64, DType::f16});
    refused("value_dim", {1, 64, bad, DType::f16});
  }
}

// By hand: codes K + endpoints K + codes V + endpoints V, over the values of a page.
TEST(Layout, BitsPerValueEqualHandComputedFigures) {
  struct Figure {
    const char* recipe;
    int dim;
    double bits;
  };
  const Figure figures[] = {
      {"kivi:k=2,v=2", 128, 2.25},                    // 2 + 32/128 both sides
      {"kivi:k=4,v=4", 128, 4.25},                    //
      {"kivi:k=4,v=4", 64, 4.375},                    // keys 4 + 32/128, values 4 + 32/64
      {"kivi:k=2,v=2", 64, 2.375},                    //
      {"kivi:k=8,v=8", 128, 8.25},                    //
      {"kivi:k=3,v=3", 128, 3.25},                    // 3 = 2 + 1
      {"kivi:k=2,v=4", 128, 3.25},                    //
      {"kivi:k=2,v=2,page=32", 128, 2 + 0.5 * 1.25},  // keys 32/32, values 32/128
      {"kitty:boost=0.25,v=2", 128, 2.53125},         // keys 2 + 2/4 + 32/128 + 8/128 for the order; values 2.25
      {"kitty:boost=0,v=2", 128, 2.25},               //
      {"kitty:boost=1,v=4", 128, 4.25},               // no list: every channel is boosted
      // Keys k + 32/128 + 8/128 for the order + 12 bytes of counts, up to whole 64 bytes; values v + 32/128, or +
      // 32/256 over the two heads.
      {"waterfill:k=2.5,v=2", 128, 8.0 * (5824 + 4608) / (128 * 256)},
      {"waterfill:k=2.5,v=2", 64, 8.0 * (2944 + 2560) / (128 * 128)},
      {"waterfill:k=3,v=3,shared=1", 128, 8.0 * (2 * (6848 + 6144) + 512) / (2 * 128 * 256)},
      // A head: 77 salient tokens in 80 rows of 4 bits and 51 in 64 of 2, two grids of 128 channels; values 128 x 2
      // bits and 80 x 2 more, 128 factors; the order. Then the grid of 128 tokens over both heads.
      {"zipcache", 128, 8.0 * (2 * (5120 + 512 + 2048 + 512 + 4096 + 2560 + 256 + 128) + 512) / (2 * 128 * 256)},
      {"zipcache:salient=0.625", 128,
       8.0 * (2 * (5120 + 512 + 1536 + 512 + 4096 + 2560 + 256 + 128) + 512) / (2 * 128 * 256)},
      {"f16", 128, 16},
  };
  for (const Figure& figure : figures) {
    const PageLayout layout = make_layout(parse_recipe(figure.recipe), {2, figure.dim, figure.dim, DType::f16});
    EXPECT_NEAR(layout.bits_per_value, figure.bits, 1e-12) << figure.recipe << " D=" << figure.dim;
  }
  const PageLayout wide = make_layout(parse_recipe("kivi:k=4,v=4"), {1, 128, 128, DType::f32});
  EXPECT_NEAR(wide.bits_per_value, 4.5, 1e-12);  // endpoints of 32 bits
}

TEST(Layout, EverythingInsideAPageIsAlignedAndApart) {
  for (const char* text :
       {"kivi:k=3,v=5", "kitty:boost=0.1,v=3", "kitty:boost=0.3,page=32", "kivi:k=7,v=1,page=256",
        "waterfill:k=3,v=3,shared=1", "waterfill:page=32", "zipcache", "k=zipcache,v=kivi,page=32"}) {
    for (const DType dtype : {DType::f16, DType::f32}) {
      for (const int dim : {1, 5, 40, 72, 80, 128, 1017}) {
        if (std::string(text).starts_with("waterfill") && dim % 4 != 0) continue;
        const PageLayout layout = make_layout(parse_recipe(text), {3, dim, dim + 7, dtype});
        std::vector<std::pair<std::size_t, std::size_t>> spans;  // offset, bytes
        for (const TileLayout* tile : {&layout.key, &layout.key_rest, &layout.value}) {
          for (const PlaneLayout& plane : tile->planes) {
            EXPECT_EQ(plane.offset % 64, 0U);
            spans.emplace_back(plane.offset, plane.bytes);
          }
          EXPECT_EQ(tile->plane_offset % 64, 0U);
          if (tile->budget > 0) spans.emplace_back(tile->plane_offset, tile->plane_bytes);
          if (tile->budget > 0) spans.emplace_back(tile->counts_offset, 12);
          const auto endpoints = static_cast<std::size_t>(tile->depth) * size_of(dtype);
          spans.emplace_back(tile->min_offset, endpoints);
          spans.emplace_back(tile->max_offset, endpoints);
          if (tile->channel_factors) spans.emplace_back(tile->factor_offset, tile->rows * size_of(dtype));
          spans.emplace_back(tile->order_offset, static_cast<std::size_t>(tile->depth * tile->order_entry));
        }
        if (layout.salient > 0) spans.emplace_back(layout.tokens_offset, layout.value.depth);
        std::sort(spans.begin(), spans.end());
        for (std::size_t i = 0; i + 1 < spans.size(); ++i) {
          EXPECT_LE(spans[i].first + spans[i].second, spans[i + 1].first) << text << " D=" << dim;
        }
        const bool shared = layout.value.shared_grid;
        EXPECT_LE(spans.back().first + spans.back().second, shared ? layout.page_bytes : layout.head_bytes);
        if (shared) {
          EXPECT_GE(layout.value.min_offset, 3 * layout.head_bytes);
        }
        EXPECT_EQ(layout.head_bytes % 64, 0U);
        EXPECT_EQ(
            layout.page_bytes,
            3 * layout.head_bytes + (shared ? 2 * static_cast<std::size_t>(layout.value.depth) * size_of(dtype) : 0));
      }
    }
  }
}

}  // namespace
}  // namespace kvant
