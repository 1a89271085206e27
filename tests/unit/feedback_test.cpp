// Error feedback: its rounding against fp64 arithmetic, what it is worth to scores, and the second moments behind it.
#include "cache/feedback.hpp"

#include <gtest/gtest.h>
#include <xxhash.h>

#include "support/continue.hpp"
#include "support/model.hpp"

namespace kvant {
namespace {

using testing::Rows;

constexpr int kGroup = 2;  // query heads per KV head in Rows

// Queries in which channels go together, as those of models do: each is a mix of a few directions and some noise.
Rows correlated_rows(const CacheShape& shape, std::int64_t tokens, std::uint32_t seed) {
  Rows rows = testing::make_rows(shape, tokens, seed);
  const int dim = shape.key_dim;
  const int directions = std::max(1, dim / 6);
  const auto axes = testing::random_floats(static_cast<std::size_t>(directions * dim), seed + 5);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t first = 0; first < rows.queries.size(); first += static_cast<std::size_t>(dim)) {
    std::vector<float> mix(static_cast<std::size_t>(directions));
    for (float& m : mix) m = normal(random);
    for (int d = 0; d < dim; ++d) {
      float q = 0.2F * normal(random);
      for (int a = 0; a < directions; ++a) {
        q += mix[static_cast<std::size_t>(a)] * axes[static_cast<std::size_t>(a * dim + d)];
      }
      rows.queries[first + static_cast<std::size_t>(d)] = q;
    }
  }
  return rows;
}

const float* query_of(const Rows& rows, std::int64_t token, int head, int member) {
  return rows.queries.data() +
         ((token * rows.shape.kv_heads + head) * kGroup + member) * static_cast<std::int64_t>(rows.shape.key_dim);
}

// ---- the oracle

using Matrix = std::vector<std::vector<double>>;

// The second moment of one query of each group per token up to `tokens`, that of member token % group, as bfloat16.
Matrix expected_moment(const Rows& rows, std::int64_t tokens, int head) {
  const auto dim = static_cast<std::size_t>(rows.shape.key_dim);
  Matrix moment(dim, std::vector<double>(dim));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* query = query_of(rows, t, head, static_cast<int>(t % kGroup));
    for (std::size_t i = 0; i < dim; ++i) {
      for (std::size_t j = 0; j < dim; ++j) {
        moment[i][j] += static_cast<double>(testing::rounded_to(DType::bf16, query[i])) *
                        static_cast<double>(testing::rounded_to(DType::bf16, query[j]));
      }
    }
  }
  return moment;
}

// Gauss-Jordan with pivots.
std::vector<double> solve(Matrix a, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t c = 0; c < n; ++c) {
    std::size_t best = c;
    for (std::size_t r = c; r < n; ++r) best = std::fabs(a[r][c]) > std::fabs(a[best][c]) ? r : best;
    std::swap(a[c], a[best]);
    std::swap(b[c], b[best]);
    for (std::size_t r = 0; r < n; ++r) {
      if (r == c) continue;
      const double factor = a[r][c] / a[c][c];
      for (std::size_t k = c; k < n; ++k) a[r][k] -= factor * a[c][k];
      b[r] -= factor * b[c];
    }
  }
  for (std::size_t c = 0; c < n; ++c) b[c] /= a[c][c];
  return b;
}

// The error that the first channel of `left` should make when those of `left` may make any and `errors` are made:
// the minimum of e' M e over them.
double best_error(const Matrix& moment, const std::vector<std::size_t>& done, const std::vector<double>& errors,
                  const std::vector<std::size_t>& left) {
  Matrix part(left.size(), std::vector<double>(left.size()));
  std::vector<double> right(left.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    for (std::size_t j = 0; j < left.size(); ++j) part[i][j] = moment[left[i]][left[j]];
    for (std::size_t k = 0; k < done.size(); ++k) right[i] -= moment[left[i]][done[k]] * errors[k];
  }
  return solve(part, right).front();
}

