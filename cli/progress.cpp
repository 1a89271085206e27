#include "cli/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace kvant::cli {
namespace {

constexpr double kTerminalInterval = 0.5;
constexpr double kLogInterval = 15.0;

}  // namespace

Progress::Progress(int steps) : terminal_(isatty(STDERR_FILENO) != 0), steps_(steps) {}

std::function<void(double)> Progress::step(const std::string& label) {
  ++current_;
  label_ = label;
  shown_ = 0;
  return [this](double seconds) {
    if (seconds - shown_ < (terminal_ ? kTerminalInterval : kLogInterval)) return;
    shown_ = seconds;
    show(seconds);
  };
}

void Progress::show(double seconds) {
  fmt::print(stderr, "{}[{}/{}] {} ... {:.0f} s{}", terminal_ ? "\r" : "", current_, steps_, label_, seconds,
             terminal_ ? "" : "\n");
  std::fflush(stderr);
}

void Progress::done(double seconds, const std::string& result) {
  fmt::print(stderr, "{}[{}/{}] {}: {} ({:.1f} s)\n", terminal_ ? "\r\033[K" : "", current_, steps_, label_, result,
             seconds);
}

}  // namespace kvant::cli
