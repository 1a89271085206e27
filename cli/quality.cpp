// Perplexity and KL divergence through the host's own llama-perplexity.
#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <system_error>

#include "cli/compare.hpp"
#include "cli/errors.hpp"
#include "cli/table.hpp"

namespace kvant::cli {
namespace {

// The number behind `label`, blanks and ':' or '=' skipped; nothing when no occurrence has one.
std::optional<double> find_number(const std::string& output, const std::string& label) {
  for (std::size_t at = output.find(label); at != std::string::npos; at = output.find(label, at + 1)) {
    std::size_t begin = at + label.size();
    while (begin < output.size() && std::string(" :=").find(output[begin]) != std::string::npos) ++begin;
    double value = 0;
    const auto parsed = std::from_chars(output.data() + begin, output.data() + output.size(), value);
    if (parsed.ec == std::errc()) return value;
  }
  return std::nullopt;
}

double number_after(const std::string& output, const std::string& label) {
  const std::optional<double> value = find_number(output, label);
  if (!value) throw CliError(Exit::child_failed, fmt::format("llama-perplexity printed no number behind '{}'", label));
  return *value;
}

// The host ends without an error when the text is too short for one chunk.
void check_text(const CompareContext& context, const std::string& output) {
  if (output.find("you need at least") == std::string::npos) return;
  throw CliError(Exit::bad_input,
                 fmt::format("{} is too short: chunks of {} tokens need a text of at least {} tokens",
                             context.options.text, context.options.context, 2 * context.options.context));
}

std::vector<std::string> arguments_for(const CompareContext& context, int chunks, const std::string& base) {
  const CompareOptions& options = context.options;
  const auto batch = std::to_string(options.context);
  return {"-m",
          options.model,
          "-f",
          options.text,
          "-c",
          batch,
          "-b",
          batch,
          "-ub",
          std::to_string(options.ubatch),
          "-t",
          std::to_string(options.threads),
          "-fa",
          "on",
          "--chunks",
          std::to_string(chunks),
          "--kl-divergence-base",
          base};
}

// llama-perplexity saves 16 bits per vocabulary entry for the second half of every chunk.
std::uint64_t logits_bytes(const CompareContext& context) {
  const auto tokens = static_cast<std::uint64_t>(context.options.context / 2 * context.options.chunks);
  return tokens * (context.model.vocabulary + 4) * 2;
}

// The host prints no statistics of fewer positions, and says nothing about it; it judges the second half of each chunk.
void check_positions(const CompareOptions& options) {
  constexpr std::int64_t kLeast = 100;
  const std::int64_t positions = options.context / 2 * options.chunks;
  if (positions >= kLeast) return;
  throw CliError(Exit::usage, fmt::format("-c {} --chunks {} judge {} positions; llama-perplexity needs {} or more",
                                          options.context, options.chunks, positions, kLeast));
}

void check_space(const CompareContext& context) {
  const std::uint64_t needed = logits_bytes(context);
  std::error_code error;
  const auto space = std::filesystem::space(context.scratch, error);
  const std::string where = context.scratch.parent_path().string();
  if (!error && space.available < needed) {
    throw CliError(Exit::io, fmt::format("the saved logits need {} in {}, which has {} free; set TMPDIR or lower "
                                         "--chunks",
                                         human_bytes(needed), where, human_bytes(space.available)));
  }
  fmt::print(stderr, "the logits of the base take {} in {} for now\n", human_bytes(needed), where);
}

std::string summary(const Quality& quality) {
  return fmt::format("PPL {:.3f}, KLD {:.5f}", quality.ppl, quality.kld);
}

}  // namespace

double parse_base_ppl(const std::string& output) {
  return number_after(output, "Mean PPL(base)");
}
double parse_final_ppl(const std::string& output) {
  return number_after(output, "Final estimate: PPL");
}

Quality parse_kl_statistics(const std::string& output) {
  Quality quality;
  quality.ppl = number_after(output, "Mean PPL(Q)");
  quality.kld = number_after(output, "Mean    KLD");
  quality.kld_p99 = number_after(output, "99.0%   KLD");
  quality.same_top = number_after(output, "Same top p");
  return quality;
}

// Without a speed run the memory is that of the KL divergence runs; the base needs one too, and one chunk shows its
// peak.
int quality_steps(const CompareOptions& options, std::size_t rows) {
  return static_cast<int>(rows) + (options.no_speed ? 1 : 0);
}

QualityBase save_base(const CompareContext& context) {
  check_positions(context.options);
  check_space(context);
  QualityBase base{find_tool("llama-perplexity", context.options.tools), (context.scratch / "base.logits").string()};
  const RowSpec stock = parse_row("stock:f16");
  const Outcome saved =
      run_row(context, stock, base.tool, arguments_for(context, context.options.chunks, base.logits), nullptr);
  const std::string output = saved.out + saved.err;
  check_text(context, output);
  base.ppl = parse_final_ppl(output);
  base.chunks = static_cast<int>(find_number(output, "calculating perplexity over").value_or(context.options.chunks));
  context.progress.done(saved.seconds, fmt::format("PPL {:.3f}, the base", base.ppl));
  return base;
}

Quality measure_row(const CompareContext& context, const QualityBase& base, int chunks, CompareRow& row) {
  std::vector<std::string> arguments = arguments_for(context, chunks, base.logits);
  arguments.emplace_back("--kl-divergence");
  const Outcome outcome = run_row(context, row.spec, base.tool, arguments, &row.status);
  row.rss_bytes = outcome.peak_rss_bytes;
  const Quality quality = parse_kl_statistics(outcome.out);
  context.progress.done(outcome.seconds, summary(quality));
  return quality;
}

int measure_quality(const CompareContext& context, std::vector<CompareRow>& rows) {
  const QualityBase base = save_base(context);
  rows[0].quality.ppl = base.ppl;
  if (context.options.no_speed) measure_row(context, base, 1, rows[0]);  // for the memory alone
  for (std::size_t i = 1; i < rows.size(); ++i) {
    rows[i].quality = measure_row(context, base, context.options.chunks, rows[i]);
  }
  return base.chunks;
}

}  // namespace kvant::cli
