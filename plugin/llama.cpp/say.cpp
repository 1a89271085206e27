#include "say.hpp"

#include <cstdio>
#include <mutex>
#include <set>

namespace kvant::llama {

void say(const std::string& text) {
  const std::string line = "kvant: " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

void say_once(const std::string& text) {
  static std::mutex mutex;
  // Never destroyed: lines may still be printed while the process exits.
  static auto* said = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said->insert(text).second) say(text);
}

}  // namespace kvant::llama
