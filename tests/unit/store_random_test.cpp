// PageStore: random sequences of operations against a plain list.
#include <gtest/gtest.h>

#include "support/model.hpp"

namespace kvant {
namespace {

using testing::Snapshot;
using testing::StoreModel;

struct Fuzzed {
  const char* recipe;
  CacheShape shape;
  std::int64_t cells;
};

class Operations {
 public:
  Operations(const Fuzzed& f, std::uint32_t seed)
      : random_(seed),
        store_(parse_recipe(f.recipe), f.shape, f.cells),
        other_(parse_recipe(f.recipe), f.shape, f.cells + 37),
        model_(store_.recipe(), f.shape, f.cells),
        other_model_(store_.recipe(), f.shape, f.cells + 37) {}

  void step() {
    switch (random_() % 12) {
      case 0:
        return forget();
      case 1:
        return copy_within();
      case 2:
        return copy_between();
      case 3:
        return refused();
      case 4:
        return fork();
      case 5:
        return write_rows(other_, other_model_);
      case 6:
        return seal(other_, other_model_);
      case 7:
      case 8:
        return seal(store_, model_);
      default:
        observe();
        return write_rows(store_, model_);
    }
  }

  // others: also the stores that most operations leave alone, where damage stays until it is looked for.
  void check(bool others) {
    model_.expect_equal(store_);
    if (!others) return;
    other_model_.expect_equal(other_);
    ASSERT_TRUE(!copy_ || testing::dump(*copy_) == copy_dump_) << "a copy changed with its original";
  }
  std::int64_t seals() const { return store_.counts().seals; }
  std::int64_t reopens() const { return store_.counts().reopens; }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_()) % std::max<std::int64_t>(limit, 1);
  }

  // Both sides or one, a run of cells or scattered ones in any order, with positions or without.
  void write_rows(PageStore& store, StoreModel& model) {
    const std::int64_t count = 1 + below(random_() % 3 == 0 ? 70 : 20);
    const std::int64_t first = below(store.cells() - count + 1);
    std::vector<std::int64_t> cells = testing::cell_numbers(first, count);
    if (random_() % 4 == 0) std::shuffle(cells.begin(), cells.end(), random_);
    if (random_() % 8 == 0) cells.push_back(cells.front());  // the same cell twice: the last row stays
    std::vector<std::int64_t> positions;
    if (random_() % 3 == 0) {
      for (std::size_t i = 0; i < cells.size(); ++i) positions.push_back(below(60));
    }
    const auto rows = testing::make_rows(store.shape(), static_cast<std::int64_t>(cells.size()), random_());
    const unsigned sides = random_() % 4;  // mostly both, keys or values first
    std::vector<Side> order = {Side::key, Side::value};
    if (sides == 1) order = {Side::value, Side::key};
    if (sides == 2) order = {random_() % 2 == 0 ? Side::key : Side::value};
    for (const Side side : order) {
      const ConstView view = side == Side::key ? rows.key_view(0, rows.tokens) : rows.value_view(0, rows.tokens);
      store.write(side, cells, view, positions);
      const std::int64_t width = std::int64_t{store.shape().kv_heads} * model.dim(side);
      for (std::size_t i = 0; i < cells.size(); ++i) {
        model.write(side, cells[i], static_cast<const float*>(view.data) + static_cast<std::int64_t>(i) * width,
                    positions.empty() ? cells[i] : positions[i]);
      }
    }
  }

  void seal(PageStore& store, StoreModel& model) {
    const Snapshot before(store);
    const std::vector<std::int64_t> ready = model.ready();
    ASSERT_EQ(store.seal_ready(1 + static_cast<int>(random_() % 3)), static_cast<int>(ready.size()));
    const Snapshot after(store);
    for (const std::int64_t page : ready) {
      ASSERT_NO_FATAL_FAILURE(testing::expect_close(store, page, before, after));
      model.seal(page, after);
    }
  }

  // Queries of open, sealed and unwritten cells, or of none: they weigh later pages and change no row.
  void observe() {
    const std::int64_t count = below(9);
    std::vector<std::int64_t> cells;
    for (std::int64_t i = 0; i < count && random_() % 4 != 0; ++i) cells.push_back(below(store_.cells()));
    const auto rows = cells.empty() ? count : static_cast<std::int64_t>(cells.size());
    const CacheShape& shape = store_.shape();
    const auto queries = testing::random_queries(rows, 3 * shape.kv_heads, shape.key_dim, random_());
    store_.observe(cells, dense_view(queries.data(), DType::f32, rows, 3 * shape.kv_heads, shape.key_dim));
  }

  void forget() {
    const std::int64_t count = random_() % 2 == 0 ? below(10) : below(store_.cells() + 1);
    const std::int64_t first = below(store_.cells() - count + 1);
    store_.forget(first, count);
    model_.forget(first, count);
  }

  void copy_within() {
    const std::int64_t page = store_.recipe().page;
    const bool aligned = random_() % 2 == 0;
    const std::int64_t count = aligned ? page : 1 + below(50);
    const std::int64_t from = aligned ? page * below(store_.cells() / page) : below(store_.cells() - count + 1);
    const std::int64_t to = aligned ? page * below(store_.cells() / page) : below(store_.cells() - count + 1);
    store_.copy_cells(store_, from, to, count);
    model_.copy(model_, from, to, count);
  }

