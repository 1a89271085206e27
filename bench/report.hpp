// Results for people (a line each, as they come) and for programs (JSON).
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/measure.hpp"

namespace kvant::bench {

class Table {
 public:
  Table(std::FILE* out, const Options& options, const std::vector<Case>& cases);
  void add(const Result& result);

 private:
  std::FILE* out_;
  int width_;
  std::string kernel_;   // of the lines so far
  std::string section_;  // recipe and head size of the last line
};

// Throws std::runtime_error if the file cannot be written. path "-": standard output.
void write_json(const std::string& path, const Options& options, const std::vector<Result>& results);

}  // namespace kvant::bench
