#include "cli/host.hpp"

#include <cstdlib>

namespace kvant::cli {
namespace {

Command base_command(const Tool& tool, const std::vector<std::string>& arguments) {
  Command command;
  command.argv = {tool.program.string()};
  command.argv.insert(command.argv.end(), arguments.begin(), arguments.end());
  if (!tool.library_dir.empty()) {
    const char* previous = std::getenv("LD_LIBRARY_PATH");
    const std::string rest = previous == nullptr || *previous == '\0' ? "" : ":" + std::string(previous);
    command.environment["LD_LIBRARY_PATH"] = tool.library_dir.string() + rest;
  }
  return command;
}

}  // namespace

Command stock_command(const Tool& tool, const std::vector<std::string>& arguments) {
  Command command = base_command(tool, arguments);
  for (const char* name :
       {"GGML_BACKEND_PATH", "KVANT_RECIPE", "KVANT_RECORD", "KVANT_RECORD_ROPE", "KVANT_STATUS", "LLAMA_ARG_DEVICE"}) {
    command.environment[name] = std::nullopt;
  }
  return command;
}

Command plugin_command(const Tool& tool, const std::vector<std::string>& arguments, const PluginSettings& settings) {
  Command command = base_command(tool, arguments);
  command.environment["GGML_BACKEND_PATH"] = settings.plugin.string();
  command.environment["KVANT_RECIPE"] = settings.recipe;
  // Most programs look for back ends only when a device is named; llama-bench always does.
  command.environment["LLAMA_ARG_DEVICE"] = "KVANT0";
  const auto optional = [](const std::string& text) { return text.empty() ? std::nullopt : std::optional(text); };
  command.environment["KVANT_RECORD"] = optional(settings.record);
  command.environment["KVANT_RECORD_ROPE"] = optional(settings.record.empty() ? "" : settings.record_rope);
  command.environment["KVANT_STATUS"] = optional(settings.status);
  return command;
}

}  // namespace kvant::cli
