// kvant tune: a recipe per layer, from measured KL divergences, with the lowest divergence at a mean number of bits.
#include "cli/tune.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "cli/calibrations.hpp"
#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "cli/paths.hpp"
#include "cli/table.hpp"
#include "kvant/layout.hpp"

namespace kvant::cli {
namespace {

struct TuneOptions : CompareOptions {
  double bits = 0;
  std::string ladder;
  std::string output;
  int group = 1;  // neighbouring layers that are measured together
};

double values_of(const LayerShape& layer) {
  return layer.kv_heads * (layer.key_dim + layer.value_dim);
}

double bits_of(const LayerShape& layer, const Recipe& recipe) {
  const CacheShape shape{layer.kv_heads, layer.key_dim, layer.value_dim, DType::f16};
  return make_layout(recipe, shape).bits_per_value;
}

// Calibrated recipes differ from layer to layer.
Recipe of_layer(const Recipe& recipe, int layer) {
  return LayerRecipes{{{0, kAllLayers, recipe}}}.at(layer);
}

RowSpec row_of(const LayerRecipes& recipes) {
  RowSpec row;
  row.text = to_text(recipes);
  row.recipe = recipes;
  return row;
}

class Tuner {
 public:
  Tuner(const CompareContext& context, const QualityBase& base, std::vector<Recipe> ladder, int group)
      : context_(context), base_(base), ladder_(std::move(ladder)), group_(group) {}

  // Groups of layers on the lowest rung, all layers together on every rung, and the control that shows the floor.
  Sensitivity measure() const {
    Sensitivity s;
    const Recipe control = parse_recipe("f16");
    s.floor = kld(LayerRecipes{{{0, kAllLayers, control}}});
    for (int first = 0; first < layers(); first += group_) {
      const int last = std::min(first + group_, layers()) - 1;
      const double together = kld(LayerRecipes{{{number(first), number(last), ladder_[0]}, {0, kAllLayers, control}}});
      const int count = last - first + 1;
      s.layer.insert(s.layer.end(), static_cast<std::size_t>(count), s.floor + (together - s.floor) / count);
    }
    for (const Recipe& rung : ladder_) s.rung.push_back(kld(LayerRecipes{{{0, kAllLayers, rung}}}));
    return s;
  }

  double kld(const LayerRecipes& recipes) const {
    CompareRow row;
    row.spec = row_of(recipes);
    const double kld = measure_row(context_, base_, context_.options.chunks, row).kld;
    check_held(row);
    return kld;
  }

  LayerRecipes recipes_for(const std::vector<int>& rungs) const {
    LayerRecipes recipes;
    for (int layer = 0; layer < layers();) {
      int end = layer;
      while (end + 1 < layers() && rungs[static_cast<std::size_t>(end + 1)] == rungs[static_cast<std::size_t>(layer)]) {
        ++end;
      }
      const int last = end + 1 == layers() ? kAllLayers : number(end);
      recipes.rules.push_back({last == kAllLayers ? 0 : number(layer), last,
                               ladder_[static_cast<std::size_t>(rungs[static_cast<std::size_t>(layer)])]});
      layer = end + 1;
    }
    return recipes;
  }

  int layers() const { return static_cast<int>(context_.model.layers.size()); }

 private:
  // Layers that the host kept look as if no recipe could harm them.
  void check_held(const CompareRow& row) const {
    const std::size_t held = row.status.value("layers", Json::array()).size();
    if (held == context_.model.layers.size() || (held > 0 && context_.model.recurrent)) return;
    throw CliError(Exit::unsupported,
                   fmt::format("recipe {}: the plug-in held {} of the model's {} layers; kvant compare says why",
                               row.spec.text, held, context_.model.layers.size()));
  }

  int number(int layer) const { return context_.model.numbers[static_cast<std::size_t>(layer)]; }

