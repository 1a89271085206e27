// Tables for people: aligned columns for a terminal, or Markdown.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvant::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;  // the first column to the left, the others to the right
  std::string markdown() const;

 private:
  std::vector<std::size_t> widths() const;
  std::vector<std::vector<std::string>> rows_;
};

// "12.3 MiB"; exact bytes are in the JSON output.
std::string human_bytes(std::uint64_t bytes);

}  // namespace kvant::cli
