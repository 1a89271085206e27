// Exit codes of the command and the exception that carries one of them to main.
#pragma once

#include <stdexcept>
#include <string>

namespace kvant::cli {

enum class Exit : int {
  ok = 0,
  child_failed = 1,  // a program that kvant started ended with an error
  usage = 2,         // unknown flag, bad value, bad recipe
  bad_input = 3,     // a file that is not what it should be
  io = 4,            // a file or program that cannot be found, read or written
  unsupported = 5,   // this build or this machine cannot do it
};

class CliError : public std::runtime_error {
 public:
  CliError(Exit code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Exit code() const noexcept { return code_; }

 private:
  Exit code_;
};

}  // namespace kvant::cli
