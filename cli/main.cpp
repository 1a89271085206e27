// kvant: the command line. Data goes to standard output, progress and errors to standard error.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string_view>
#include <vector>

#include "cli/commands.hpp"
#include "cli/errors.hpp"
#include "kvant/error.hpp"
#include "kvant/runtime.hpp"

namespace {

using kvant::cli::Exit;

constexpr std::string_view kFooter =
    "Exit codes: 0 done, 1 a program that kvant started failed, 2 usage, 3 bad input file,\n"
    "4 a file or program cannot be found, read or written, 5 not supported by this build or machine.";

// Arguments in front of "--" belong to kvant, those behind it to the program that `kvant run` starts.
struct Arguments {
  std::vector<std::string> own;  // reversed, as CLI11 takes them
  std::vector<std::string> program;
};

Arguments split_arguments(int argc, char** argv) {
  const std::vector<std::string> all(argv + 1, argv + argc);
  const auto separator = !all.empty() && all.front() == "run" ? std::find(all.begin(), all.end(), "--") : all.end();
  Arguments result;
  result.own.assign(all.begin(), separator);
  std::reverse(result.own.begin(), result.own.end());
  if (separator != all.end()) result.program.assign(separator + 1, all.end());
  return result;
}

Exit exit_of(kvant::ErrorCode code) {
  switch (code) {
    case kvant::ErrorCode::unsupported:
      return Exit::unsupported;
    case kvant::ErrorCode::bad_format:
      return Exit::bad_input;
    case kvant::ErrorCode::out_of_memory:
      return Exit::unsupported;
    default:
      return Exit::usage;
  }
}

int report(Exit code, const char* message) {
  fmt::print(stderr, "kvant: {}\n", message);
  return static_cast<int>(code);
}

int run(int argc, char** argv) {
  Arguments arguments = split_arguments(argc, argv);
  CLI::App app{"kvant: the KV cache of a language model in 2 to 4 bits", "kvant"};
  app.set_version_flag("--version", fmt::format("kvant {}", kvant::version()));
  app.footer(std::string(kFooter));
  app.require_subcommand(1);
  kvant::cli::add_run(app, arguments.program);
  kvant::cli::add_compare(app);
  kvant::cli::add_info(app);
  kvant::cli::add_tune(app);
  kvant::cli::add_calibrate(app);
  try {
    app.parse(std::move(arguments.own));
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(Exit::usage);
  }
  return std::fflush(stdout) == 0 ? 0 : report(Exit::io, "cannot write to standard output");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const kvant::cli::CliError& error) {
    return report(error.code(), error.what());
  } catch (const kvant::Error& error) {
    return report(exit_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return report(Exit::unsupported, "out of memory");
  } catch (const std::exception& error) {
    return report(Exit::io, error.what());
  }
}
