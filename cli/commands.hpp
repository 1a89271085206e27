// The subcommands. Each function declares its options on the parser; the work happens in the parser's callback.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvant::cli {

// `program` is what stood behind "--" on the command line; it must outlive the parser.
void add_run(CLI::App& app, const std::vector<std::string>& program);
void add_compare(CLI::App& app);
void add_info(CLI::App& app);
void add_tune(CLI::App& app);
void add_calibrate(CLI::App& app);

}  // namespace kvant::cli
