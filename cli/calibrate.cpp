// kvant calibrate: levels and key ranges of a model for the kvquant recipe, from rows that an unmodified llama.cpp
// writes into the plug-in.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "cli/host.hpp"
#include "cli/model.hpp"
#include "cli/paths.hpp"
#include "cli/process.hpp"
#include "cli/progress.hpp"
#include "cli/recorded.hpp"
#include "cli/table.hpp"
#include "kvant/calibration.hpp"

namespace kvant::cli {
namespace {

struct CalibrateOptions {
  std::string model;
  std::string text;
  std::string output;
  std::string rows;
  std::string fisher;
  int chunks = 16;
  std::int64_t context = 2048;
  double outliers = 0.01;
  std::string rope = "after";
  int threads = 0;
  std::string plugin;
  std::string tools;
};

constexpr std::int64_t kSinks = 1;  // the first token of a chunk, which the recipe does not quantize either

void check_space(const CalibrateOptions& options, const ModelShape& model, const std::filesystem::path& rows) {
  std::uint64_t values = 0;
  for (const LayerShape& layer : model.layers) {
    values += static_cast<std::uint64_t>(layer.kv_heads) * static_cast<std::uint64_t>(layer.key_dim + layer.value_dim);
  }
  const std::uint64_t needed = 2 * values * static_cast<std::uint64_t>(options.chunks * options.context);
  std::error_code error;
  const auto space = std::filesystem::space(std::filesystem::absolute(rows).parent_path(), error);
  if (!error && space.available < needed) {
    throw CliError(Exit::io,
                   fmt::format("the rows need {} in {}, which has {} free; set TMPDIR or lower --chunks",
                               human_bytes(needed), rows.parent_path().string(), human_bytes(space.available)));
  }
}

void record(const CalibrateOptions& options, const std::filesystem::path& scratch, const std::filesystem::path& rows) {
  const Tool tool = find_tool("llama-perplexity", options.tools);
  const std::string context = std::to_string(options.context);
  const std::vector<std::string> arguments = {"-m",         options.model,
                                              "-f",         options.text,
                                              "-c",         context,
                                              "-b",         context,
                                              "-t",         std::to_string(options.threads),
                                              "-fa",        "on",
                                              "--chunks",   std::to_string(options.chunks),
                                              "--no-warmup"};
  PluginSettings settings{find_plugin(options.plugin), "f16", ""};
  settings.record = std::filesystem::absolute(rows).string();
  settings.record_rope = options.rope;
  Progress progress(1);
  const Outcome outcome =
      run_captured(plugin_command(tool, arguments, settings), scratch, progress.step("llama-perplexity, recording"));
  const std::string output = outcome.out + outcome.err;
  if (output.find("you need at least") != std::string::npos) {
    throw CliError(Exit::bad_input,
                   fmt::format("{} is too short: chunks of {} tokens need a text of at least {} tokens", options.text,
                               options.context, 2 * options.context));
  }
  // The host ends with 0 when an evaluation fails; the rows up to there would be taken for all of them.
  const bool failed = outcome.exit_code != 0 || output.find("failed to decode") != std::string::npos;
  if (failed || !std::filesystem::exists(rows)) {
    throw CliError(Exit::child_failed,
                   fmt::format("llama-perplexity ended with exit code {} and recorded {}:\n{}", outcome.exit_code,
                               std::filesystem::exists(rows) ? "rows" : "nothing", outcome.err));
  }
  progress.done(outcome.seconds, human_bytes(std::filesystem::file_size(rows)));
}

// Weights have to be those of the recorded rows, one for one.
std::vector<float> read_weights(RecordedRows& fisher, int layer, int side, std::size_t values) {
  std::vector<float> weights = fisher.read(layer, side, kSinks);
  if (weights.size() == values) return weights;
  throw CliError(Exit::bad_input, fmt::format("--fisher has {} weights for the {} of layer {}; {} values were recorded",
                                              weights.size(), side == 0 ? "keys" : "values", layer, values));
}

LayerCalibration calibrate(RecordedRows& recorded, RecordedRows* fisher, int layer, const CalibrateOptions& options,
                           std::int64_t& tokens) {
  const RecordedRows::Heads key = recorded.heads(layer, 0);
  const RecordedRows::Heads value = recorded.heads(layer, 1);
  const std::vector<float> keys = recorded.read(layer, 0, kSinks);
  const std::vector<float> values = recorded.read(layer, 1, kSinks);
  CalibrationRows rows{key.count, key.dim, value.dim, 0, keys.data(), values.data(), nullptr, nullptr};
  rows.tokens = static_cast<std::int64_t>(keys.size()) / (key.count * key.dim);
  if (value.count != key.count || static_cast<std::int64_t>(values.size()) != rows.tokens * value.count * value.dim) {
    throw CliError(Exit::bad_input, fmt::format("layer {} has other counts of keys than of values", layer));
  }
  std::vector<float> key_weights, value_weights;
  if (fisher != nullptr) {
    key_weights = read_weights(*fisher, layer, 0, keys.size());
    value_weights = read_weights(*fisher, layer, 1, values.size());
    rows.key_weights = key_weights.data();
    rows.value_weights = value_weights.data();
  }
  tokens = rows.tokens;
  return calibrate_layer(layer, rows, options.outliers);
}

void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file.good()) throw CliError(Exit::io, fmt::format("cannot write {}", path));
}

