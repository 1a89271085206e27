// The one way work is spread over threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace kvant::base {

// More threads than a few for each processor are never faster, and OpenMP ends the process when it cannot start as many
// as it was asked for.
inline int thread_count(int requested) {
  return requested > 0 ? std::min(requested, std::max(64, 4 * omp_get_num_procs())) : omp_get_max_threads();
}

// Calls body(item, thread) for every item in [0, items), items handed out in order as threads become free.
// The first exception is rethrown on the caller once all threads are done.
template <typename Body>
void parallel_for(std::int64_t items, int threads, const Body& body) {
  const int used = static_cast<int>(std::min<std::int64_t>(thread_count(threads), items));
  if (used <= 1) {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
    return;
  }
  std::exception_ptr error;
#pragma omp parallel for schedule(dynamic, 1) num_threads(used)
  for (std::int64_t item = 0; item < items; ++item) {
    try {
      body(item, omp_get_thread_num());
    } catch (...) {
#pragma omp critical(kvant_parallel_for)
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace kvant::base
