// One case measured: the recipe, kvant's own f16 and plain reading, interleaved.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "bench/cases.hpp"
#include "bench/data.hpp"

namespace kvant::bench {

struct Result {
  Case item;
  std::string kernel;
  double error = 0;         // O1, relative; the rest is 0 where it is too large
  double tokens_per_s = 0;  // attend: cells that a query row sees, all rows; seal and write: tokens
  double gmac_per_s = 0;    // multiply-adds of attend, those of masked cells not counted
  double bytes_per_s = 0;   // stored bytes, each counted once a call
  double read_per_s = 0;    // reading as many bytes from the same place
  double ratio = 0;         // seconds of f16 / seconds of the recipe; 0 where f16 does no such thing. threads: seconds
                            // of one thread / seconds of all
  double ratio_spread = 0;

  bool passed() const;
};

class Measurement {
 public:
  explicit Measurement(const Options& options) : options_(options) {}
  Result run(const Case& item, const std::string& kernel);

 private:
  using Key = std::tuple<std::string, int, Place, std::int64_t>;  // label, dim, place, tokens

  std::shared_ptr<Ring> ring(const std::string& label, const Recipe& recipe, const Case& item);
  Result attend(const Case& item);
  Result threads(const Case& item);
  Result write(const Case& item);
  Result seal(const Case& item);
  Result product(const Case& item);
  Result softmax(const Case& item);

  Options options_;
  std::map<Key, std::shared_ptr<Ring>> rings_;  // of f16 and of the recipe at hand
};

}  // namespace kvant::bench