void execute(CalibrateOptions options) {
  const ModelShape model = read_model(options.model);
  check_output(options.output);
  std::optional<RecordedRows> fisher;
  if (!options.fisher.empty()) fisher.emplace(options.fisher);
  if (options.threads == 0) options.threads = available_processors();
  const TemporaryDir scratch;
  const std::filesystem::path rows =
      options.rows.empty() ? scratch.path() / "rows" : std::filesystem::path(options.rows);
  check_space(options, model, rows);
  std::filesystem::remove(rows);
  record(options, scratch.path(), rows);
  RecordedRows recorded(rows);
  if (recorded.layers().size() != model.layers.size()) {
    throw CliError(Exit::unsupported, fmt::format("{} of the model's {} layers were recorded; the others are no keys "
                                                  "and values of attention that the plug-in holds",
                                                  recorded.layers().size(), model.layers.size()));
  }
  Calibration calibration;
  calibration.model = model.name;
  calibration.architecture = model.architecture;
  calibration.text = std::filesystem::path(options.text).filename().string();
  calibration.outliers = options.outliers;
  calibration.before_rope = options.rope == "before";
  calibration.weighted = fisher.has_value();
  for (const int layer : recorded.layers()) {
    throw_if_interrupted();
    calibration.layers.push_back(calibrate(recorded, fisher ? &*fisher : nullptr, layer, options, calibration.tokens));
  }
  write_file(options.output, to_bytes(calibration));
  fmt::print("{}\n", options.output);
}

}  // namespace

void add_calibrate(CLI::App& app) {
  auto options = std::make_shared<CalibrateOptions>();
  CLI::App* calibrate = app.add_subcommand("calibrate", "Learn levels and ranges of a model for the kvquant recipe");
  calibrate->add_option("-m,--model", options->model, "The model, a GGUF file")->required()->check(CLI::ExistingFile);
  calibrate->add_option("-f,--file", options->text, "Text to run the model on")->required()->check(CLI::ExistingFile);
  calibrate->add_option("-o,--output", options->output, "The file that recipes name with file=")->required();
  calibrate->add_option("--chunks", options->chunks, "Chunks of text")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  calibrate->add_option("-c,--ctx-size", options->context, "Tokens of a chunk")
      ->check(CLI::Range(std::int64_t{8}, std::int64_t{1} << 24))
      ->capture_default_str();
  calibrate->add_option("--outliers", options->outliers, "Share of each vector that ranges leave out")
      ->check(CLI::Range(0.0, 0.1))
      ->capture_default_str();
  calibrate->add_option("--rope", options->rope, "Keys before or after RoPE: before is for recipes with rope=before")
      ->check(CLI::IsMember({"before", "after"}))
      ->capture_default_str();
  calibrate->add_option("--rows", options->rows, "Keep the recorded rows in this file");
  calibrate->add_option("--fisher", options->fisher, "Weights: squared gradients in a file like that of --rows")
      ->check(CLI::ExistingFile);
  calibrate->add_option("-t,--threads", options->threads, "Threads (default: every processor)")
      ->check(CLI::Range(1, 4096));
  calibrate->add_option("--plugin", options->plugin, "The plug-in (default: KVANT_PLUGIN, else beside this program)");
  calibrate->add_option("--tools", options->tools,
                        "Folder of llama.cpp's programs (default: KVANT_LLAMA_DIR, then PATH)");
  calibrate->callback([options] { execute(*options); });
}

}  // namespace kvant::cli
