// Tokens per second through the host's own llama-bench.
#include <fmt/format.h>

#include <algorithm>

#include "cli/compare.hpp"
#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

constexpr int kPromptTokens = 512;
constexpr int kDecodedTokens = 32;

// Every measurement of one row, by depth.
struct Samples {
  std::map<int, std::vector<double>> decode;
  std::map<int, std::vector<double>> prefill;
  std::vector<double> rss;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::map<int, double> medians(const std::map<int, std::vector<double>>& samples) {
  std::map<int, double> result;
  for (const auto& [depth, values] : samples) result[depth] = median(values);
  return result;
}

std::vector<std::string> bench_arguments(const CompareOptions& options) {
  return {"-m",  options.model,
          "-p",  std::to_string(kPromptTokens),
          "-n",  std::to_string(kDecodedTokens),
          "-d",  fmt::format("{}", fmt::join(options.depths, ",")),
          "-t",  std::to_string(options.threads),
          "-r",  "1",
          "-fa", "1",
          "-o",  "json"};
}

void add_samples(const std::string& output, Samples& samples) {
  const Json results = Json::parse(output, nullptr, false);
  if (!results.is_array()) throw CliError(Exit::child_failed, "llama-bench printed no JSON array");
  for (const Json& result : results) {
    auto& target = result.value("n_gen", 0) > 0 ? samples.decode : samples.prefill;
    target[result.value("n_depth", 0)].push_back(result.value("avg_ts", 0.0));
  }
}

}  // namespace

void measure_speed(const CompareContext& context, std::vector<CompareRow>& rows) {
  const Tool tool = find_tool("llama-bench", context.options.tools);
  const std::vector<std::string> arguments = bench_arguments(context.options);
  std::vector<Samples> samples(rows.size());
  // Rounds over all rows, so that a change of the machine's speed meets every row alike.
  for (int round = 0; round < context.options.repeat; ++round) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const Outcome outcome = run_row(context, rows[i].spec, tool, arguments, nullptr);
      add_samples(outcome.out, samples[i]);
      samples[i].rss.push_back(static_cast<double>(outcome.peak_rss_bytes));
      context.progress.done(outcome.seconds, fmt::format("round {}", round + 1));
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].decode_tps = medians(samples[i].decode);
    rows[i].prefill_tps = medians(samples[i].prefill);
    rows[i].rss_bytes = static_cast<std::uint64_t>(median(samples[i].rss));
  }
}

}  // namespace kvant::cli
