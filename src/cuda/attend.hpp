// The inside of AttendPlan.
#pragma once

#include "cuda/block.hpp"
#include "cuda/decode.hpp"
#include "cuda/plan.hpp"
#include "cuda/pool.hpp"
#include "cuda/prefill.hpp"
#include "cuda/reference.hpp"

namespace kvant::cuda {

struct AttendPlan::Impl {
  const Batch::Impl* batch = nullptr;
  std::int64_t generation = 0;
  AttendOptions options;
  AttendPath path = AttendPath::integer;
  const DecodeKernel* kernel = nullptr;    // of the integer path
  const PrefillKernel* prefill = nullptr;  // of the prefill path, and of the integer path over block pages
  std::optional<PrefillKernel> block;      // `prefill` where pages are blocks
  PrefillSplit prefill_split;
  Plan plan;
  DecodeArgs args;
  InlinePlan inlined;
  ReferenceArgs reference;  // of the prefill and the reference path
  TeamLayout team_layout;   // the same for teams of warps
  int query_heads = 0;
  int sequences = 0;
  std::vector<std::int64_t> served;  // tokens up to which each sequence may grow
  std::int64_t longest = 0;          // of the sequences, soon: what the work is cut for
  DeviceBuffer<Segment> segments;
  DeviceBuffer<std::int32_t> integers;  // the three arrays of `reference`
  DeviceBuffer<float> partials;
  DeviceBuffer<std::uint32_t> counters;

  // Cuts the work by `split` and loads it onto the device. `sequences` must match the batch.
  void load(const Split& split, std::span<const PlanSequence> shapes);
  void make_counters(std::size_t count);  // of finished parts, for kernels whose last block merges
  std::int64_t served_tokens(const Sequence::Impl& sequence, int headroom) const;
  std::vector<PlanSequence> describe_sequences(int headroom, int units_per_page) const;
  // Loads which pages are coded, for the prefill and the reference path.
  void load_layout(std::span<const PlanSequence> shapes);
  void split_prefill();
  // Of the integer path over block pages: how it is cut, and the kernel for that. Zero teams: a warp per page.
  TeamSplit choose_few(std::span<const PlanSequence> shapes) const;
  void split_few(const TeamSplit& split, std::span<const PlanSequence> shapes);
  void split_integer(const DecodeKernel& flat, int headroom);
};

}  // namespace kvant::cuda
