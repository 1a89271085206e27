// Random caches on both sides, and how far two results are apart.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/half.hpp"
#include "kvant/cuda.hpp"
#include "kvant/error.hpp"

namespace kvant::cuda::test {

// Of tests over recipes and shapes that only a full build (KVANT_CUDA_SHAPES) has kernels for.
#define KVANT_NEEDS_EVERY_SHAPE() \
  if (!KVANT_CUDA_FULL) GTEST_SKIP() << "this build has the kernels of one shape only"

#define KVANT_NEEDS_GPU()                                                          \
  if (!is_available()) GTEST_SKIP() << "no CUDA device of compute capability 8.0"; \
  if (KVANT_CUDA_SAMPLE) GTEST_SKIP() << "this build has a sample of the kernels (KVANT_CUDA_SHAPES)"

// Device memory that holds `values`, with poison in front and behind that must survive.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  void* data() const;
  void write(const void* from);
  // Fills the guarded bytes with a pattern that no result has.
  void poison();
  std::vector<std::uint8_t> read() const;  // synchronises; fails the test when a guard byte changed

 private:
  std::uint8_t* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// Normal values in the storage type; element i of a channel is scaled so that channels differ.
std::vector<std::uint16_t> random_rows(std::mt19937& random, DType type, std::int64_t rows, int heads, int dim,
                                       float spread);
std::vector<float> widen(std::span<const std::uint16_t> x, DType type);

// ||a - b|| / ||b||, infinite if a value is not a number.
double relative_error(std::span<const float> a, std::span<const float> b);

struct Shape {
  const char* recipe = "kivi:k=2,v=2";
  CacheShape cache{2, 128, 128, DType::f16};
  int group = 4;
  int rows = 1;
  AttendOptions options;
  std::vector<std::int64_t> lengths{1000};
  std::optional<KeyRotation> rotation;  // of recipes with rope=before; none: usual_rotation
  float spread = 0.2F;                  // how far the ranges of the key channels are apart
};
std::string text_of(const Shape& shape);

// Every pair of halves, base 10000.
KeyRotation usual_rotation(const CacheShape& shape);
// Both have it from then on, where they need one.
void turn_alike(PagePool& pool, std::span<Cache> caches, const KeyRotation& rotation);

// Relative error that the integer path may have: 16-bit queries and weights, and the output rounded to its 16-bit type.
double tolerance(DType type);

// Caches of the given lengths with random contents, on the CPU and uploaded.
struct Twins {
  Shape shape;
  std::vector<Cache> caches;
  PagePool pool;
  std::vector<Sequence> sequences;
  Batch batch;
  std::vector<std::uint16_t> queries;

  explicit Twins(const Shape& s, unsigned seed = 1, int spare_pages = 0);
  Twins(const Shape& s, unsigned seed, PagePool own_pool);  // of the shape's recipe
  int query_heads() const { return shape.group * shape.cache.kv_heads; }
  void bind();

  struct Result {
    std::vector<float> out;
    std::vector<float> lse;
  };
  Result on_cpu(const float* sinks = nullptr) const;
  Result on_gpu(AttendPath path) const;
  Result on_gpu(const AttendPlan& plan) const;
};

// A cache of that many random tokens.
Cache random_cache(const char* recipe, const CacheShape& shape, std::int64_t tokens, unsigned seed);
// Two sequences, thirty tokens, one at a time on both sides, attention after each: the pages change hands under running
// sequences. At last every page is the CPU's. blind_seals: of the first sequence.
void decode_beside_the_cpu(const char* recipe, int blind_seals = 0);
// A batch of such a pool throws Error(unsupported) with `word` in its message, and stays as it is.
void expect_append_refused(const char* recipe, const CacheShape& shape, const char* word);
// Both GPU paths against the CPU on random caches, outputs and log-sum-exp.
void expect_agreement(const Shape& shape, unsigned seed = 1);
// The kernel over block pages that the plan chooses and the reference kernel against the CPU.
void expect_blocks(const Shape& shape, unsigned seed = 1);
// A learned sink per query head (8 of them): the reference kernel and `path` against the CPU.
void expect_learned_sinks(const Shape& shape, AttendPath path);
// body throws Error(invalid_argument) with `word` in its message; `what` names the case.
void expect_refused(const std::function<void()>& body, const char* what, const char* word);
// Sequence b of the batch and caches[b] get the same random rows.
void append_to_both(Batch& batch, std::span<Cache> caches, std::mt19937& random, int rows, float spread);
// Rows that arrive in chunks on both sides; what is sealed on the device are the CPU's bytes.
void expect_same_seals(const char* recipe, const CacheShape& shape, float spread = 0.3F,
                       const std::optional<KeyRotation>& rotation = {});
// Every sealed page of the sequence, downloaded, is the CPU's block.
void expect_same_blocks(const Sequence& sequence, const Cache& cache);

}  // namespace kvant::cuda::test
