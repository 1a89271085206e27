// Stores with the tests' random keys and values, attention on them, and the O1 error of what it computed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/cases.hpp"
#include "bench/timing.hpp"
#include "kvant/kvant.hpp"

namespace kvant::bench {

// Tokens to write: dense [tokens][heads][dim].
struct Tokens {
  CacheShape shape;
  std::int64_t count = 0;
  std::vector<float> keys;
  std::vector<float> values;

  Tokens(int heads, int dim, std::int64_t count);
  ConstView view(Side side, std::int64_t first, std::int64_t rows) const;
  KeyRotation rotation() const;  // for recipes with rope=before; the keys are random either way
};

// Equal caches, each with its own memory. One of them stays in cache; a ring of them has to come from memory.
class Ring {
 public:
  Ring(const Recipe& recipe, const Tokens& tokens, std::int64_t ring_bytes);
  const Cache& front() const { return caches_.front(); }
  const Cache& next();
  std::size_t size() const { return caches_.size(); }

 private:
  std::vector<Cache> caches_;
  std::size_t at_ = 0;
};

// Causal attention of the last `rows` tokens.
class Attend {
 public:
  Attend(std::shared_ptr<Ring> ring, int group, std::int64_t rows, int threads = 1);
  Work work();       // a unit: one call, on the next cache of the ring
  Work wall_work();  // the same by wall time
  // The relative O1 error over all caches of the ring: the first, middle and last row in fp64 over the keys and values
  // as stored, and every other cache must give the same bytes (infinity if not).
  double error();

 private:
  void call(const Cache& cache);

  std::shared_ptr<Ring> ring_;
  int heads_;  // query heads
  int group_;
  std::int64_t rows_;
  int threads_;
  std::vector<float> queries_;
  std::vector<float> out_;
  std::shared_ptr<Workspace> workspace_;
};

}  // namespace kvant::bench
