// The environment under which a program of llama.cpp runs, with the plug-in or without it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/paths.hpp"
#include "cli/process.hpp"

namespace kvant::cli {

struct PluginSettings {
  std::filesystem::path plugin;
  std::string recipe;
  std::string status;                 // KVANT_STATUS: "stderr", a path, or empty for none
  std::string record = {};            // KVANT_RECORD: a path, or empty for none
  std::string record_rope = "after";  // KVANT_RECORD_ROPE: keys before or after it
};

// The program as its own build is: every variable of the plug-in is removed.
Command stock_command(const Tool& tool, const std::vector<std::string>& arguments);

// The program with its KV cache held by kvant.
Command plugin_command(const Tool& tool, const std::vector<std::string>& arguments, const PluginSettings& settings);

}  // namespace kvant::cli