  const CompareContext& context_;
  const QualityBase& base_;
  std::vector<Recipe> ladder_;
  int group_;
};

std::vector<Recipe> read_ladder(const TuneOptions& options) {
  std::vector<Recipe> ladder;
  for (const LayerRecipes& recipes : parse_recipe_lists({options.ladder})) {
    if (recipes.rules.size() != 1) throw CliError(Exit::usage, "--ladder takes recipes without layers=");
    ladder.push_back(recipes.rules[0].recipe);
  }
  return ladder;
}

void write_recipe(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::trunc);
  file << text << '\n';
  file.close();
  if (!file.good()) throw CliError(Exit::io, fmt::format("cannot write {}", path));
}

void report(const std::vector<TunedRow>& rows) {
  Table table({"recipe", "bits", "KLD"});
  for (const TunedRow& row : rows)
    table.add({row.text, fmt::format("{:.3f}", row.bits), fmt::format("{:.5f}", row.kld)});
  fmt::print(stderr, "{}", table.text());
}

void execute(TuneOptions options) {
  const ModelShape model = read_model(options.model);
  if (model.layers.empty()) throw CliError(Exit::unsupported, fmt::format("{} has no KV cache", options.model));
  std::vector<Recipe> ladder = read_ladder(options);
  for (const Recipe& recipe : ladder) check_calibrations({{{0, kAllLayers, recipe}}}, model);
  const RungCosts costs = rung_costs(model, ladder);
  const std::vector<int> uniform = best_uniform(costs, options.bits);
  if (options.threads == 0) options.threads = available_processors();
  if (!options.output.empty()) check_output(options.output);
  const TemporaryDir scratch;
  const int layers = static_cast<int>(model.layers.size());
  // The base, the control, groups, rungs, and the two candidates.
  Progress progress(4 + (layers + options.group - 1) / options.group + static_cast<int>(ladder.size()));
  const CompareContext context{options, model, find_plugin(options.plugin), scratch.path(), progress};
  const QualityBase base = save_base(context);
  const Tuner tuner(context, base, ladder, options.group);
  const Sensitivity sensitivity = tuner.measure();
  const std::vector<int> mixed = allocate(costs, sensitivity, options.bits);
  std::vector<TunedRow> rows;
  for (const std::vector<int>& rungs : {uniform, mixed}) {
    const LayerRecipes recipes = tuner.recipes_for(rungs);
    rows.push_back({to_text(recipes), mean_bits(costs, rungs), tuner.kld(recipes)});
  }
  report(rows);
  const TunedRow& best = rows[1].kld < rows[0].kld ? rows[1] : rows[0];
  write_recipe(options.output, best.text);
  fmt::print("{}\n", best.text);
}

void add_options(CLI::App& app, TuneOptions& options) {
  options.context = 512;
  options.chunks = 4;
  app.add_option("-m,--model", options.model, "The model, a GGUF file")->required()->check(CLI::ExistingFile);
  app.add_option("-f,--file", options.text, "Text to evaluate on")->required()->check(CLI::ExistingFile);
  app.add_option("-b,--bits", options.bits, "Mean bits per value of sealed pages that may be spent")
      ->required()
      ->check(CLI::Range(1.0, 16.0));
  app.add_option("-o,--output", options.output, "File that the recipe is written to, beside standard output");
  app.add_option("--ladder", options.ladder, "Recipes that layers may get, in any order")->capture_default_str();
  app.add_option("--group", options.group, "Neighbouring layers to measure together; more is quicker and coarser")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("-c,--ctx-size", options.context, "Tokens of a chunk of the text")
      ->check(CLI::Range(std::int64_t{8}, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--ubatch", options.ubatch, "Tokens that are attended at a time")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--chunks", options.chunks, "Chunks of text to evaluate")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  app.add_option("-t,--threads", options.threads, "Threads (default: every processor)")->check(CLI::Range(1, 4096));
  app.add_option("--plugin", options.plugin, "The plug-in (default: KVANT_PLUGIN, else beside this program)");
  app.add_option("--tools", options.tools, "Folder of llama.cpp's programs (default: KVANT_LLAMA_DIR, then PATH)");
}

}  // namespace

RungCosts rung_costs(const ModelShape& model, std::vector<Recipe>& ladder) {
  const auto cost = [&](const Recipe& recipe) {
    double bits = 0;
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
      bits += bits_of(model.layers[i], of_layer(recipe, model.numbers[i])) * values_of(model.layers[i]);
    }
    return bits;
  };
  std::sort(ladder.begin(), ladder.end(), [&](const Recipe& a, const Recipe& b) { return cost(a) < cost(b); });
  RungCosts costs;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const LayerShape& layer = model.layers[i];
    std::vector<double> bits;
    for (const Recipe& recipe : ladder) {
      bits.push_back(bits_of(layer, of_layer(recipe, model.numbers[i])) * values_of(layer));
    }
    costs.layer_bits.push_back(std::move(bits));
    costs.values += values_of(layer);
  }
  return costs;
}

