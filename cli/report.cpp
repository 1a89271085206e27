// The rows of a comparison as JSON, as a terminal table and as Markdown.
#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <system_error>

#include "cli/compare.hpp"
#include "cli/estimate.hpp"
#include "cli/table.hpp"

namespace kvant::cli {
namespace {

// Bytes of the cache: measured by the plug-in when the most cells were written, computed from the type for stock rows.
struct Bytes {
  std::uint64_t kv = 0;
  double bits = 0;
  double asymptotic = 0;
};

// The file's own name, also when it was given through a link.
std::string file_name(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  return (error ? std::filesystem::path(path) : real).filename().string();
}

double field(const Json& status, const char* name) {
  const auto found = status.find(name);
  return found != status.end() && found->is_number() ? found->get<double>() : 0.0;
}

Bytes bytes_of(const CompareContext& context, const CompareRow& row) {
  if (row.spec.stock()) {
    const Estimate estimate = estimate_stock(context.model, row.spec.key_type, row.spec.value_type,
                                             context.options.context, context.options.ubatch);
    return {estimate.total(), estimate.bits(), estimate.bits_asymptotic};
  }
  const double at_peak = field(row.status, "kv_bytes_at_peak_cells");
  double kv = at_peak > 0 ? at_peak : field(row.status, "kv_bytes");
  // Layers that are passed through are a part of the cache; the stock row has them too.
  for (const Json& entry : row.status.value("passed_through", Json::array())) {
    const std::string tensor = entry.value("tensor", "");
    if (tensor.starts_with("cache_k_l") || tensor.starts_with("cache_v_l")) kv += field(entry, "bytes");
  }
  return {static_cast<std::uint64_t>(kv), field(row.status, "bits_per_value"), field(row.status, "bits_asymptotic")};
}

std::string as_line(const Json& entry) {
  return entry.is_string() ? entry.get<std::string>() : entry.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// What the plug-in left to the host and what it remarked, each line once.
std::vector<std::string> remarks(const CompareRow& row) {
  std::vector<std::string> lines;
  std::set<std::string> seen;
  for (const char* name : {"passed_through", "notes"}) {
    const auto found = row.status.find(name);
    if (found == row.status.end() || !found->is_array()) continue;
    for (const Json& entry : *found) {
      const std::string prefix = std::string(name) == "notes" ? "note" : "passed through";
      std::string line = fmt::format("{}: {}", prefix, as_line(entry));
      if (seen.insert(line).second) lines.push_back(std::move(line));
    }
  }
  const auto layers = row.status.find("layers");
  if (layers == row.status.end() || !layers->is_array()) return lines;
  std::int64_t blind = 0;
  for (const Json& layer : *layers) {
    const std::string remark = layer.value("remark", "");
    if (!remark.empty() && seen.insert(remark).second) lines.push_back("remark: " + remark);
    blind += layer.value("blind_seals", std::int64_t{0});
  }
  if (blind > 0) lines.push_back(fmt::format("remark: {} pages were sealed before any query was seen", blind));
  return lines;
}

Json speeds_json(const std::map<int, double>& speeds) {
  Json result = Json::object();
  for (const auto& [depth, value] : speeds) result[std::to_string(depth)] = value;
  return result;
}

Json row_json(const CompareContext& context, const CompareRow& row) {
  const Bytes bytes = bytes_of(context, row);
  Json result = {{"recipe", row.spec.text},
                 {"recipe_full", row.spec.stock() ? row.spec.text : to_text(*row.spec.recipe)},
                 {"bits", bytes.bits},
                 {"bits_asymptotic", bytes.asymptotic},
                 {"kv_bytes", bytes.kv},
                 {"kv_bytes_source", row.spec.stock() ? "computed" : "plug-in"},
                 {"rss_bytes", row.rss_bytes},
                 {"rss_source", context.options.no_speed ? "llama-perplexity" : "llama-bench"},
                 {"ppl", row.quality.ppl},
                 {"kld", row.quality.kld},
                 {"kld_p99", row.quality.kld_p99},
                 {"same_top", row.quality.same_top},
                 {"decode_tps", speeds_json(row.decode_tps)},
                 {"prefill_tps", speeds_json(row.prefill_tps)},
                 {"kernel", row.spec.stock() ? Json() : row.status.value("kernel", Json())},
                 {"remarks", remarks(row)}};
  const CompareOptions& options = context.options;
  result["run"] = {{"model", file_name(options.model)},
                   {"text", file_name(options.text)},
                   {"context", options.context},
                   {"ubatch", options.ubatch},
                   {"chunks", options.chunks},
                   {"threads", options.threads},
                   {"repeat", options.no_speed ? 0 : options.repeat}};
  return result;
}

std::string speed_cell(const std::map<int, double>& speeds, const std::map<int, double>& base, int depth) {
  const auto own = speeds.find(depth);
  const auto reference = base.find(depth);
  if (own == speeds.end() || reference == base.end() || reference->second <= 0) return "-";
  return fmt::format("{:.1f} ({:.2f}x)", own->second, own->second / reference->second);
}

std::vector<std::string> header(const CompareOptions& options) {
  std::vector<std::string> cells = {"recipe",  "bits", "long-run", "KV bytes", "of f16",
                                    "process", "PPL",  "KLD",      "KLD 99 %", "same top"};
  if (options.no_speed) return cells;
  for (const char* what : {"decode", "prefill"}) {
    for (const int depth : options.depths) cells.push_back(fmt::format("{} @{}", what, depth));
  }
  return cells;
}

std::vector<std::string> cells_of(const CompareContext& context, const CompareRow& row, const CompareRow& base) {
  const Bytes bytes = bytes_of(context, row);
  const auto base_bytes = static_cast<double>(bytes_of(context, base).kv);
  std::vector<std::string> cells = {row.spec.text,
                                    fmt::format("{:.2f}", bytes.bits),
                                    fmt::format("{:.2f}", bytes.asymptotic),
                                    human_bytes(bytes.kv) + (row.spec.stock() ? "*" : ""),
                                    fmt::format("{:.1f} %", 100 * static_cast<double>(bytes.kv) / base_bytes),
                                    human_bytes(row.rss_bytes),
                                    fmt::format("{:.3f}", row.quality.ppl),
                                    fmt::format("{:.5f}", row.quality.kld),
                                    fmt::format("{:.4f}", row.quality.kld_p99),
                                    fmt::format("{:.2f} %", row.quality.same_top)};
  if (context.options.no_speed) return cells;
  for (const int depth : context.options.depths) cells.push_back(speed_cell(row.decode_tps, base.decode_tps, depth));
  for (const int depth : context.options.depths) cells.push_back(speed_cell(row.prefill_tps, base.prefill_tps, depth));
  return cells;
}

std::string legend(const CompareContext& context) {
  const CompareOptions& options = context.options;
  std::string text = fmt::format(
      "model {}, text {}, {} chunks of {} tokens, micro-batch {}, {} threads\n"
      "bits: per cached value at this context, scales, window and tables included; long-run: of a sealed page\n"
      "KV bytes: at {} tokens, counted by the plug-in (*: computed from the type and the cells); process: peak of {}\n"
      "KLD: Kullback-Leibler divergence of the next token's distribution from stock f16, mean and 99th percentile\n",
      file_name(options.model), file_name(options.text), options.chunks, options.context, options.ubatch,
      options.threads, options.context, options.no_speed ? "llama-perplexity" : "llama-bench");
  if (!options.no_speed) {
    text +=
        fmt::format("decode, prefill: tokens/s at a cache depth, median of {} round(s), and the ratio to stock f16\n",
                    options.repeat);
  }
  return text;
}

}  // namespace

Json rows_to_json(const CompareContext& context, const std::vector<CompareRow>& rows) {
  Json result = Json::array();
  for (const CompareRow& row : rows) result.push_back(row_json(context, row));
  return result;
}

std::string rows_to_text(const CompareContext& context, const std::vector<CompareRow>& rows) {
  Table table(header(context.options));
  for (const CompareRow& row : rows) table.add(cells_of(context, row, rows.front()));
  const bool markdown = context.options.markdown;
  std::string text = (markdown ? table.markdown() : table.text()) + "\n";
  if (markdown) {
    // Each line of the legend and the remarks is a paragraph's line of its own.
    text += "```\n";
  }
  text += legend(context);
  for (const CompareRow& row : rows) {
    for (const std::string& line : remarks(row)) text += fmt::format("{}: {}\n", row.spec.text, line);
  }
  if (markdown) text += "```\n";
  return text;
}

}  // namespace kvant::cli
