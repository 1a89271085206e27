// libFuzzer: any bytes are a calibration file or refused with bad_format, and what is read is written as it was. The
// checksum is made right first, so that the reader behind it is reached.
#include <xxhash.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvant/calibration.hpp"
#include "kvant/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  if (size > sizeof(std::uint64_t)) {
    const std::size_t body = size - sizeof(std::uint64_t);
    const std::uint64_t checksum = XXH64(bytes.data(), body, 0);
    std::memcpy(bytes.data() + body, &checksum, sizeof checksum);
  }
  try {
    if (kvant::to_bytes(kvant::read_calibration(bytes)) != bytes) std::abort();
  } catch (const kvant::Error& error) {
    if (error.code() != kvant::ErrorCode::bad_format) std::abort();
  }
  return 0;
}
