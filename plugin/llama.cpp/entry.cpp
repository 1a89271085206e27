// The two functions that a host looks for in a backend library.
#include <cstdlib>
#include <exception>
#include <string>

#include "config.hpp"
#include "device.hpp"
#include "host.hpp"
#include "say.hpp"
#include "status.hpp"

#define KVANT_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvant::llama {
namespace {

// False, after one line on stderr, when this host or this environment cannot be served.
bool prepare(const void* caller) {
  try {
    attach_host(caller);
    load_config();
    return true;
  } catch (const std::exception& error) {
    say_once(std::string("not loaded: ") + error.what());
    return false;
  }
}

void report_at_exit() {
  Ledger::instance().finish();
}

}  // namespace
}  // namespace kvant::llama

// 0 makes the host refuse this library.
KVANT_EXPORT int ggml_backend_score() {
  return kvant::llama::prepare(__builtin_return_address(0)) ? 1 : 0;
}

KVANT_EXPORT kvant::llama::abi::Reg* ggml_backend_init() {
  if (!kvant::llama::prepare(__builtin_return_address(0))) return nullptr;
  static const int registered = std::atexit(kvant::llama::report_at_exit);
  static_cast<void>(registered);
  return kvant::llama::make_registry();
}
