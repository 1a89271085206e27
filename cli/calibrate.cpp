// kvant calibrate: levels and key ranges of a model for the kvquant recipe, from rows that an unmodified llama.cpp
// writes into the plug-in.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "cli/host.hpp"
#include "cli/model.hpp"
#include "cli/progress.hpp"
#include "cli/recorded.hpp"
#include "kvant/calibration.hpp"

namespace kvant::cli {
namespace {

struct CalibrateOptions {
  std::string model;
  std::string text;
  std::string output;
  std::string fisher;
  int chunks = 16;
  std::int64_t context = 2048;
  double outliers = 0.01;
  int threads = 0;
  std::string plugin;
  std::string tools;
};

constexpr std::int64_t kSinks = 1;  // first tokens of a chunk, which the recipe does not quantize either

void record(const CalibrateOptions& options, const std::filesystem::path& scratch, const std::filesystem::path& rows,
            Progress& progress) {
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
  settings.record = rows.string();
  const Outcome outcome =
      run_captured(plugin_command(tool, arguments, settings), scratch, progress.step("llama-perplexity, recording"));
  if (outcome.exit_code != 0 || !std::filesystem::exists(rows)) {
    throw CliError(Exit::child_failed,
                   fmt::format("llama-perplexity ended with exit code {} and recorded {}:\n{}", outcome.exit_code,
                               std::filesystem::exists(rows) ? "rows" : "nothing", outcome.err));
  }
  progress.done(outcome.seconds, fmt::format("{} bytes", std::filesystem::file_size(rows)));
}

// Weights have to be those of the recorded rows, one for one.
void check_weights(const std::vector<float>& rows, const std::vector<float>& weights, int layer) {
  if (rows.size() == weights.size()) return;
  throw CliError(Exit::bad_input, fmt::format("--fisher has {} weights for layer {}; {} values were recorded",
                                              weights.size(), layer, rows.size()));
}

LayerCalibration calibrate(RecordedRows& recorded, RecordedRows* fisher, int layer, double outliers) {
  const std::vector<float> keys = recorded.read(layer, 0, kSinks);
  const std::vector<float> values = recorded.read(layer, 1, kSinks);
  const RecordedRows::Heads key = recorded.heads(layer, 0);
  CalibrationRows rows{key.count, key.dim, recorded.heads(layer, 1).dim, 0, keys.data(), values.data(),
                       nullptr,   nullptr};
  const auto width = static_cast<std::size_t>(key.count) * static_cast<std::size_t>(key.dim);
  rows.tokens = static_cast<std::int64_t>(keys.size() / width);
  const auto value_width = static_cast<std::size_t>(key.count) * static_cast<std::size_t>(rows.value_dim);
  if (values.size() != static_cast<std::size_t>(rows.tokens) * value_width) {
    throw CliError(Exit::bad_input, fmt::format("layer {} has other counts of keys and values", layer));
  }
  std::vector<float> key_weights, value_weights;
  if (fisher != nullptr) {
    key_weights = fisher->read(layer, 0, kSinks);
    value_weights = fisher->read(layer, 1, kSinks);
    check_weights(keys, key_weights, layer);
    check_weights(values, value_weights, layer);
    rows.key_weights = key_weights.data();
    rows.value_weights = value_weights.data();
  }
  return calibrate_layer(layer, rows, outliers);
}

void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file.good()) throw CliError(Exit::io, fmt::format("cannot write {}", path));
}

void execute(CalibrateOptions options) {
  const ModelShape model = read_model(options.model);
  if (options.threads == 0) options.threads = available_processors();
  const TemporaryDir scratch;
  const std::filesystem::path rows = scratch.path() / "rows";
  Progress progress(1);
  record(options, scratch.path(), rows, progress);
  RecordedRows recorded(rows);
  std::optional<RecordedRows> fisher;
  if (!options.fisher.empty()) fisher.emplace(options.fisher);
  Calibration calibration;
  calibration.model = model.name;
  calibration.architecture = model.architecture;
  calibration.text = std::filesystem::path(options.text).filename().string();
  calibration.outliers = options.outliers;
  calibration.weighted = fisher.has_value();
  for (const int layer : recorded.layers()) {
    calibration.layers.push_back(calibrate(recorded, fisher ? &*fisher : nullptr, layer, options.outliers));
  }
  if (calibration.layers.size() != model.layers.size()) {
    throw CliError(Exit::bad_input, fmt::format("{} of the model's {} layers were recorded", calibration.layers.size(),
                                                model.layers.size()));
  }
  calibration.tokens = static_cast<std::int64_t>(options.chunks) * (options.context - kSinks);
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
  calibrate
      ->add_option("--fisher", options->fisher, "Weights: a file of recorded rows with squared gradients as values")
      ->check(CLI::ExistingFile);
  calibrate->add_option("-t,--threads", options->threads, "Threads (default: every processor)")
      ->check(CLI::Range(1, 4096));
  calibrate->add_option("--plugin", options->plugin, "The plug-in (default: KVANT_PLUGIN, else beside this program)");
  calibrate->add_option("--tools", options->tools,
                        "Folder of llama.cpp's programs (default: KVANT_LLAMA_DIR, then PATH)");
  calibrate->callback([options] { execute(*options); });
}

}  // namespace kvant::cli
