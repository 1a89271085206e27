// How fast one thread can read: the bound of every product with stored bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/timing.hpp"

namespace kvant::bench {

class Reader {
 public:
  // From cache: reads the same `bytes` again and again. From memory: goes round a buffer of ring_bytes, `bytes` a time.
  Reader(std::size_t bytes, std::size_t ring_bytes);
  Work work();  // a unit: one read of `bytes`

 private:
  std::size_t words_;
  std::size_t at_ = 0;
  std::uint64_t sum_ = 0;
  std::vector<std::uint64_t> buffer_;
};

}  // namespace kvant::bench
