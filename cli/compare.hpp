// The parts of `kvant compare`: options, the measured rows, and the steps that fill them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/host.hpp"
#include "cli/model.hpp"
#include "cli/progress.hpp"
#include "cli/recipes.hpp"

namespace kvant::cli {

using Json = nlohmann::ordered_json;

struct CompareOptions {
  std::string model;
  std::string text;
  std::vector<std::string> recipes;
  std::int64_t context = 2048;
  int ubatch = 128;
  int chunks = 8;
  std::vector<int> depths = {0, 2048};
  int threads = 0;  // 0: every processor
  int repeat = 3;
  bool no_speed = false;
  bool markdown = false;
  bool json = false;
  std::string plugin;
  std::string tools;
};

struct Quality {
  double ppl = 0;
  double kld = 0;
  double kld_p99 = 0;
  double same_top = 100;  // per cent
};

struct CompareRow {
  RowSpec spec;
  Quality quality;
  Json status;  // what the plug-in wrote; null for stock rows
  std::uint64_t rss_bytes = 0;
  std::map<int, double> decode_tps;  // by depth
  std::map<int, double> prefill_tps;
};

// What every step needs to start a program.
struct CompareContext {
  const CompareOptions& options;
  const ModelShape& model;
  std::filesystem::path plugin;  // empty when every row is stock
  std::filesystem::path scratch;
  Progress& progress;
};

// Runs `tool` for a row (with the plug-in unless it is stock) and returns what it printed. Throws
// CliError(child_failed) with the end of its messages. `status` receives the plug-in's status of rows that use it.
Outcome run_row(const CompareContext& context, const RowSpec& spec, const Tool& tool,
                const std::vector<std::string>& arguments, Json* status);

// The saved logits of stock f16, which every other row is measured against.
struct QualityBase {
  Tool tool;
  std::string logits;  // path
  double ppl = 0;
  int chunks = 0;  // that the text had
};
QualityBase save_base(const CompareContext& context);
// Runs the row over `chunks` chunks; also sets its status and memory.
Quality measure_row(const CompareContext& context, const QualityBase& base, int chunks, CompareRow& row);

// Perplexity and KL divergence of every row against the first (stock f16); also the memory where speed is not measured.
// Returns how many chunks the text had.
int measure_quality(const CompareContext& context, std::vector<CompareRow>& rows);
int quality_steps(const CompareOptions& options, std::size_t rows);

// Tokens per second at every depth, in rounds over all rows; medians. Also the memory.
void measure_speed(const CompareContext& context, std::vector<CompareRow>& rows);

// The statistics in the output of llama-perplexity. Throws CliError(child_failed) when one is missing.
Quality parse_kl_statistics(const std::string& output);
double parse_base_ppl(const std::string& output);   // "Mean PPL(base)"
double parse_final_ppl(const std::string& output);  // "Final estimate"

Json rows_to_json(const CompareContext& context, const std::vector<CompareRow>& rows);
std::string rows_to_text(const CompareContext& context, const std::vector<CompareRow>& rows);

}  // namespace kvant::cli
