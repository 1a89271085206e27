// The inside of AttendPlan.
#pragma once

#include "cuda/decode.hpp"
#include "cuda/plan.hpp"
#include "cuda/pool.hpp"
#include "cuda/reference.hpp"

namespace kvant::cuda {

struct AttendPlan::Impl {
  const Batch::Impl* batch = nullptr;
  std::int64_t generation = 0;
  AttendOptions options;
  AttendPath path = AttendPath::integer;
  const DecodeKernel* kernel = nullptr;
  Plan plan;
  DecodeArgs args;
  InlinePlan inlined;
  ReferenceArgs reference;
  int query_heads = 0;
  int sequences = 0;
  std::int64_t longest = 0;  // tokens that the plan serves
  DeviceBuffer<Segment> segments;
  DeviceBuffer<std::int32_t> integers;  // the reference's three arrays
  DeviceBuffer<float> partials;
  DeviceBuffer<std::uint32_t> counters;

  // Cuts the work by `split` and loads it onto the device. `sequences` must match the batch.
  void load(const Split& split, std::span<const PlanSequence> shapes);
  std::vector<PlanSequence> describe_sequences(int headroom, int units_per_page) const;
};

}  // namespace kvant::cuda