// Grids by channel of a sealed page.
struct Grids {
  std::vector<float> min, step;
  std::vector<int> levels;

  Grids(const PageStore& store, std::int64_t page, int head) {
    const cache::TileView view(store.layout(), store.layout().key, store.sealed_block(page).data(), head);
    const auto depth = static_cast<std::size_t>(store.shape().key_dim);
    std::vector<std::uint16_t> order(depth);
    std::vector<float> low(depth), high(depth);
    view.order(order.data());
    cache::load_endpoints(view, store.shape().dtype, low.data(), high.data());
    min.resize(depth);
    step.resize(depth);
    levels.resize(depth);
    const std::vector<int> widths = testing::key_widths(store, page, head);
    for (std::size_t i = 0; i < depth; ++i) {
      levels[order[i]] = (1 << widths[order[i]]) - 1;
      min[order[i]] = low[i];
      step[order[i]] = (high[i] - low[i]) / static_cast<float>(levels[order[i]]);
    }
  }
};

// Checks the codes of one page and head; returns how many of them are not those of plain rounding.
int check_codes(const Cache& cache, const Rows& rows, std::int64_t page, int head) {
  const std::int64_t tokens = cache.recipe().page;
  const auto dim = static_cast<std::size_t>(rows.shape.key_dim);
  const Grids grids(cache.store(), page, head);
  Matrix moment = expected_moment(rows, (page + 1) * tokens, head);
  for (std::size_t c = 0; c < dim; ++c) moment[c][c] *= 1.5;
  std::vector<std::size_t> order(dim);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto weight = [&](std::size_t c) { return moment[c][c] * std::pow(static_cast<double>(grids.step[c]), 2); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return weight(a) > weight(b); });
  const std::vector<float> stored = testing::read_all(cache.store(), Side::key, (page + 1) * tokens);
  int moved = 0;
  for (std::int64_t t = page * tokens; t < (page + 1) * tokens; ++t) {
    if (t < cache.recipe().sink) continue;
    const std::size_t first = static_cast<std::size_t>(t * rows.shape.kv_heads + head) * dim;
    std::vector<double> errors;
    for (std::size_t i = 0; i < dim; ++i) {
      const std::size_t c = order[i];
      const double x = rows.keys[first + c];
      const double target = x + best_error(moment, {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(i)},
                                           errors, {order.begin() + static_cast<std::ptrdiff_t>(i), order.end()});
      const auto code = [&](double value) {
        return std::clamp((value - grids.min[c]) / grids.step[c], 0.0, static_cast<double>(grids.levels[c]));
      };
      const double written = (static_cast<double>(stored[first + c]) - grids.min[c]) / grids.step[c];
      EXPECT_NEAR(written, std::round(written), 1e-3);
      // Nearest to the target but for ties that float arithmetic decides.
      EXPECT_LE(std::fabs(written - code(target)), 0.5 + 2e-3) << "token " << t << " channel " << c;
      moved += std::fabs(written - code(x)) > 0.51 ? 1 : 0;
      errors.push_back(static_cast<double>(stored[first + c]) - x);
    }
  }
  return moved;
}

TEST(Feedback, RoundsWhereTheQueriesSeeLeastInFp64) {
  for (const char* text : {"waterfill:k=2.5,feedback=1,window=0,sink=0,page=32",
                           "waterfill:k=3,high=6,grid=range,feedback=1,window=0,sink=5,page=32",
                           "waterfill:k=1,high=1,feedback=1,window=0,sink=0,page=64"}) {
    SCOPED_TRACE(text);
    const Rows rows = correlated_rows({2, 24, 8, DType::f32}, 128, 3);
    const Cache cache = testing::filled(text, rows);
    for (std::int64_t page = 0; page < cache.counts().sealed_pages; ++page) {
      for (int head = 0; head < 2; ++head) EXPECT_GT(check_codes(cache, rows, page, head), 24);
    }
  }
}

