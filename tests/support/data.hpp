// Data, views and comparisons that the unit tests share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "base/half.hpp"
#include "support/oracle.hpp"
#include "tiles/kernels.hpp"

namespace kvant::testing {

// Keys and values of some tokens, dense [tokens][heads][dim].
struct Rows {
  CacheShape shape;
  std::int64_t tokens = 0;
  std::vector<float> keys, values;
  std::vector<float> queries = {};  // [tokens][2 * heads][key_dim], or empty

  ConstView query_view(std::int64_t first, std::int64_t count) const {
    if (queries.empty()) return {};
    const std::int64_t row = std::int64_t{2} * shape.kv_heads * shape.key_dim;
    return dense_view(queries.data() + first * row, DType::f32, count, std::int64_t{2} * shape.kv_heads, shape.key_dim);
  }
  ConstView key_view(std::int64_t first, std::int64_t count) const {
    const std::int64_t row = std::int64_t{shape.kv_heads} * shape.key_dim;
    return dense_view(keys.data() + first * row, DType::f32, count, shape.kv_heads, shape.key_dim);
  }
  ConstView value_view(std::int64_t first, std::int64_t count) const {
    const std::int64_t row = std::int64_t{shape.kv_heads} * shape.value_dim;
    return dense_view(values.data() + first * row, DType::f32, count, shape.kv_heads, shape.value_dim);
  }
  float& key(std::int64_t token, int head, int channel) {
    return keys[static_cast<std::size_t>((token * shape.kv_heads + head) * shape.key_dim + channel)];
  }
  float& value(std::int64_t token, int head, int channel) {
    return values[static_cast<std::size_t>((token * shape.kv_heads + head) * shape.value_dim + channel)];
  }
};

inline Rows make_rows(const CacheShape& shape, std::int64_t tokens, std::uint32_t seed = 1) {
  return {shape, tokens, random_keys(tokens, shape.kv_heads, shape.key_dim, seed),
          random_floats(static_cast<std::size_t>(tokens * shape.kv_heads * shape.value_dim), seed + 77),
          random_keys(tokens, 2 * shape.kv_heads, shape.key_dim, seed + 99)};
}

inline void append(Cache& cache, const Rows& rows, std::int64_t first, std::int64_t count) {
  cache.append(rows.key_view(first, count), rows.value_view(first, count), rows.query_view(first, count));
}

inline Cache filled(const std::string& recipe, const Rows& rows) {
  Cache cache(parse_recipe(recipe), rows.shape);
  append(cache, rows, 0, rows.tokens);
  return cache;
}

inline std::vector<std::int64_t> cell_numbers(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(count));
  std::iota(cells.begin(), cells.end(), first);
  return cells;
}

inline void write_cells(PageStore& store, const Rows& rows, const std::vector<std::int64_t>& cells,
                        std::int64_t first_row = 0) {
  const auto count = static_cast<std::int64_t>(cells.size());
  store.write(Side::key, cells, rows.key_view(first_row, count));
  store.write(Side::value, cells, rows.value_view(first_row, count));
}

inline float rounded_to(DType type, float value) {
  std::array<std::byte, 4> bytes{};
  base::store_float(bytes.data(), type, 0, value);
  return base::load_float(bytes.data(), type, 0);
}

// A dense array of any type, [a][b][c].
inline std::vector<std::byte> as_type(const std::vector<float>& values, DType type) {
  std::vector<std::byte> bytes(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    base::store_float(bytes.data(), type, static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}

// Everything that can be seen of a store, as bytes: two equal dumps are two stores in the same state.
inline std::string dump(const PageStore& store) {
  const StoreCounts counts = store.counts();
  std::string text = std::to_string(store.cells()) + "/" + std::to_string(counts.sealed_pages) + "/" +
                     std::to_string(counts.open_pages) + "/" + std::to_string(counts.seals) + "/" +
                     std::to_string(counts.reopens) + "\n";
  for (std::int64_t cell = 0; cell < store.cells(); ++cell) text += store.is_written(cell) ? 'w' : '.';
  for (const Side side : {Side::key, Side::value}) {
    const std::vector<float> rows = read_all(store, side, store.cells());
    text.append(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(float));
  }
  for (std::int64_t page = 0; page * store.recipe().page < store.cells(); ++page) {
    const auto block = store.sealed_block(page);
    text.append(reinterpret_cast<const char*>(block.data()), block.size());
  }
  return text;
}

// Expects Error(code) from `call` and that its message contains every part.
template <typename Call>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown; expected " << name_of(code);
  } catch (const Error& error) {
    EXPECT_STREQ(name_of(error.code()), name_of(code)) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
    }
  }
}

