#include "cli/paths.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/errors.hpp"

namespace kvant::cli {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

fs::path executable_dir() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  return error ? fs::current_path() : self.parent_path();
}

bool is_program(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

bool has_host_library(const fs::path& dir) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("libllama") || name.starts_with("libggml")) return true;
  }
  return false;
}

// Packages such as the llama-cpp-python wheel put bin/ and lib/ side by side without a run path.
Tool with_library_dir(const fs::path& program) {
  std::error_code error;
  const fs::path real = fs::canonical(program, error);
  Tool tool{error ? program : real, {}};
  const fs::path sibling = tool.program.parent_path().parent_path() / "lib";
  if (has_host_library(sibling)) tool.library_dir = sibling;
  return tool;
}

std::vector<fs::path> search_path() {
  std::vector<fs::path> dirs;
  std::istringstream list(environment("PATH"));
  for (std::string dir; std::getline(list, dir, ':');) {
    if (!dir.empty()) dirs.emplace_back(dir);
  }
  return dirs;
}

}  // namespace

fs::path find_plugin(const std::string& given) {
  constexpr std::string_view kName = "libkvant-llama.so";
  const fs::path here = executable_dir();
  std::vector<fs::path> places;
  if (!given.empty()) {
    places = {given};
  } else if (const std::string from_environment = environment("KVANT_PLUGIN"); !from_environment.empty()) {
    places = {from_environment};
  } else {
    places = {here / KVANT_PLUGIN_FROM_BIN / kName, here / "../plugin/llama.cpp" / kName, here / kName};
  }
  std::string searched;
  for (const fs::path& place : places) {
    std::error_code error;
    if (fs::is_regular_file(place, error)) return fs::canonical(place);
    searched += "\n  " + place.lexically_normal().string();
  }
  throw CliError(Exit::io, "the llama.cpp plug-in was not found; searched:" + searched);
}

Tool find_tool(const std::string& name, const std::string& tools_dir) {
  if (name.find('/') != std::string::npos) {
    if (is_program(name)) return with_library_dir(name);
    throw CliError(Exit::io, fmt::format("'{}' is not a program", name));
  }
  std::vector<fs::path> dirs;
  for (const std::string& dir : {tools_dir, tools_dir.empty() ? environment("KVANT_LLAMA_DIR") : std::string()}) {
    if (!dir.empty()) dirs.insert(dirs.end(), {fs::path(dir), fs::path(dir) / "bin"});
  }
  for (const fs::path& dir : search_path()) dirs.push_back(dir);
  for (const fs::path& dir : dirs) {
    if (is_program(dir / name)) return with_library_dir(dir / name);
  }
  throw CliError(Exit::io, fmt::format("'{}' was not found in --tools, KVANT_LLAMA_DIR or PATH", name));
}

void check_output(const std::string& path) {
  fs::path folder = fs::path(path).parent_path();
  if (folder.empty()) folder = ".";
  const bool exists = access(path.c_str(), F_OK) == 0;
  if (access(exists ? path.c_str() : folder.c_str(), W_OK) != 0 || fs::is_directory(path)) {
    throw CliError(Exit::io, fmt::format("cannot write {}", path));
  }
}

}  // namespace kvant::cli