// ---- what it is worth

// Mean square error of the scores of later queries with the sealed keys.
double score_error(const std::string& recipe, const Rows& rows, std::int64_t tokens) {
  Cache cache(parse_recipe(recipe), rows.shape);
  testing::append(cache, rows, 0, tokens);
  const std::vector<float> stored = testing::read_all(cache.store(), Side::key, tokens);
  const int dim = rows.shape.key_dim;
  double sum = 0;
  for (std::int64_t later = tokens; later < rows.tokens; ++later) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int head = 0; head < rows.shape.kv_heads; ++head) {
        for (int member = 0; member < kGroup; ++member) {
          const float* query = query_of(rows, later, head, member);
          double error = 0;
          for (int d = 0; d < dim; ++d) {
            const auto at = static_cast<std::size_t>((t * rows.shape.kv_heads + head) * dim + d);
            error += static_cast<double>(query[d]) * (static_cast<double>(stored[at]) - rows.keys[at]);
          }
          sum += error * error;
        }
      }
    }
  }
  return sum;
}

TEST(Feedback, LowersTheErrorOfScoresWhereQueriesAreCorrelated) {
  for (const int dim : {16, 64, 80}) {
    for (const std::string text : {"waterfill:window=0,sink=0", "waterfill:k=3,high=6,grid=range,window=0,sink=4"}) {
      const Rows rows = correlated_rows({2, dim, 8, DType::f16}, 160, 7);
      const double plain = score_error(text, rows, 128);
      EXPECT_LT(score_error(text + ",feedback=1", rows, 128), 0.8 * plain) << text << " " << dim;
    }
  }
}

// ---- statistics

TEST(Feedback, MomentsAreThoseOfOneQueryOfEachGroup) {
  const Rows rows = correlated_rows({2, 12, 8, DType::f16}, 100, 9);
  const Cache cache = testing::filled("waterfill:feedback=1,page=32,window=8", rows);  // two pages are sealed
  const PageStore::Impl& impl = cache.store().impl();
  const auto check = [&](const std::vector<float>& moments, std::int64_t tokens) {
    ASSERT_EQ(moments.size(), 2 * cache::triangle_size(12));
    std::size_t at = 0;
    for (int head = 0; head < 2; ++head) {
      const Matrix expected = expected_moment(rows, tokens, head);
      for (std::size_t i = 0; i < 12; ++i) {
        for (std::size_t j = 0; j <= i; ++j) {
          EXPECT_NEAR(moments[at++], expected[i][j], 1e-5 * std::sqrt(expected[i][i] * expected[j][j]));
        }
      }
    }
  };
  ASSERT_EQ(cache.counts().sealed_pages, 2);
  check(impl.query_moments, 64);
  check(impl.moments_at(std::vector<std::int64_t>{2, 3}, 1).front(), 96);
  check(impl.moments_at(std::vector<std::int64_t>{2, 3}, 2).back(), 100);
}

TEST(Feedback, StatisticsFollowForksCopiesAndImages) {
  const Rows rows = correlated_rows({2, 32, 32, DType::f32}, 400, 21);
  const Recipe recipe = parse_recipe("waterfill:feedback=1,page=32,window=8");
  Cache cache(recipe, rows.shape);
  testing::append(cache, rows, 0, 150);
  EXPECT_EQ(Cache::load(cache.save()).store().impl().query_moments, cache.store().impl().query_moments);
  testing::expect_same_continuations(cache, rows, 150);

  PageStore copy(recipe, rows.shape, 512);
  copy.copy_cells(cache.store(), 0, 7, 400);  // to other places of other pages
  EXPECT_EQ(copy.impl().query_moments, cache.store().impl().query_moments);
  // Cells 384..399 are open in page 12, those of the copy as well.
  const std::vector<std::int64_t> last = {12};
  const std::vector<float> from = cache.store().impl().moments_at(last, 1).front();
  const std::vector<float> to = copy.impl().moments_at(last, 1).front();
  ASSERT_EQ(cache.counts().open_pages, 1);
  EXPECT_NE(from, copy.impl().query_moments);
  for (std::size_t i = 0; i < from.size(); ++i) EXPECT_NEAR(to[i], from[i], 1e-5 * std::fabs(from[0]) + 1e-3);
}

