#include "cli/estimate.hpp"

#include <algorithm>
#include <fstream>

#include "cli/recipes.hpp"
#include "kvant/layout.hpp"
#include "kvant/page_store.hpp"

namespace kvant::cli {
namespace {

std::uint64_t values_of(const LayerShape& layer, std::int64_t tokens) {
  return static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(layer.kv_heads) *
         static_cast<std::uint64_t>(layer.key_dim + layer.value_dim);
}

// The terms of one layer. Tokens fill cells in order; a page is sealed once `window` newer tokens exist.
void add_layer(const LayerShape& layer, const Recipe& recipe, std::int64_t cells, std::int64_t tokens,
               Estimate& estimate) {
  const CacheShape shape{layer.kv_heads, layer.key_dim, layer.value_dim, DType::f16};
  const PageLayout layout = make_layout(recipe, shape);
  const std::int64_t pages = (tokens + recipe.page - 1) / recipe.page;
  const std::int64_t sealed =
      recipe.quantizes() ? std::max<std::int64_t>(0, (tokens - recipe.window) / recipe.page) : 0;
  estimate.sealed += static_cast<std::uint64_t>(sealed) * layout.page_bytes;
  estimate.open += static_cast<std::uint64_t>(pages - sealed) * layout.open_bytes;
  if (sealed > 0) estimate.exact += static_cast<std::uint64_t>((recipe.sink + 15) / 16) * layout.exact_bytes_per_16;
  estimate.tables += PageStore(recipe, shape, cells).bytes().tables;
  const std::uint64_t values = values_of(layer, tokens);
  estimate.values += values;
  estimate.bits_asymptotic += static_cast<double>(values) * (recipe.quantizes() ? layout.bits_per_value : 16.0);
}

void average_bits(Estimate& estimate) {
  if (estimate.values > 0) estimate.bits_asymptotic /= static_cast<double>(estimate.values);
}

}  // namespace

Estimate estimate_recipe(const ModelShape& model, const Recipe& recipe, std::int64_t context, std::int64_t ubatch) {
  Estimate estimate;
  for (const LayerShape& layer : model.layers) {
    const std::int64_t cells = layer_cells(layer, context, ubatch);
    add_layer(layer, recipe, cells, std::min(context, cells), estimate);
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
    estimate.bits_asymptotic +=
        per_cell * 8 * static_cast<double>(values) / (layer.kv_heads * (layer.key_dim + layer.value_dim));
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
