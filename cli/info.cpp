// kvant info: what this build and machine can do, and what a recipe costs for a model.
#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "cli/estimate.hpp"
#include "cli/process.hpp"
#include "cli/recipes.hpp"
#include "cli/table.hpp"
#include "kvant/runtime.hpp"

namespace kvant::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InfoOptions {
  std::string model;
  std::int64_t context = 0;
  std::int64_t ubatch = 512;
  std::vector<std::string> recipes;
  bool json = false;
};

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

Json machine_json() {
  Json result = {{"version", version()},      {"cpu", cpu_name()},         {"processors", available_processors()},
                 {"kernels", kernel_names()}, {"kernel", active_kernel()}, {"presets", Json::array()},
                 {"methods", Json::array()}};
  for (const PresetInfo& preset : presets()) {
    result["presets"].push_back({{"name", preset.name}, {"summary", preset.summary}, {"recipe", preset.recipe}});
  }
  for (const MethodInfo& method : methods()) {
    result["methods"].push_back({{"name", method.name},
                                 {"summary", method.summary},
                                 {"default_recipe", method.default_recipe},
                                 {"keys", method.keys}});
  }
  return result;
}

void print_machine() {
  fmt::print("kvant      {}\n", version());
  fmt::print("CPU        {}, {} processors\n", cpu_name(), available_processors());
  fmt::print("kernels    {} (in use: {})\n\n", joined(kernel_names()), active_kernel());
  for (const PresetInfo& preset : presets()) {
    fmt::print("{}: {}\n  recipe   {}\n", preset.name, preset.summary, preset.recipe);
  }
  for (const MethodInfo& method : methods()) {
    fmt::print("{}: {}\n  default  {}\n", method.name, method.summary, method.default_recipe);
    if (!method.keys.empty()) fmt::print("  keys     {}\n", joined(method.keys));
  }
  fmt::print("\nWhat a recipe costs for a model: kvant info -m MODEL -c CONTEXT\n");
}

struct CostRow {
  std::string recipe;
  Estimate estimate;
  bool fits = true;
};

std::vector<CostRow> cost_rows(const InfoOptions& options, const ModelShape& model, std::int64_t context,
                               std::uint64_t available) {
  std::vector<CostRow> rows;
  rows.push_back({"stock:f16", estimate_stock(model, "f16", "f16", context, options.ubatch), true});
  for (const LayerRecipes& recipe : parse_recipe_lists(options.recipes)) {
    rows.push_back({to_text(recipe), estimate_recipe(model, recipe, context, options.ubatch), true});
  }
  for (CostRow& row : rows) {
    const std::uint64_t needed = row.estimate.total() + row.estimate.decoding + model.file_bytes;
    row.fits = available == 0 || needed <= available;
  }
  return rows;
}

Json layer_groups(const ModelShape& model) {
  Json groups = Json::array();
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const LayerShape& layer = model.layers[i];
    const bool repeated = i > 0 && model.layers[i - 1] == layer;
    if (!repeated) {
      groups.push_back({{"layers", 0},
                        {"kv_heads", layer.kv_heads},
                        {"key_dim", layer.key_dim},
                        {"value_dim", layer.value_dim},
                        {"window", layer.window}});
    }
    groups.back()["layers"] = groups.back()["layers"].get<int>() + 1;
  }
  return groups;
}

Json costs_json(const ModelShape& model, const std::vector<CostRow>& rows, std::int64_t context,
                std::uint64_t available) {
  Json result = {{"model", model.name},
                 {"architecture", model.architecture},
                 {"file_bytes", model.file_bytes},
                 {"training_context", model.training_context},
                 {"layer_groups", layer_groups(model)},
                 {"context", context},
                 {"available_bytes", available},
                 {"notes", model.notes},
                 {"recipes", Json::array()}};
  for (const CostRow& row : rows) {
    const Estimate& e = row.estimate;
    result["recipes"].push_back({{"recipe", row.recipe},
                                 {"kv_bytes", e.total()},
                                 {"sealed", e.sealed},
                                 {"window", e.open},
                                 {"sinks", e.exact},
                                 {"tables", e.tables},
                                 {"decoding", e.decoding},
                                 {"bits", e.bits()},
                                 {"bits_asymptotic", e.bits_asymptotic},
                                 {"fits", row.fits}});
  }
  return result;
}

