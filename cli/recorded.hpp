// Rows that the plug-in recorded (KVANT_RECORD; docs/format.md, "Recorded rows"), read layer by layer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvant::cli {

class RecordedRows {
 public:
  // Reads where the records are, not their rows. Throws CliError(bad_input) when the file is no such file or ends
  // early, CliError(io) when it cannot be read.
  explicit RecordedRows(const std::filesystem::path& path);

  struct Heads {
    int count = 0;
    int dim = 0;
  };
  std::vector<int> layers() const;  // those with keys and values, ascending
  // Throws CliError(bad_input) when there is nothing of that layer and side (0 keys, 1 values).
  Heads heads(int layer, int side) const;
  // The rows in the order they were written, those of cells below `sinks` left out: [rows][heads * dim].
  std::vector<float> read(int layer, int side, std::int64_t sinks);

 private:
  struct Record {
    std::uint64_t cells_at = 0;
    std::int64_t count = 0;
  };
  struct Stream {
    Heads heads;
    std::vector<Record> records;
  };
  const Stream& stream(int layer, int side) const;
  std::uint64_t read_head(std::uint64_t at, std::uint64_t size);
  template <typename T>
  void read_at(std::uint64_t at, T* data, std::size_t count);
  [[noreturn]] void bad(const std::string& why) const;

  std::string name_;
  std::ifstream file_;
  bool halves_ = false;  // rows are binary16, else binary32
  std::map<std::pair<int, int>, Stream> streams_;
};

}  // namespace kvant::cli