  void copy_between() {
    const std::int64_t page = store_.recipe().page;
    const std::int64_t count = 1 + below(100);
    const std::int64_t from = random_() % 2 == 0 ? 0 : below(other_.cells() - count + 1);
    const std::int64_t to =
        random_() % 2 == 0 ? page * below((store_.cells() - count) / page + 1) : below(store_.cells() - count + 1);
    store_.copy_cells(other_, from, to, count);
    model_.copy(other_model_, from, to, count);
  }

  void refused() {
    const std::string before = testing::dump(store_);
    auto rows = testing::make_rows(store_.shape(), 3, random_());
    rows.keys[rows.keys.size() / 2] = std::numeric_limits<float>::infinity();
    EXPECT_THROW(store_.write(Side::key, std::vector<std::int64_t>{0, 1, 2}, rows.key_view(0, 3)), Error);
    EXPECT_THROW(store_.write(Side::value, std::vector<std::int64_t>{0, 1, store_.cells()}, rows.value_view(0, 3)),
                 Error);
    EXPECT_THROW(store_.forget(1, store_.cells()), Error);
    EXPECT_THROW(store_.copy_cells(other_, -1, 0, 4), Error);
    EXPECT_EQ(testing::dump(store_), before);
  }

  void fork() {
    copy_ = std::make_unique<PageStore>(store_);
    copy_dump_ = testing::dump(*copy_);
  }

  std::mt19937 random_;
  PageStore store_, other_;
  StoreModel model_, other_model_;
  std::unique_ptr<PageStore> copy_;
  std::string copy_dump_;
};

void PrintTo(const Fuzzed& f, std::ostream* out) {
  *out << f.recipe;
}

struct RandomStore : ::testing::TestWithParam<Fuzzed> {};

TEST_P(RandomStore, EqualsAPlainList) {
  std::int64_t seals = 0, reopens = 0;
  for (std::uint32_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Operations operations(GetParam(), seed);
    for (int i = 0; i < 200; ++i) {
      SCOPED_TRACE("operation " + std::to_string(i));
      ASSERT_NO_FATAL_FAILURE(operations.step());
      ASSERT_NO_FATAL_FAILURE(operations.check(i % 4 == 3));
    }
    seals += operations.seals();
    reopens += operations.reopens();
  }
  // The sequences must reach the interesting states.
  if (parse_recipe(GetParam().recipe).quantizes()) {
    EXPECT_GE(seals, 10);
    EXPECT_GE(reopens, 8);
  }
}

const Fuzzed kFuzzed[] = {
    {"f16", {2, 5, 7, DType::f16}, 150},
    {"kivi:k=4,v=4,page=32,window=0", {2, 5, 7, DType::f16}, 150},
    {"kivi:k=2,v=3,page=32,window=20,sink=4", {1, 16, 20, DType::f16}, 128},
    {"kivi:k=8,v=8,page=32,window=3,sink=32", {1, 6, 3, DType::bf16}, 140},
    {"kivi:k=4,v=1,page=32,window=0,sink=10", {1, 5, 4, DType::f32}, 150},
    {"kitty:boost=0.3,v=2,page=32,window=10,sink=5", {2, 10, 8, DType::f16}, 150},
    {"kitty:boost=1,v=4,page=64,window=0,sink=0", {1, 8, 8, DType::f16}, 140},
    {"waterfill:k=2.5,v=2,page=32,window=10,sink=4", {2, 12, 10, DType::f16}, 150},
    {"waterfill:k=3,high=6,v=3,shared=1,page=64,window=0,sink=0", {2, 8, 8, DType::f32}, 140},
    {"waterfill:k=4,low=2,high=6,v=4,shared=1,vgrid=range,page=32,window=3,sink=3", {3, 8, 6, DType::bf16}, 140},
    {"waterfill:k=2.5,feedback=1,page=32,window=10,sink=4", {2, 12, 10, DType::f16}, 150},
    {"k=waterfill:2,v=zipcache,grid=range,feedback=1,page=32,window=0", {2, 8, 8, DType::f32}, 140},
    {"zipcache:page=32,window=10,sink=4", {2, 12, 10, DType::f16}, 150},
    {"zipcache:saliency=norm,salient=0.4,high=6,low=3,vhigh=3,page=64,window=0", {2, 8, 8, DType::f32}, 140},
    {"k=zipcache,v=waterfill:4,shared=1,vgrid=range,page=32,window=3,sink=3", {3, 8, 6, DType::bf16}, 140},
    {"k=kitty,v=zipcache,page=32,window=0", {1, 16, 8, DType::bf16}, 150},
    {"waterfill:k=2,grid=range,v=5,rotate=0,page=32,window=0", {1, 16, 8, DType::f16}, 150},
    {"kvquant:k=3,v=2,page=32,window=0", {2, 5, 7, DType::f16}, 150},
    {"kvquant:k=2,v=4,outliers=0.1,voutliers=0.1,page=32,window=10,sink=30", {3, 8, 6, DType::bf16}, 140},
    {"kvquant:k=4,v=3,outliers=0,voutliers=0.02,page=64,window=3,sink=3", {1, 6, 300, DType::f32}, 140},
};
INSTANTIATE_TEST_SUITE_P(Recipes, RandomStore, ::testing::ValuesIn(kFuzzed), [](const auto& info) {
  std::string name = info.param.recipe;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
});

}  // namespace
}  // namespace kvant