// What one attend() returned.
struct Result {
  std::vector<float> out;  // [rows][query_heads][value_dim]
  std::vector<float> lse;  // [rows][query_heads]
};

// Causal attention of a cache's last `rows` tokens.
inline Result attend(const Cache& cache, const std::vector<float>& queries, std::int64_t rows, int query_heads,
                     const AttentionOptions& options = {}) {
  const CacheShape& shape = cache.shape();
  Result result{std::vector<float>(static_cast<std::size_t>(rows * query_heads * shape.value_dim), -77.0F),
                std::vector<float>(static_cast<std::size_t>(rows * query_heads), -77.0F)};
  cache.attend(dense_view(queries.data(), DType::f32, rows, query_heads, shape.key_dim),
               dense_view(result.out.data(), DType::f32, rows, query_heads, shape.value_dim), options,
               result.lse.data());
  return result;
}

inline Result attend(const PageStore& store, std::int64_t n_cells, const std::vector<float>& queries, std::int64_t rows,
                     int query_heads, const AttentionOptions& options = {}) {
  const CacheShape& shape = store.shape();
  Result result{std::vector<float>(static_cast<std::size_t>(rows * query_heads * shape.value_dim), -77.0F),
                std::vector<float>(static_cast<std::size_t>(rows * query_heads), -77.0F)};
  const auto workspace = make_workspace();
  kvant::attend(store, n_cells, dense_view(queries.data(), DType::f32, rows, query_heads, shape.key_dim),
                dense_view(result.out.data(), DType::f32, rows, query_heads, shape.value_dim), options, *workspace,
                result.lse.data());
  return result;
}

// fp64 attention over what the store itself decodes (O1); unwritten cells must be hidden by `bias`.
inline Expected expected_from(const PageStore& store, std::int64_t n_cells, const std::vector<float>& queries,
                              std::int64_t rows, int query_heads, const Bias& bias, double softcap = 0,
                              const float* sinks = nullptr, double scale = 0) {
  const CacheShape& shape = store.shape();
  return attend_fp64(shape, query_heads / shape.kv_heads, n_cells, rows, read_all(store, Side::key, n_cells),
                     read_all(store, Side::value, n_cells), queries, scale != 0 ? scale : 1 / std::sqrt(shape.key_dim),
                     softcap, bias, sinks);
}

inline std::vector<float> random_queries(std::int64_t rows, int heads, int dim, std::uint32_t seed = 9) {
  return random_floats(static_cast<std::size_t>(rows * heads * dim), seed, 0.7F);
}

// Parameter and name of a test that runs once per kernel set of this CPU.
inline std::vector<tiles::Kernels> kernel_sets() {
  return tiles::all_kernels();
}
// With the surroundings of matrix products, which few CPUs have.
inline std::vector<tiles::Kernels> product_sets() {
  std::vector<tiles::Kernels> sets = kernel_sets();
  sets.push_back(tiles::emulated_matrix_kernels());
  return sets;
}
inline std::string kernel_set_name(const ::testing::TestParamInfo<tiles::Kernels>& info) {
  return info.param.name;
}
inline const tiles::Kernels& scalar() {
  return tiles::all_kernels().back();
}

}  // namespace kvant::testing

namespace kvant::tiles {
// gtest prints a failing parameter by name instead of as bytes.
inline void PrintTo(const Kernels& kernels, std::ostream* out) {
  *out << kernels.name;
}
}  // namespace kvant::tiles
