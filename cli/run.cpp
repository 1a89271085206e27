// kvant run: any program of llama.cpp with its KV cache held by kvant.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include "cli/calibrations.hpp"
#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "cli/host.hpp"
#include "cli/recipes.hpp"

namespace kvant::cli {
namespace {

struct RunOptions {
  std::string recipe;
  std::string status;
  std::string plugin;
  std::string tools;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The file behind -m or --model, or that of the environment; empty when the program finds its model in another way.
std::string model_of(const std::vector<std::string>& program) {
  for (std::size_t i = 1; i + 1 < program.size(); ++i) {
    if (program[i] == "-m" || program[i] == "--model") return program[i + 1];
  }
  const char* inherited = std::getenv("LLAMA_ARG_MODEL");
  return inherited == nullptr ? "" : inherited;
}

void check_model(const LayerRecipes& recipes, const std::vector<std::string>& program) {
  if (!has_calibration(recipes)) return;
  const std::string model = model_of(program);
  if (!model.empty()) return check_calibrations(recipes, read_model(model));
  fmt::print(stderr, "kvant: the program names no model file (-m), so the calibration's model is not checked\n");
}

LayerRecipes find_recipe(const RunOptions& options) {
  const char* inherited = std::getenv("KVANT_RECIPE");
  std::string text = options.recipe;
  if (text.empty()) text = inherited == nullptr || *inherited == '\0' ? std::string(kDefaultRecipe) : inherited;
  const RowSpec row = parse_row(text);
  if (row.stock()) throw CliError(Exit::usage, fmt::format("'{}' needs no kvant: run the program itself", text));
  return *row.recipe;
}

void execute(const RunOptions& options, const std::vector<std::string>& program) {
  PluginSettings settings;
  const LayerRecipes recipes = find_recipe(options);
  settings.recipe = to_text(recipes);
  if (program.empty()) throw CliError(Exit::usage, "no program: kvant run [options] -- llama-server -m model.gguf ...");
  check_model(recipes, program);
  settings.plugin = find_plugin(options.plugin);
  settings.status = options.status.empty() ? environment("KVANT_STATUS") : options.status;
  settings.record = environment("KVANT_RECORD");
  settings.record_rope = environment("KVANT_RECORD_ROPE");
  // The program may change its working directory; "stderr" is a word of the plug-in, not a file.
  if (!settings.status.empty() && settings.status != "stderr") {
    settings.status = std::filesystem::absolute(settings.status).string();
  }
  const Tool tool = find_tool(program.front(), options.tools);
  replace_process(plugin_command(tool, {program.begin() + 1, program.end()}, settings));
}

}  // namespace

void add_run(CLI::App& app, const std::vector<std::string>& program) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* run = app.add_subcommand("run", "Run a program of llama.cpp with its KV cache held by kvant");
  run->footer("kvant run [OPTIONS] -- PROGRAM [ARGUMENTS...]\nEverything behind -- is the program's.");
  run->add_option("-r,--recipe", options->recipe,
                  "Recipe of the cache (default: KVANT_RECIPE, else " + std::string(kDefaultRecipe) + ")");
  run->add_option("--status", options->status, "Where the plug-in writes its status: a path, or stderr");
  run->add_option("--plugin", options->plugin, "The plug-in (default: KVANT_PLUGIN, else beside this program)");
  run->add_option("--tools", options->tools, "Folder of the programs (default: KVANT_LLAMA_DIR, then PATH)");
  run->callback([options, &program] { execute(*options, program); });
}

}  // namespace kvant::cli
