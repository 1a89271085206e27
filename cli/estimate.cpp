#include "cli/estimate.hpp"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <vector>

#include "cli/recipes.hpp"
#include "kvant/layout.hpp"
#include "kvant/page_store.hpp"

namespace kvant::cli {
namespace {

std::uint64_t values_of(const LayerShape& layer, std::int64_t tokens) {
  return static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(layer.kv_heads) *
         static_cast<std::uint64_t>(layer.key_dim + layer.value_dim);
}

// Which rotation it is changes no size.
void set_any_rotation(PageStore& store) {
  const auto pairs = static_cast<std::size_t>(store.shape().key_dim) / 2;
  if (store.needs_rotation()) store.set_key_rotation({RotaryPairs::halves, std::vector<double>(pairs, 1.0), 1});
}

// What the store holds for one sealed page, its record included: a page of zeros is sealed and asked.
StoreBytes sealed_page_bytes(Recipe recipe, const CacheShape& shape) {
  recipe.window = 0;
  PageStore store(recipe, shape, recipe.page);
  set_any_rotation(store);
  const std::size_t empty_tables = store.bytes().tables;
  std::vector<std::int64_t> cells(static_cast<std::size_t>(recipe.page));
  std::iota(cells.begin(), cells.end(), std::int64_t{0});
  for (const Side side : {Side::key, Side::value}) {
    const int dim = side == Side::key ? shape.key_dim : shape.value_dim;
    const std::vector<float> rows(cells.size() * static_cast<std::size_t>(shape.kv_heads) *
                                  static_cast<std::size_t>(dim));
    store.write(side, cells, dense_view(rows.data(), DType::f32, recipe.page, shape.kv_heads, dim));
  }
  store.seal_ready(1);
  StoreBytes bytes = store.bytes();
  bytes.tables -= empty_tables;
  return bytes;
}

void add_sealed(const CacheShape& shape, const Recipe& recipe, std::int64_t layers, std::int64_t pages,
                Estimate& estimate) {
  if (pages <= 0) return;
  Recipe plain = recipe;
  plain.sink = 0;
  const StoreBytes first = sealed_page_bytes(recipe, shape);
  const StoreBytes others = sealed_page_bytes(plain, shape);
  const auto count = static_cast<std::uint64_t>(layers);
  const auto rest = static_cast<std::uint64_t>(pages - 1);
  estimate.sealed += count * (first.sealed + rest * others.sealed);
  estimate.open += count * first.open;  // a first page of sinks only is never sealed
  estimate.exact += count * (first.exact + rest * others.exact);
  estimate.tables += count * (first.tables + rest * others.tables);
}

std::int64_t sealed_pages(const Recipe& recipe, std::int64_t tokens) {
  return recipe.quantizes() ? std::max<std::int64_t>(0, (tokens - recipe.window) / recipe.page) : 0;
}

std::int64_t started_pages(const Recipe& recipe, std::int64_t tokens) {
  return (tokens + recipe.page - 1) / recipe.page;
}

std::int64_t open_pages(const Recipe& recipe, std::int64_t tokens) {
  return started_pages(recipe, tokens) - sealed_pages(recipe, tokens);
}

// The most pages of `layers` equal layers that are open at once while `tokens` tokens come in micro-batches. Each layer
// seals after it has attended, before the next layer writes; what was open once stays allocated for reuse.
std::int64_t most_open_pages(const Recipe& recipe, std::int64_t layers, std::int64_t tokens, std::int64_t ubatch) {
  std::int64_t most = layers;  // the host's warm-up opens a page in every layer
  for (std::int64_t first = 0; first < tokens; first += ubatch) {
    const std::int64_t end = std::min(tokens, first + ubatch);
    const std::int64_t before = open_pages(recipe, first);
    const std::int64_t during = started_pages(recipe, end) - sealed_pages(recipe, first);
    const std::int64_t settled = std::max(before, open_pages(recipe, end));
    most = std::max(most, (layers - 1) * settled + during);
  }
  return most;
}

// The terms of equal layers. Tokens fill cells in order; a page is sealed once `window` newer tokens exist.
void add_layers(const LayerShape& layer, std::int64_t layers, const Recipe& recipe, std::int64_t cells,
                std::int64_t tokens, std::int64_t ubatch, Estimate& estimate) {
  const CacheShape shape{layer.kv_heads, layer.key_dim, layer.value_dim, DType::f16};
  const PageLayout layout = make_layout(recipe, shape);
  const std::size_t open_page = layout.open_bytes + layout.query_bytes;
  add_sealed(shape, recipe, layers, sealed_pages(recipe, tokens), estimate);
  const std::int64_t open = most_open_pages(recipe, layers, tokens, ubatch);
  estimate.open += static_cast<std::uint64_t>(open) * open_page;
  // Generated tokens come one by one: then every layer reaches window + page - 1 open tokens.
  const std::int64_t reachable = started_pages(recipe, std::min<std::int64_t>(tokens, recipe.window + recipe.page));
  const std::int64_t decoding = recipe.quantizes() ? layers * reachable : open;
  estimate.decoding += static_cast<std::uint64_t>(std::max<std::int64_t>(0, decoding - open)) * open_page;
  PageStore empty(recipe, shape, cells);
  set_any_rotation(empty);
  estimate.tables += static_cast<std::uint64_t>(layers) * empty.bytes().tables;
  const std::uint64_t values = static_cast<std::uint64_t>(layers) * values_of(layer, tokens);
  estimate.values += values;
  estimate.bits_asymptotic += static_cast<double>(values) * (recipe.quantizes() ? layout.bits_per_value : 16.0);
}

void average_bits(Estimate& estimate) {
  if (estimate.values > 0) estimate.bits_asymptotic /= static_cast<double>(estimate.values);
}

}  // namespace

Estimate estimate_recipe(const ModelShape& model, const LayerRecipes& recipes, std::int64_t context,
                         std::int64_t ubatch) {
  Estimate estimate;
  std::vector<std::pair<LayerShape, Recipe>> kinds;  // of layers, each once
  std::vector<std::int64_t> counts;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    std::pair<LayerShape, Recipe> kind(model.layers[i], recipes.at(model.numbers[i]));
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    if (found == kinds.end()) {
      kinds.push_back(std::move(kind));
      counts.push_back(1);
    } else {
      ++counts[static_cast<std::size_t>(found - kinds.begin())];
    }
  }
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const auto& [layer, recipe] = kinds[i];
    const std::int64_t cells = layer_cells(layer, context, ubatch);
    add_layers(layer, counts[i], recipe, cells, std::min(context, cells), ubatch, estimate);
  }
  average_bits(estimate);
  return estimate;
}

Estimate estimate_stock(const ModelShape& model, std::string_view key_type, std::string_view value_type,
                        std::int64_t context, std::int64_t ubatch) {
  Estimate estimate;
  for (const LayerShape& layer : model.layers) {
    const std::int64_t cells = layer_cells(layer, context, ubatch);
    const double per_cell =
        layer.kv_heads * (layer.key_dim * stock_bits(key_type) + layer.value_dim * stock_bits(value_type)) / 8;
    estimate.open += static_cast<std::uint64_t>(per_cell * static_cast<double>(cells));
    const std::uint64_t values = values_of(layer, cells);
    estimate.values += values;
    estimate.bits_asymptotic += per_cell * 8 * static_cast<double>(values) / static_cast<double>(values_of(layer, 1));
  }
  average_bits(estimate);
  return estimate;
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::uint64_t kilobytes = 0;
    if (word == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

}  // namespace kvant::cli
