// What is measured: the cases and the options that select them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvant/recipe.hpp"

namespace kvant::bench {

struct Options {
  std::string kernel = "active";        // a kernel set, "active" or "all"
  std::string filter;                   // regular expression that a case's name must contain
  std::vector<std::string> recipes;     // texts; the short ones below when empty
  std::vector<int> dims = {64, 128};    // channels of a head, keys and values
  std::vector<int> groups = {1, 4};     // query heads per KV head
  std::vector<int> rows = {1, 8, 128};  // query rows
  bool kernels = false;                 // scores, mixes and softmax alone as well
  int heads = 1;                        // KV heads
  int threads = 0;                      // attention with as many threads against one; 0: no such cases
  std::int64_t tokens = 0;              // 0: 512 KiB of f16 in cache, 8 MiB in L3, 8192 tokens from memory
  int rounds = 7;                       // samples of each side; medians are reported
  double sample_ms = 1;                 // shortest sample
  std::int64_t ring_bytes = 128 << 20;  // what calls from memory go round: several times the last-level cache
  std::string json;                     // file, or "-" for standard output instead of the table
};

enum class What { attend, threads, seal, write, score, mix, softmax };
enum class Place { cache, l3, memory };

struct Case {
  What what = What::attend;
  Place place = Place::cache;
  std::string label;  // short name of the recipe
  Recipe recipe;
  int dim = 64;
  int width = 0;  // score, mix: bits of a code, 0 for rows of f16
  int group = 1;
  std::int64_t rows = 1;
  std::int64_t tokens = 0;

  bool is_kernel() const { return what == What::score || what == What::mix || what == What::softmax; }
  bool is_attend() const { return what == What::attend || what == What::threads; }
  // "attend/kivi-2/d64/g3/r1/memory", "threads/...", "seal/kivi-2/d64", "write/kivi-2/d64", "score/2-bit/d64/g3/r1/l3"
  std::string name() const;
};

const char* name_of(What what);
const char* name_of(Place place);

// Cases of the options in the order in which they share data: recipes differ last.
std::vector<Case> make_cases(const Options& options);

}  // namespace kvant::bench
