// How the work of one attention call is cut: once on the host, as a list of segments per group of thread blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/decode_args.hpp"

namespace kvant::cuda {

// One sequence as the plan sees it.
struct PlanSequence {
  int first_unit = 0;   // units before it are out of sight (sliding window) or not coded (a first page of sinks only)
  int coded_units = 0;  // past the last coded unit
  int sinks = 0;        // tokens kept exact at the start
  int exact_tiles = 0;  // 16-token tiles, sinks first; more than the tokens of today, as many as the plan shall serve
  int live_tiles = 0;   // those that hold tokens when the plan is made: they weigh, the rest is free
};

struct PlanShape {
  int kv_heads = 1;
  int vectors = 1;           // query rows * query heads per KV head
  int vectors_per_item = 4;  // what one warp serves at once
  double exact_cost = 1;     // of an exact tile, in units
};

// The grid: `groups` clusters of `ranks` blocks. A cluster of more than one has a (sequence, head) of its own, whole.
struct Split {
  int ranks = 1;
  int groups = 1;
  bool half = false;     // units are half pages
  bool aligned = false;  // groups are dealt out per (sequence, head): no group works on two of them
  // What ending a segment costs, in units: warps without a page in the last round, and the merge.
  double segment_cost = 5;
  bool few_warps = false;  // the kernel with fewer warps, which ends segments sooner (or fills clusters)
  int whole = 0;           // > 0: a group has so many (sequence, head)s, and none is cut
};

struct Plan {
  Split split;
  std::vector<Segment> segments;
  std::vector<std::int32_t> first_segment;  // [groups + 1]
  int partials = 0;
  int counters = 0;
};

// What of the device the choice of a split depends on.
struct PlanDevice {
  int multiprocessors = 132;
  int clusters_of_2 = 0;  // co-resident clusters of that size; 0 where the device has none
  int clusters_of_8 = 0;
  bool halves = false;      // a kernel for half pages exists
  bool thin_pages = false;  // 8 warps have so few bytes on their way that the memory waits
  bool more_warps = false;  // instructions bound the kernel: more warps pay even where pages are few
};

// items = sequences * KV heads * blocks of vectors, all alike or not; pages: coded pages of the longest sequence.
Split choose_split(const PlanDevice& device, int items, int pages, bool alike);

// Of few vectors over block pages: thread blocks of `teams` teams of warps, a page each at a time, `parts` blocks for
// each (sequence, head, block of vectors). 0 teams: pages are so many that a warp each is faster.
struct TeamSplit {
  int teams = 0;
  int parts = 1;
};
// most_teams: of a block. items: sequences * KV heads * blocks of vectors; pages: coded pages of the longest sequence.
TeamSplit choose_teams(int multiprocessors, int most_teams, std::int64_t items, std::int64_t pages);

Plan make_plan(const Split& split, const PlanShape& shape, std::span<const PlanSequence> sequences);

}  // namespace kvant::cuda