TEST(Feedback, QueriesThatAreTrimmedWithAnOpenPageLeaveNoTrace) {
  const Rows rows = correlated_rows({1, 16, 16, DType::f16}, 200, 4);
  const Rows others = correlated_rows({1, 16, 16, DType::f16}, 200, 5);
  const std::string text = "waterfill:feedback=1,page=32,window=40";
  Cache cache(parse_recipe(text), rows.shape);
  testing::append(cache, rows, 0, 100);
  testing::append(cache, others, 100, 30);
  cache.trim(30);
  testing::append(cache, rows, 100, 100);
  EXPECT_TRUE(cache.save() == testing::filled(text, rows).save());
}

TEST(Feedback, EveryKernelSetWritesTheSameBytes) {
  const Rows rows = correlated_rows({2, 84, 16, DType::bf16}, 300, 31);
  const auto saved = [&] { return testing::filled("waterfill:feedback=1,window=3,sink=3", rows).save(); };
  const testing::ForcedKernel scalar("scalar");
  const auto expected = saved();
  for (const std::string& set : kernel_names()) {
    const testing::ForcedKernel forced(set);
    EXPECT_TRUE(saved() == expected) << set;
  }
}

// Nothing to weigh by: the bytes are those without, and the counts say so.
TEST(Feedback, WithoutQueriesPagesAreBlindAndCounted) {
  Rows rows = correlated_rows({1, 16, 16, DType::f16}, 64, 6);
  rows.queries.clear();
  const Cache blind = testing::filled("waterfill:feedback=1,page=32,window=0", rows);
  const Cache plain = testing::filled("waterfill:page=32,window=0", rows);
  EXPECT_EQ(blind.counts().blind_seals, 2);
  for (const std::int64_t page : {0, 1}) {
    const auto a = blind.store().sealed_block(page), b = plain.store().sealed_block(page);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  }
  EXPECT_NE(remark(blind.recipe()).find("blind_seals"), std::string::npos);
  EXPECT_EQ(remark(plain.recipe()), "");
}

TEST(Feedback, ExtremeQueriesKeepKeysFinite) {
  for (const float loud : {0.0F, 1e-30F, 3e38F}) {
    Rows rows = correlated_rows({1, 16, 16, DType::f16}, 64, 6);
    for (std::size_t i = 0; i < rows.queries.size(); ++i) {
      if (i % 16 < 7) rows.queries[i] = i % 3 == 0 ? -loud : loud;
    }
    for (std::size_t i = 0; i < rows.keys.size(); i += 5) rows.keys[i] = i % 2 == 0 ? 65504.0F : -65504.0F;
    const Cache cache = testing::filled("waterfill:feedback=1,page=32,window=0", rows);
    for (const float moment : cache.store().impl().query_moments) ASSERT_TRUE(std::isfinite(moment));
    for (const float key : testing::read_all(cache.store(), Side::key, 64)) ASSERT_LE(std::fabs(key), 65504.0F * 1.01F);
    EXPECT_TRUE(Cache::load(cache.save()).save() == cache.save());
  }
}

// ---- damaged images

std::vector<std::byte> patched(std::vector<std::byte> image, std::size_t at, const void* data, std::size_t size) {
  std::memcpy(image.data() + at, data, size);
  const std::size_t body = image.size() - sizeof(std::uint64_t);
  const std::uint64_t checksum = XXH64(image.data(), body, 0);
  std::memcpy(image.data() + body, &checksum, sizeof checksum);
  return image;
}