void print_model(const ModelShape& model) {
  fmt::print("model      {} ({}), {}, trained for {} tokens\n", model.name.empty() ? "unnamed" : model.name,
             model.architecture, human_bytes(model.file_bytes), model.training_context);
  for (const Json& group : layer_groups(model)) {
    const auto window = group["window"].get<std::int64_t>();
    fmt::print("layers     {} with {} KV heads, keys {} and values {} channels, {}\n", group["layers"].get<int>(),
               group["kv_heads"].get<int>(), group["key_dim"].get<int>(), group["value_dim"].get<int>(),
               window == 0 ? "full attention" : fmt::format("window of {} tokens", window));
  }
}

void print_costs(const ModelShape& model, const std::vector<CostRow>& rows, std::int64_t context, std::int64_t ubatch,
                 std::uint64_t available) {
  print_model(model);
  fmt::print("context    {} tokens, one sequence\n", context);
  fmt::print("memory     {} available; weights and cache must fit in it\n\n", human_bytes(available));
  Table table({"recipe", "KV bytes", "of f16", "bits", "long-run", "sealed", "window", "sinks", "tables", "fits"});
  const auto base = static_cast<double>(rows.front().estimate.total());
  for (const CostRow& row : rows) {
    const Estimate& e = row.estimate;
    table.add({row.recipe, human_bytes(e.total()),
               fmt::format("{:.1f} %", 100.0 * static_cast<double>(e.total()) / base), fmt::format("{:.2f}", e.bits()),
               fmt::format("{:.2f}", e.bits_asymptotic), human_bytes(e.sealed), human_bytes(e.open),
               human_bytes(e.exact), human_bytes(e.tables), row.fits ? "yes" : "no"});
  }
  fmt::print("{}", table.text());
  fmt::print(
      "\nThe prompt fills the context in micro-batches of {} tokens. While tokens are generated one by one, pages are\n"
      "open for longer; \"fits\" counts that too.\n",
      ubatch);
  for (const std::string& note : model.notes) fmt::print("note: {}\n", note);
}

void execute(const InfoOptions& options) {
  if (options.model.empty()) {
    if (!options.recipes.empty() || options.context != 0) throw CliError(Exit::usage, "-c and --recipes need -m MODEL");
    if (options.json) {
      fmt::print("{}\n", machine_json().dump(2));
    } else {
      print_machine();
    }
    return;
  }
  const ModelShape model = read_model(options.model);
  const std::int64_t context = options.context > 0 ? options.context : model.training_context;
  if (context == 0) throw CliError(Exit::usage, "the model names no context length: give -c CONTEXT");
  const std::uint64_t available = available_memory();
  const std::vector<CostRow> rows = cost_rows(options, model, context, available);
  if (options.json) {
    fmt::print("{}\n", costs_json(model, rows, context, available).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    print_costs(model, rows, context, options.ubatch, available);
  }
}

}  // namespace

void add_info(CLI::App& app) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* info = app.add_subcommand("info", "Show the machine, the recipes, and what a recipe costs for a model");
  info->add_option("-m,--model", options->model, "A GGUF file");
  info->add_option("-c,--ctx-size", options->context, "Tokens in the cache (default: what the model was trained for)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  info->add_option("--ubatch", options->ubatch, "Micro-batch of the host; moves how many pages are open")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  info->add_option("--recipes,--recipe", options->recipes, "Recipes to compare (default: presets and methods)");
  info->add_flag("--json", options->json, "Print JSON");
  info->callback([options] { execute(*options); });
}

}  // namespace kvant::cli
