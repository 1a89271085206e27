// libFuzzer: any bytes are a file of recorded rows or refused with CliError, and its rows can be read.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "cli/errors.hpp"
#include "cli/recorded.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::string path = std::filesystem::temp_directory_path() / ("rows-" + std::to_string(getpid()));
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    kvant::cli::RecordedRows rows(path);
    for (const int layer : rows.layers()) {
      for (const int side : {0, 1}) static_cast<void>(rows.read(layer, side, 1));
    }
  } catch (const kvant::cli::CliError&) {
    return 0;  // refused, as it should be
  }
  return 0;
}