template <typename T>
std::size_t place_of(const std::vector<std::byte>& image, const T* data, std::size_t count) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto found = std::search(image.begin(), image.end(), bytes, bytes + count * sizeof(T));
  EXPECT_NE(found, image.end());
  return static_cast<std::size_t>(found - image.begin());
}

TEST(Feedback, ForgedStatisticsAreRefusedOrHarmless) {
  const Rows rows = correlated_rows({1, 16, 16, DType::f16}, 150, 6);
  const Cache cache = testing::filled("waterfill:feedback=1,page=32,window=40", rows);
  const PageStore::Impl& impl = cache.store().impl();
  const std::vector<std::byte> image = cache.save();
  const std::size_t moments = place_of(image, impl.query_moments.data(), impl.query_moments.size());
  const auto refused = [&](std::size_t at, auto value, const char* part) {
    testing::expect_error(ErrorCode::bad_format, {part},
                          [&] { Cache::load(patched(image, at, &value, sizeof value)); });
  };
  refused(moments, -1.0F, "second moment");
  refused(moments + sizeof(float), std::numeric_limits<float>::quiet_NaN(), "second moment");
  refused(moments + sizeof(float), std::numeric_limits<float>::infinity(), "second moment");
  const std::size_t query = place_of(image, impl.query_cell(impl.pages.back(), 0), 2 * 16) + 16 * sizeof(std::uint16_t);
  refused(query, std::uint16_t{0x7FC0}, "a query");
  refused(query, base::float_to_bfloat(2 * cache::kLargestQuery), "a query");
  // No moment has off-diagonal values like these; what is sealed with it is still finite.
  std::vector<float> forged(impl.query_moments.size(), 3e38F);
  for (std::size_t i = 0; i < 16; ++i) forged[cache::triangle_size(static_cast<int>(i)) + i] = 1e-3F;
  Cache loaded = Cache::load(patched(image, moments, forged.data(), forged.size() * sizeof(float)));
  testing::append(loaded, rows, 0, 150);
  ASSERT_GT(loaded.counts().sealed_pages, cache.counts().sealed_pages);
  for (const float key : testing::read_all(loaded.store(), Side::key, 300)) ASSERT_TRUE(std::isfinite(key));
}

// ---- the kernel

struct RowSums : ::testing::TestWithParam<tiles::Kernels> {};

TEST_P(RowSums, AreThoseOfTheDefinitionInItsOrder) {
  std::mt19937 random(8);
  for (int n = 0; n <= 150; n += n < 20 ? 1 : 13) {
    for (const int count : {0, 1, 2, 7, 33}) {
      const std::int64_t stride = n + static_cast<int>(random() % 5);
      const auto rows = testing::random_floats(static_cast<std::size_t>(count * stride) + 1, random());
      const auto factors = testing::random_floats(static_cast<std::size_t>(count) + 1, random());
      const auto before = testing::random_floats(static_cast<std::size_t>(n) + 1, random());
      std::vector<float> out = before;
      GetParam().add_rows(rows.data(), stride, factors.data(), count, n, out.data());
      for (int i = 0; i < n; ++i) {
        volatile float sum = before[static_cast<std::size_t>(i)];  // no wider arithmetic, no contraction
        for (int k = 0; k < count; ++k) {
          volatile const float product =
              factors[static_cast<std::size_t>(k)] * rows[static_cast<std::size_t>(k * stride + i)];
          sum = sum + product;
        }
        ASSERT_EQ(out[static_cast<std::size_t>(i)], sum) << n << " " << count << " " << i;
      }
      ASSERT_EQ(out.back(), before.back());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, RowSums, ::testing::ValuesIn(testing::kernel_sets()), testing::kernel_set_name);

}  // namespace
}  // namespace kvant
