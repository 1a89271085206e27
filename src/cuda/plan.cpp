#include "cuda/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvant::cuda {
namespace {

// Up to here one cluster of 8 per head is faster than parts that meet in memory: one round of its warps, or two short
// ones.
constexpr int kShortPages = 128;
constexpr int kShortSlowPages = 64;
constexpr int kHalfPages = 32;        // up to here a cluster's 64 warps have no whole page each
constexpr double kPartRound = 0.025;  // what the last block reads longer for a part, in rounds of the warps
constexpr double kShortSegmentCost =
    20;                         // of the segments of a ragged batch: many are shorter than a round of the warps
constexpr int kFewPages = 250;  // per multiprocessor: below, 8 warps beat 12
constexpr int kManyPages = 48;  // of a block: from here on 12 warps pay where instructions bound
// What ending a segment costs, in pages, where whole (sequence, head)s are weighed against cuts at equal cost: 32
// sequences of 8k are 10 % faster whole, of 32k about as fast.
constexpr double kEndCost = 17;

// Of block pages with teams of warps. Microseconds measured on H200 for kvquant at 3 bits, one sequence of 4k and 8k
// tokens in eight cuts: a round of pages takes kRoundTime and kTeamTime for each team of the multiprocessor, and the
// last block reads kPartTime long for a part with the threads of one team.
constexpr double kRoundTime = 3.4;
constexpr double kTeamTime = 1.06;
constexpr double kPartTime = 0.21;
// Of warps with a page each, in the same run: kWarpTime with one on each of a multiprocessor's four schedulers, and
// kWarpPageTime for each page more. The rest of a call takes as long.
constexpr double kWarpTime = 12.9;
constexpr double kWarpPageTime = 1.34;

struct Item {
  int sequence = 0;
  int kv_head = 0;
  int vector0 = 0;
};

// Cost of units [first, unit) of a sequence and its inverse, so that cuts fall at equal cost.
struct CostLine {
  PlanSequence sequence;
  double exact_cost;
  double overhead;

  int end() const { return sequence.coded_units + sequence.exact_tiles; }
  double at(int unit) const {
    const int coded = std::clamp(unit, sequence.first_unit, sequence.coded_units) - sequence.first_unit;
    const int exact = std::clamp(unit - sequence.coded_units, 0, sequence.live_tiles);
    return overhead + coded + exact * exact_cost;
  }
  double total() const { return at(end()); }
  // The first unit whose start costs at least `cost`.
  int unit_at(double cost) const {
    const double coded = sequence.coded_units - sequence.first_unit;
    cost = std::max(cost - overhead, 0.0);
    if (cost <= coded) return sequence.first_unit + static_cast<int>(std::lround(cost));
    const int tile = static_cast<int>(std::lround((cost - coded) / exact_cost));
    return std::min(sequence.coded_units + tile, end());
  }
};

class Builder {
 public:
  Builder(const Split& split, const PlanShape& shape, std::span<const PlanSequence> sequences)
      : shape_(shape), sequences_(sequences) {
    plan_.split = split;
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      for (int h = 0; h < shape.kv_heads; ++h) {
        for (int v = 0; v < shape.vectors; v += shape.vectors_per_item) items_.push_back({static_cast<int>(b), h, v});
      }
    }
    per_group_.resize(static_cast<std::size_t>(split.groups));
  }

  Plan build() {
    if (plan_.split.whole > 0) {
      for (std::size_t i = 0; i < items_.size(); ++i) {
        add(items_[i], static_cast<int>(i) / plan_.split.whole, {line(items_[i]).end()});
      }
    } else if (plan_.split.aligned) {
      deal();
    } else {
      cut();
    }
    plan_.first_segment.push_back(0);
    for (const std::vector<Segment>& group : per_group_) {
      plan_.segments.insert(plan_.segments.end(), group.begin(), group.end());
      plan_.first_segment.push_back(static_cast<std::int32_t>(plan_.segments.size()));
    }
    return std::move(plan_);
  }

 private:
  CostLine line(const Item& item) const {
    return {sequences_[static_cast<std::size_t>(item.sequence)], shape_.exact_cost,
            plan_.split.aligned ? 0.0 : plan_.split.segment_cost};
  }

