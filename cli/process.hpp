// Child programs: their environment, a wait with progress, and the memory they used.
#pragma once

#include <array>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace kvant::cli {

struct Command {
  std::vector<std::string> argv;                                  // argv[0] is a path
  std::map<std::string, std::optional<std::string>> environment;  // changes to ours; no value: unset
};

struct Outcome {
  int exit_code = 0;  // 128 + signal when it was killed
  std::uint64_t peak_rss_bytes = 0;
  double seconds = 0;
  std::string out;
  std::string err;
};

// While it lives, SIGINT and SIGTERM only raise a flag, so that temporary files are removed; long work has to look at
// it.
class SignalGuard {
 public:
  SignalGuard();
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  std::array<struct sigaction, 2> previous_{};
};
void throw_if_interrupted();  // CliError

// A directory under TMPDIR (or /tmp) that is removed at the end, also after Ctrl-C.
class TemporaryDir {
 public:
  TemporaryDir();
  ~TemporaryDir();
  TemporaryDir(const TemporaryDir&) = delete;
  TemporaryDir& operator=(const TemporaryDir&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  SignalGuard guard_;
  std::filesystem::path path_;
};

// Starts the command, waits, and returns what it printed (kept in files under `scratch` meanwhile). `tick` is called a
// few times a second with the seconds so far. After SIGINT or SIGTERM the child is ended and CliError is thrown.
Outcome run_captured(const Command& command, const std::filesystem::path& scratch,
                     const std::function<void(double)>& tick);

// Replaces this process. Throws CliError(io) when that fails.
[[noreturn]] void replace_process(const Command& command);

// The number of processors this process may use.
int available_processors();

}  // namespace kvant::cli