double mean_bits(const RungCosts& costs, const std::vector<int>& rungs) {
  double bits = 0;
  for (std::size_t i = 0; i < rungs.size(); ++i) bits += costs.layer_bits[i][static_cast<std::size_t>(rungs[i])];
  return bits / costs.values;
}

std::vector<int> best_uniform(const RungCosts& costs, double budget) {
  std::vector<int> best;
  for (int rung = 0; rung < static_cast<int>(costs.layer_bits[0].size()); ++rung) {
    const std::vector<int> rungs(costs.layer_bits.size(), rung);
    if (mean_bits(costs, rungs) <= budget) best = rungs;
  }
  if (best.empty()) {
    const double least = mean_bits(costs, std::vector<int>(costs.layer_bits.size(), 0));
    throw CliError(Exit::usage,
                   fmt::format("--bits is {}; the smallest recipe of the ladder needs {:.3f}", budget, least));
  }
  return best;
}

// Layers' errors add up nearly (quality-study.md section 4), and a rung lowers every layer's error by about the same
// factor; so a layer's error on a rung is its own on the lowest one times what the rung does to all layers together.
std::vector<int> allocate(const RungCosts& costs, const Sensitivity& s, double budget) {
  const std::size_t layers = costs.layer_bits.size();
  const auto error = [&](std::size_t layer, int rung) {
    const double whole = std::max(s.rung[0] - s.floor, 1e-9);
    const double share = std::max(s.rung[static_cast<std::size_t>(rung)] - s.floor, 0.0) / whole;
    return std::max(s.layer[layer] - s.floor, 0.0) * share;
  };
  std::vector<int> rungs(layers, 0);
  double spent = mean_bits(costs, rungs);
  while (true) {
    std::size_t best = layers;
    int best_rung = 0;
    double best_gain = 0;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const std::vector<double>& bits = costs.layer_bits[layer];
      for (int rung = rungs[layer] + 1; rung < static_cast<int>(bits.size()); ++rung) {
        const double extra =
            (bits[static_cast<std::size_t>(rung)] - bits[static_cast<std::size_t>(rungs[layer])]) / costs.values;
        if (spent + extra > budget || extra <= 0) continue;
        const double gain = (error(layer, rungs[layer]) - error(layer, rung)) / extra;
        if (gain > best_gain) {
          best_gain = gain;
          best = layer;
          best_rung = rung;
        }
      }
    }
    if (best == layers) return rungs;
    rungs[best] = best_rung;
    spent = mean_bits(costs, rungs);
  }
}

void add_tune(CLI::App& app) {
  auto options = std::make_shared<TuneOptions>();
  options->ladder = std::string(kTuneLadder);
  CLI::App* tune = app.add_subcommand("tune", "Find the recipe per layer with the lowest divergence at a mean of bits");
  add_options(*tune, *options);
  tune->callback([options] { execute(*options); });
}

}  // namespace kvant::cli
