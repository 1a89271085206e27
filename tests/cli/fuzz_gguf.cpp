// libFuzzer: any bytes are read as GGUF metadata or refused with CliError.
#include <cstddef>
#include <cstdint>
#include <span>

#include "cli/errors.hpp"
#include "cli/model.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    static_cast<void>(kvant::cli::model_shape(
        kvant::cli::GgufMetadata::parse(std::as_bytes(std::span<const std::uint8_t>(data, size)))));
  } catch (const kvant::cli::CliError&) {
    return 0;  // refused, as it should be
  }
  return 0;
}
