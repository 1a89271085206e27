#include "bench/report.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "support/oracle.hpp"

namespace kvant::bench {

Table::Table(std::FILE* out, const Options& options, const std::vector<Case>& cases) : out_(out), width_(4) {
  for (const Case& item : cases) width_ = std::max(width_, static_cast<int>(item.name().size()));
  std::fprintf(out_,
               "kvant %s, 1 thread, %d KV head(s), medians of %d interleaved rounds; from memory: %lld MiB in turn.\n"
               "Mtok/s: cells seen by the query rows (attend), tokens (write, seal). GB/s: stored bytes, once a call;\n"
               "read: plain reading of as many bytes from the same place. f16: speed over kvant's own f16; of "
               "`threads` over one\n"
               "thread, by wall time.\n",
               version(), options.heads, options.rounds, static_cast<long long>(options.ring_bytes >> 20));
}

void Table::add(const Result& r) {
  if (r.kernel != kernel_) {
    kernel_ = r.kernel;
    section_.clear();
    std::fprintf(out_, "\n%-*s %9s %9s %8s %8s %6s %16s %9s\n", width_, kernel_.c_str(), "Mtok/s", "GMAC/s", "GB/s",
                 "read", "%read", "f16", "O1 error");
  }
  const std::string section = r.item.label + std::to_string(r.item.dim);
  if (section != section_) std::fputs("\n", out_);
  section_ = section;
  std::fprintf(out_, "%-*s ", width_, r.item.name().c_str());
  if (!r.passed()) {
    std::fprintf(out_, "O1 FAILED: error %.1e, allowed %.1e; no speed\n", r.error, testing::kTolerance);
  } else {
    std::fprintf(out_, "%9.3f ", r.tokens_per_s / 1e6);
    r.gmac_per_s > 0 ? std::fprintf(out_, "%9.1f ", r.gmac_per_s) : std::fprintf(out_, "%9s ", "-");
    std::fprintf(out_, "%8.3f ", r.bytes_per_s / 1e9);
    r.read_per_s > 0 ? std::fprintf(out_, "%8.2f %5.1f%% ", r.read_per_s / 1e9, 100 * r.bytes_per_s / r.read_per_s)
                     : std::fprintf(out_, "%8s %6s ", "-", "-");
    r.ratio > 0 ? std::fprintf(out_, "%8.2fx +-%4.1f%% ", r.ratio, 100 * r.ratio_spread)
                : std::fprintf(out_, "%16s ", "-");
    std::fprintf(out_, "%9.1e\n", r.error);
  }
  std::fflush(out_);
}

void write_json(const std::string& path, const Options& options, const std::vector<Result>& results) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Result& r : results) {
    nlohmann::ordered_json entry = {{"name", r.item.name()},
                                    {"kernel", r.kernel},
                                    {"what", name_of(r.item.what)},
                                    {"recipe", r.item.is_kernel() ? r.item.label : to_text(r.item.recipe)},
                                    {"dim", r.item.dim},
                                    {"tokens", r.item.tokens},
                                    {"passed", r.passed()}};
    entry["o1_error"] = std::isfinite(r.error) ? nlohmann::ordered_json(r.error) : nlohmann::ordered_json();
    if (r.item.is_attend() || r.item.is_kernel()) {
      entry.update({{"group", r.item.group}, {"rows", r.item.rows}, {"place", name_of(r.item.place)}});
    }
    if (r.passed()) {
      entry.update({{"tokens_per_s", r.tokens_per_s}, {"bytes_per_s", r.bytes_per_s}});
      if (r.read_per_s > 0) entry["read_per_s"] = r.read_per_s;
      if (r.gmac_per_s > 0) entry["gmac_per_s"] = r.gmac_per_s;
      const char* ratio = r.item.what == What::threads ? "ratio_to_one_thread" : "ratio_to_f16";
      if (r.ratio > 0) entry.update({{ratio, r.ratio}, {"ratio_spread", r.ratio_spread}});
    }
    list.push_back(std::move(entry));
  }
  const nlohmann::ordered_json all = {
      {"kvant", version()},        {"threads", options.threads},       {"kv_heads", options.heads},
      {"rounds", options.rounds},  {"ring_bytes", options.ring_bytes}, {"o1_tolerance", testing::kTolerance},
      {"results", std::move(list)}};
  if (path == "-") {
    std::cout << all.dump(2) << '\n';
    return;
  }
  std::ofstream file(path);
  file << all.dump(2) << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write '" + path + "'");
}

}  // namespace kvant::bench
