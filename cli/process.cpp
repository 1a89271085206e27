#include "cli/process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted = 0;

void note_signal(int signal) {
  interrupted = signal;
}

constexpr std::array<int, 2> kSignals = {SIGINT, SIGTERM};

std::vector<std::string> merged_environment(const Command& command) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!command.environment.contains(text.substr(0, text.find('=')))) merged.push_back(text);
  }
  for (const auto& [name, value] : command.environment) {
    if (value) merged.push_back(name + "=" + *value);
  }
  return merged;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

pid_t spawn(const Command& command, const fs::path& out, const fs::path& err) {
  std::vector<std::string> arguments = command.argv;
  std::vector<std::string> environment = merged_environment(command);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), kFlags, 0600);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, arguments[0].c_str(), &actions, nullptr, pointers(arguments).data(),
                                pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw CliError(Exit::io, fmt::format("cannot start {}: {}", arguments[0], std::strerror(error)));
  return pid;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int exit_code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Waits for the child, calling tick; ends it when we were interrupted.
void await(pid_t pid, const std::function<void(double)>& tick, Outcome& outcome) {
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  int status = 0;
  rusage usage{};
  while (true) {
    const pid_t done = wait4(pid, &status, WNOHANG, &usage);
    if (done == pid) break;
    if (done < 0 && errno != EINTR) throw CliError(Exit::io, fmt::format("wait4: {}", std::strerror(errno)));
    if (interrupted != 0) {
      kill(pid, SIGTERM);
      waitpid(pid, &status, 0);
      throw_if_interrupted();
    }
    tick(elapsed());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  outcome.seconds = elapsed();
  outcome.exit_code = exit_code_of(status);
  outcome.peak_rss_bytes = static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace

SignalGuard::SignalGuard() {
  struct sigaction action {};
  action.sa_handler = note_signal;
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &previous_[i]);
}

SignalGuard::~SignalGuard() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

void throw_if_interrupted() {
  if (interrupted != 0) throw CliError(Exit::child_failed, "interrupted");
}

TemporaryDir::TemporaryDir() {
  std::error_code error;
  const fs::path base = fs::temp_directory_path(error);
  if (error) throw CliError(Exit::io, "TMPDIR is not a directory: " + error.message());
  std::string pattern = (base / "kvant-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw CliError(Exit::io, fmt::format("cannot make a directory in {}: {}", base.string(), std::strerror(errno)));
  }
  path_ = pattern;
}

TemporaryDir::~TemporaryDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

Outcome run_captured(const Command& command, const fs::path& scratch, const std::function<void(double)>& tick) {
  const fs::path out = scratch / "stdout.txt";
  const fs::path err = scratch / "stderr.txt";
  Outcome outcome;
  await(spawn(command, out, err), tick, outcome);
  outcome.out = read_file(out);
  outcome.err = read_file(err);
  return outcome;
}

void replace_process(const Command& command) {
  std::vector<std::string> arguments = command.argv;
  std::vector<std::string> environment = merged_environment(command);
  execve(arguments[0].c_str(), pointers(arguments).data(), pointers(environment).data());
  throw CliError(Exit::io, fmt::format("cannot start {}: {}", arguments[0], std::strerror(errno)));
}

int available_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace kvant::cli
