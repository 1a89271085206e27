// A bounds-checked reader of the metadata of a GGUF file (versions 2 and 3). Tensors are not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvant::cli {

// A value of the metadata. Numbers and booleans become doubles (every count that matters here is exact in one).
struct GgufValue {
  bool array = false;
  std::uint64_t count = 1;      // elements, also where they were not kept
  std::vector<double> numbers;  // arrays of up to kGgufKeptElements numbers, and scalars
  std::string text;             // scalars only
};

// Longer arrays (vocabularies) are skipped, only their count is kept.
constexpr std::uint64_t kGgufKeptElements = 4096;

class GgufMetadata {
 public:
  // Throws CliError(bad_input) naming what is wrong and where.
  static GgufMetadata parse(std::span<const std::byte> image);
  static GgufMetadata read(const std::string& path);

  const GgufValue* find(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;  // a scalar number
  std::string text(const std::string& key) const;              // empty when absent
  std::uint64_t file_bytes() const { return file_bytes_; }

 private:
  std::map<std::string, GgufValue> values_;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace kvant::cli
