// Errors of the library: one exception type with a code and a message that names the argument, its value and the limit.
#pragma once

#include <stdexcept>
#include <string>

namespace kvant {

enum class ErrorCode {
  invalid_argument,  // a value outside its documented range
  out_of_range,      // an index beyond what exists
  not_finite,        // NaN or infinity in an input, or a value the storage type cannot hold
  unsupported,       // a combination that this build or this machine cannot do
  bad_format,        // bytes or text that do not follow docs/format.md
  out_of_memory,     // a size that overflows, device memory or a pool that is used up; else std::bad_alloc
};

// The stable text of a code, for example "invalid_argument".
const char* name_of(ErrorCode code) noexcept;

// Thrown by every function of kvant that refuses its arguments. An object is unchanged after a call that threw.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace kvant
