// Where the plug-in and the programs of llama.cpp are.
#pragma once

#include <filesystem>
#include <string>

namespace kvant::cli {

// The plug-in: `given` if not empty, else KVANT_PLUGIN, else beside this executable (installed prefix, then build
// tree). Throws CliError(io) naming every place that was searched.
std::filesystem::path find_plugin(const std::string& given);

struct Tool {
  std::filesystem::path program;
  std::filesystem::path library_dir;  // must be in LD_LIBRARY_PATH; empty when the program needs nothing
};

// A program by path, or by name in `tools_dir`, KVANT_LLAMA_DIR (each directly or in bin/ below), or PATH.
// Throws CliError(io) when it is nowhere.
Tool find_tool(const std::string& name, const std::string& tools_dir);

// For files that are written after long work. Throws CliError(io) that names the path.
void check_output(const std::string& path);

}  // namespace kvant::cli
