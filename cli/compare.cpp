// kvant compare: what each recipe costs in bytes and quality and what it gives in speed, against stock f16.
#include "cli/compare.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "cli/calibrations.hpp"
#include "cli/commands.hpp"
#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

std::string tail(const std::string& text) {
  constexpr std::size_t kLines = 8;
  std::size_t begin = text.size();
  for (std::size_t lines = 0; begin > 0; --begin) {
    if (text[begin - 1] == '\n' && begin != text.size() && ++lines == kLines) break;
  }
  return text.substr(begin);
}

Json read_status(const std::filesystem::path& path, const RowSpec& spec, const Outcome& outcome) {
  std::ifstream file(path);
  Json status = file ? Json::parse(file, nullptr, false) : Json();
  if (!status.is_object()) {
    throw CliError(Exit::unsupported,
                   fmt::format("recipe {}: the plug-in wrote no status, so the host did not use it. The end of the "
                               "host's messages:\n{}",
                               spec.text, tail(outcome.err)));
  }
  return status;
}

// Layers that the host kept would lend their quality to the recipe, and their bytes would be missing.
void check_held(const CompareContext& context, const RowSpec& spec, const Json& status) {
  const Json passed = status.value("passed_through", Json::array());
  const auto seen = status.value("layers", Json::array()).size() +
                    static_cast<std::size_t>(std::count_if(passed.begin(), passed.end(), [](const Json& entry) {
                      return entry.value("tensor", "").starts_with("cache_k_l");
                    }));
  if (seen >= context.model.layers.size() || (seen > 0 && context.model.recurrent)) return;
  throw CliError(
      Exit::unsupported,
      fmt::format("recipe {}: {} of the model's {} layers came to the plug-in, the host kept the others "
                  "(LLAMA_ARG_N_GPU_LAYERS, LLAMA_ARG_NO_KV_OFFLOAD?); notes: {}",
                  spec.text, seen, context.model.layers.size(),
                  status.value("notes", Json::array()).dump(-1, ' ', false, Json::error_handler_t::replace)));
}

void check_inputs(const CompareOptions& options) {
  for (const std::string& path : {options.model, options.text}) {
    if (access(path.c_str(), R_OK) != 0) throw CliError(Exit::io, fmt::format("cannot read {}", path));
  }
  if (std::filesystem::is_directory(options.text)) {
    throw CliError(Exit::bad_input, fmt::format("{} is a directory", options.text));
  }
  if (options.json && options.markdown) throw CliError(Exit::usage, "choose one of --json and --markdown");
}

void execute(CompareOptions options) {
  const std::vector<RowSpec> specs = parse_rows(options.recipes);
  check_inputs(options);
  if (options.threads == 0) options.threads = available_processors();
  const ModelShape model = read_model(options.model);
  for (const RowSpec& spec : specs) {
    if (spec.recipe) check_calibrations(*spec.recipe, model);
  }
  const bool all_stock = std::all_of(specs.begin(), specs.end(), [](const RowSpec& spec) { return spec.stock(); });
  const TemporaryDir scratch;
  const int speed_steps = options.no_speed ? 0 : options.repeat * static_cast<int>(specs.size());
  Progress progress(quality_steps(options, specs.size()) + speed_steps);
  const CompareContext context{options, model, all_stock ? "" : find_plugin(options.plugin), scratch.path(), progress};
  std::vector<CompareRow> rows(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) rows[i].spec = specs[i];
  options.chunks = measure_quality(context, rows);
  if (!options.no_speed) measure_speed(context, rows);
  if (options.json) {
    fmt::print("{}\n", rows_to_json(context, rows).dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{}", rows_to_text(context, rows));
  }
}

void add_options(CLI::App& app, CompareOptions& options) {
  const auto positive = CLI::Range(1, 1 << 24);
  app.add_option("-m,--model", options.model, "The model, a GGUF file")->required();
  app.add_option("-f,--file", options.text, "Text to evaluate on")->required();
  app.add_option("--recipes,--recipe", options.recipes,
                 "Rows: recipes of kvant and stock:TYPE or stock:KEYS/VALUES, separated by ';', spaces or a comma\n"
                 "that no key= follows. Default: presets and methods between stock types");
  app.add_option("-c,--ctx-size", options.context, "Tokens of a chunk of the text")
      ->check(CLI::Range(std::int64_t{8}, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--ubatch", options.ubatch, "Tokens that are attended at a time")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--chunks", options.chunks, "Chunks of text to evaluate")->check(positive)->capture_default_str();
  app.add_option("--depths", options.depths, "Cache depths at which speed is measured")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("-t,--threads", options.threads, "Threads (default: every processor)")->check(CLI::Range(1, 4096));
  app.add_option("--repeat", options.repeat, "Rounds of speed measurements; medians are shown")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_flag("--no-speed", options.no_speed, "Measure bytes and quality only");
  app.add_flag("--markdown", options.markdown, "Print a Markdown table");
  app.add_flag("--json", options.json, "Print a JSON array with an object for each row");
  app.add_option("--plugin", options.plugin, "The plug-in (default: KVANT_PLUGIN, else beside this program)");
  app.add_option("--tools", options.tools, "Folder of llama.cpp's programs (default: KVANT_LLAMA_DIR, then PATH)");
}

}  // namespace

Outcome run_row(const CompareContext& context, const RowSpec& spec, const Tool& tool,
                const std::vector<std::string>& arguments, Json* status) {
  const std::filesystem::path status_path = context.scratch / "status.json";
  std::filesystem::remove(status_path);
  std::vector<std::string> all = arguments;
  if (spec.stock()) all.insert(all.end(), {"-ctk", spec.key_type, "-ctv", spec.value_type});
  const Command command =
      spec.stock() ? stock_command(tool, all)
                   : plugin_command(tool, all, {context.plugin, to_text(*spec.recipe), status_path.string()});
  const std::string name = tool.program.filename().string();
  const auto tick = context.progress.step(fmt::format("{} {}", name, spec.text));
  Outcome outcome = run_captured(command, context.scratch, tick);
  if (outcome.exit_code != 0) {
    throw CliError(Exit::child_failed, fmt::format("{} for {} ended with exit code {}; the end of its messages:\n{}",
                                                   name, spec.text, outcome.exit_code, tail(outcome.err)));
  }
  if (!spec.stock()) {
    Json written = read_status(status_path, spec, outcome);
    check_held(context, spec, written);
    if (status != nullptr) *status = std::move(written);
  }
  return outcome;
}

void add_compare(CLI::App& app) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* compare =
      app.add_subcommand("compare", "Compare recipes with stock cache types on a model: bytes, quality, speed");
  add_options(*compare, *options);
  compare->callback([options] { execute(*options); });
}

}  // namespace kvant::cli
