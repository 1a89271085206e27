// kvant-bench: speed of attention, sealing and writing. Exit codes: 0 done, 1 a case failed O1, 2 usage or other error.
#include <omp.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <regex>

#include "bench/cases.hpp"
#include "bench/measure.hpp"
#include "bench/report.hpp"
#include "kvant/runtime.hpp"

namespace {

using kvant::bench::Options;

std::vector<std::string> chosen_kernels(const std::string& kernel) {
  if (kernel == "all") return kvant::kernel_names();
  if (kernel != "active") kvant::force_kernel(kernel);  // throws with the list of names if it is none
  return {kvant::active_kernel()};
}

void define(CLI::App& app, Options& options, bool& full) {
  const auto list = [&](const char* name, auto& values, const char* text) {
    app.add_option(name, values, text)->delimiter(',')->capture_default_str();
  };
  app.add_option("--kernel", options.kernel, "kernel set, 'active' or 'all'")->capture_default_str();
  app.add_option("--filter", options.filter, "regular expression for the names of the cases");
  app.add_flag("--full", full, "everything: kernels alone, g 1,4,7,8, D 64,128,256, query rows 1,8,512");
  app.add_flag("--kernels", options.kernels, "scores, mixes and softmax alone as well");
  list("--dims", options.dims, "channels of a head");
  list("--groups", options.groups, "query heads per KV head");
  list("--rows", options.rows, "query rows");
  app.add_option("--recipe", options.recipes, "recipe besides f16, instead of the usual five; may be repeated");
  app.add_option("--heads", options.heads, "KV heads")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--threads", options.threads, "attention from memory with this many threads against one as well")
      ->check(CLI::Range(2, 256));
  app.add_option("--tokens", options.tokens, "context; 0: 512 KiB of f16 in cache, 8192 tokens from memory")
      ->check(CLI::Range(0, 1 << 22));
  app.add_option("--rounds", options.rounds, "samples of each side")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--sample-ms", options.sample_ms, "shortest sample")
      ->check(CLI::Range(0.01, 1e4))
      ->capture_default_str();
  app.add_option("--json", options.json, "file for the results as JSON; '-': standard output instead of the table");
}

int run(const Options& options) {
  const std::vector<kvant::bench::Case> cases = kvant::bench::make_cases(options);
  if (cases.empty()) throw std::invalid_argument("no case has a name that matches '" + options.filter + "'");
  const std::vector<std::string> kernels = chosen_kernels(options.kernel);
  std::FILE* out = options.json == "-" ? stderr : stdout;
  kvant::bench::Table table(out, options, cases);
  std::vector<kvant::bench::Result> results;
  bool passed = true;
  for (const std::string& kernel : kernels) {
    kvant::bench::Measurement measurement(options);
    for (const kvant::bench::Case& item : cases) {
      results.push_back(measurement.run(item, kernel));
      table.add(results.back());
      passed = passed && results.back().passed();
    }
  }
  if (!options.json.empty()) kvant::bench::write_json(options.json, options, results);
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Filling caches seals pages with OpenMP's default, whose threads would spin beside what is measured.
  omp_set_num_threads(1);
  Options options;
  bool full = false;
  CLI::App app("Speed of kvant's core, one thread, each figure with the O1 error of its own data", "kvant-bench");
  define(app, options, full);
  try {
    app.parse(argc, argv);
    if (full && app.count("--dims") == 0) options.dims = {64, 128, 256};
    if (full && app.count("--groups") == 0) options.groups = {1, 4, 7, 8};
    if (full && app.count("--rows") == 0) options.rows = {1, 8, 512};
    options.kernels = options.kernels || full;
    return run(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvant-bench: %s\n", error.what());
    return 2;
  }
}
