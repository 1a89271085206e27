// A cache, its fork and what was loaded from its image must go on alike.
#pragma once

#include <gtest/gtest.h>

#include "support/data.hpp"

namespace kvant::testing {

// `cache` has the first `held` rows. The others are appended to all three; in the end the cache is cleared and filled
// anew, so that what it kept of the earlier sequence would show.
inline void expect_same_continuations(Cache& cache, const Rows& rows, std::int64_t held) {
  Cache fork = cache.fork();
  Cache loaded = Cache::load(cache.save());
  for (Cache* each : {&cache, &fork, &loaded}) append(*each, rows, held, rows.tokens - held);
  EXPECT_TRUE(fork.save() == cache.save());
  EXPECT_TRUE(loaded.save() == cache.save());
  cache.clear();
  append(cache, rows, 0, rows.tokens);
  EXPECT_TRUE(cache.save() == fork.save());
}

}  // namespace kvant::testing
