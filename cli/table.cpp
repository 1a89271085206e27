#include "cli/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace kvant::cli {

std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> result(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = std::max(result[i], row[i].size());
  }
  return result;
}

std::string Table::text() const {
  const std::vector<std::size_t> width = widths();
  std::string out;
  for (const auto& row : rows_) {
    std::string line = fmt::format("{:<{}}", row[0], width[0]);
    for (std::size_t i = 1; i < width.size(); ++i) line += fmt::format("  {:>{}}", row[i], width[i]);
    out += line + "\n";
  }
  return out;
}

std::string Table::markdown() const {
  std::string out;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (const std::string& cell : rows_[r]) out += "| " + cell + " ";
    out += "|\n";
    if (r > 0) continue;
    for (std::size_t i = 0; i < rows_[r].size(); ++i) out += i == 0 ? "|---" : "|---:";
    out += "|\n";
  }
  return out;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

}  // namespace kvant::cli