  // Adds the parts [ends[i-1], ends[i]) of an item to groups first_group + i.
  void add(const Item& item, int first_group, const std::vector<int>& ends) {
    const PlanSequence& sequence = sequences_[static_cast<std::size_t>(item.sequence)];
    Segment segment;
    segment.sequence = item.sequence;
    segment.kv_head = item.kv_head;
    segment.vector0 = item.vector0;
    segment.coded_end = sequence.coded_units;
    segment.sinks = sequence.sinks;
    segment.parts = static_cast<std::int32_t>(ends.size());
    segment.partial0 = plan_.partials;
    segment.counter = plan_.counters;
    segment.end = sequence.first_unit;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      segment.begin = segment.end;
      segment.end = ends[i];
      segment.part = static_cast<std::int32_t>(i);
      per_group_[static_cast<std::size_t>(first_group) + i].push_back(segment);
    }
    if (ends.size() > 1) {
      plan_.partials += segment.parts;
      ++plan_.counters;
    }
  }

  void deal() {
    if (items_.empty()) return;
    const int parts = std::max(1, plan_.split.groups / static_cast<int>(items_.size()));
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const CostLine cost = line(items_[i]);
      std::vector<int> ends;
      for (int part = 1; part < parts; ++part) ends.push_back(cost.unit_at(cost.total() * part / parts));
      ends.push_back(cost.end());
      add(items_[i], static_cast<int>(i) * parts, ends);
    }
  }

  // One line of all items, cut at equal cost.
  void cut() {
    double total = 0;
    for (const Item& item : items_) total += line(item).total();
    const double share = std::max(total, 1.0) / plan_.split.groups;
    double start = 0;
    for (const Item& item : items_) {
      const CostLine cost = line(item);
      const double end = start + cost.total();
      const int first = std::min(static_cast<int>(start / share + 1e-9), plan_.split.groups - 1);
      int last = std::clamp(static_cast<int>(std::ceil(end / share - 1e-9)) - 1, first, plan_.split.groups - 1);
      std::vector<int> ends;
      for (int group = first; group < last; ++group) ends.push_back(cost.unit_at(share * (group + 1) - start));
      ends.push_back(cost.end());
      add(item, first, ends);
      start = end;
    }
  }

  const PlanShape& shape_;
  std::span<const PlanSequence> sequences_;
  std::vector<Item> items_;
  std::vector<std::vector<Segment>> per_group_;
  Plan plan_;
};

// Blocks for each (sequence, head), each with some of its pages.
int choose_block_parts(int most, int pages) {
  constexpr int kWarps = 8;
  int best = 1;
  double best_cost = std::numeric_limits<double>::infinity();
  for (int parts = 1; parts <= most; ++parts) {
    const double cost = (pages + parts * kWarps - 1) / (parts * kWarps) + kPartRound * parts;
    if (cost >= best_cost) continue;
    best = parts;
    best_cost = cost;
  }
  return best;
}

}  // namespace

Split choose_split(const PlanDevice& device, int items, int pages, bool alike) {
  Split split;
  split.groups = device.multiprocessors;
  if (items == 0) return split;
  if (!alike) {
    split.segment_cost = kShortSegmentCost;
    return split;
  }
  split.few_warps = !device.more_warps && std::int64_t{items} * pages / device.multiprocessors < kFewPages;
  if (items <= device.clusters_of_8 && pages <= (device.more_warps ? kShortSlowPages : kShortPages)) {
    split.ranks = 8;
    split.groups = items;
    split.half = device.halves && pages <= kHalfPages;
    split.aligned = split.few_warps = true;
  } else if (items * (device.clusters_of_2 > 0 ? 3 : 2) <= device.multiprocessors) {
    const int parts = choose_block_parts(device.multiprocessors / items, pages);
    split.groups = parts * items;
    split.aligned = true;
    split.few_warps = !device.more_warps || pages < kManyPages * parts;
  } else if (items <= device.clusters_of_2) {
    split.ranks = 2;
    split.groups = items;
    split.aligned = true;
    split.few_warps = !device.more_warps;
  } else {
    const int whole = (items + device.multiprocessors - 1) / device.multiprocessors;
    const double cut = std::int64_t{items} * pages + (std::int64_t{items} + device.multiprocessors) * kEndCost;
    const bool twelve = device.thin_pages && !split.few_warps;  // which take cuts, while whole ones are for 8
    if (!twelve && whole * (pages + kEndCost) * device.multiprocessors <= cut) {
      split.whole = whole;
      split.groups = (items + whole - 1) / whole;
      split.few_warps = !device.more_warps;
    }
  }
  return split;
}

TeamSplit choose_teams(int multiprocessors, int most_teams, std::int64_t items, std::int64_t pages) {
  constexpr int kMostParts = 64;
  pages = std::max<std::int64_t>(pages, 1);
  TeamSplit split;
  if (items == 0) return split;
  const double load = static_cast<double>(items * pages) / multiprocessors;
  double best = kWarpTime + kWarpPageTime * std::max(load - 4, 0.0);
  for (int teams = most_teams; teams > 0; teams /= 2) {
    for (int parts = 1; parts <= kMostParts && parts <= pages; ++parts) {
      const std::int64_t blocks = (items * parts + multiprocessors - 1) / multiprocessors;  // of a multiprocessor
      const std::int64_t at_once = std::min<std::int64_t>(blocks, most_teams / teams);
      const std::int64_t share = (pages + parts - 1) / parts;
      const std::int64_t rounds = (blocks + at_once - 1) / at_once * ((share + teams - 1) / teams);
      double cost = static_cast<double>(rounds) * (kRoundTime + kTeamTime * static_cast<double>(at_once * teams));
      if (parts > 1) cost += kPartTime * parts / teams;
      if (cost >= best) continue;
      best = cost;
      split = {teams, parts};
    }
  }
  return split;
}

Plan make_plan(const Split& split, const PlanShape& shape, std::span<const PlanSequence> sequences) {
  return Builder(split, shape, sequences).build();
}

}  // namespace kvant::cuda
