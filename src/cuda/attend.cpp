#include "cuda/attend.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/check.hpp"

namespace kvant::cuda {
namespace {

constexpr int kMaxRows = 65535;
constexpr int kMaxDecodeRows = 8;
constexpr int kMaxGroup = 16;
constexpr int kAnyTeams = 64;  // more than a thread block can have

[[noreturn]] void refuse(const std::string& text) {
  base::fail(ErrorCode::invalid_argument, text);
}

void check_shape(const CacheShape& shape, int query_heads, int rows, const AttendOptions& options, int headroom) {
  if (rows < 1 || rows > kMaxRows) refuse("rows is " + std::to_string(rows) + "; allowed: 1 to 65535");
  const bool fits = query_heads > 0 && query_heads % shape.kv_heads == 0 && query_heads / shape.kv_heads <= kMaxGroup;
  if (!fits) {
    refuse("query_heads is " + std::to_string(query_heads) + "; allowed: 1 to 16 times the " +
           std::to_string(shape.kv_heads) + " KV heads");
  }
  if (!(options.softcap >= 0) || !std::isfinite(options.softcap) || !std::isfinite(options.scale)) {
    refuse("scale must be finite, softcap finite and not negative");
  }
  if (options.sliding_window < 0) {
    refuse("sliding_window is " + std::to_string(options.sliding_window) + "; allowed: 0 and more");
  }
  if (headroom < 0) refuse("headroom is " + std::to_string(headroom) + "; allowed: 0 and more");
}

// Kernels read and write several elements at once.
void check_alignment(const char* name, const void* pointer, std::uintptr_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0) return;
  refuse(std::string(name) + " is not aligned to " + std::to_string(bytes) + " bytes");
}

// Two blocks of vectors share what a page costs to unpack; shapes without such a kernel read the page once per block.
const DecodeKernel* find_flat(DecodeVariant variant, int key_bytes) {
  const auto find = [&] {
    const DecodeKernel* kernel = find_decode_kernel(variant);
    return kernel != nullptr && fits(*kernel, key_bytes) ? kernel : nullptr;
  };
  const DecodeKernel* kernel = find();
  if (kernel == nullptr && variant.n_tiles > 1) {
    variant.n_tiles = 1;
    kernel = find();
  }
  return kernel;
}

// The kernel of a split: half units need their own, clusters have their own for the common shapes.
const DecodeKernel* kernel_for(const DecodeKernel& flat, const Split& split) {
  DecodeVariant variant = flat.variant;
  variant.half = split.half;
  variant.cluster = split.few_warps;
  const DecodeKernel* kernel = find_decode_kernel(variant);
  return kernel == nullptr && !split.half ? &flat : kernel;
}

bool alike(const std::vector<PlanSequence>& sequences) {
  const auto units = [](const PlanSequence& s) { return s.coded_units - s.first_unit + s.live_tiles; };
  const auto [low, high] = std::minmax_element(sequences.begin(), sequences.end(),
                                               [&](const auto& a, const auto& b) { return units(a) < units(b); });
  return sequences.empty() || units(*high) - units(*low) <= units(*high) / 20;
}

AttendPath choose_path(AttendPath wanted, int rows, bool has_integer, bool has_prefill) {
  if (wanted == AttendPath::automatic) {
    if (rows <= kMaxDecodeRows && has_integer) return AttendPath::integer;
    return has_prefill ? AttendPath::prefill : AttendPath::reference;
  }
  if (wanted == AttendPath::integer && rows > kMaxDecodeRows) {
    refuse("rows is " + std::to_string(rows) + "; allowed on the integer path: 1 to 8");
  }
  if ((wanted == AttendPath::integer && !has_integer) || (wanted == AttendPath::prefill && !has_prefill)) {
    refuse("this build has no such kernel for the pool's recipe and shape");
  }
  return wanted;
}

PlanDevice describe_device(const DecodeKernel& flat, std::size_t head_bytes, int key_bytes) {
  constexpr std::size_t kThin = 5000;  // bytes of a head's page: 2 bits at D = 64
  const DeviceInfo info = device_info();
  PlanDevice device;
  device.multiprocessors = info.multiprocessors;
  device.thin_pages = head_bytes < kThin;
  if (info.major < 9 || !waits_for_predecessor(flat.function)) return device;  // PTX of sm_80 knows no clusters
  Split split;
  split.few_warps = true;
  const DecodeKernel& pair = *kernel_for(flat, split);
  device.clusters_of_2 = resident_clusters(pair, 2, key_bytes);
  device.clusters_of_8 = resident_clusters(pair, 8, key_bytes);
  split.half = true;
  device.halves = kernel_for(flat, split) != nullptr;
  device.more_warps = flat.variant.key_bits == 0;
  return device;
}

}  // namespace

// Pages of the tail that come later are in the batch's tables when they do.
std::int64_t AttendPlan::Impl::served_tokens(const Sequence::Impl& sequence, int headroom) const {
  return std::min(batch->table_stride * kPage, sequence.length + headroom);
}

std::vector<PlanSequence> AttendPlan::Impl::describe_sequences(int headroom, int units_per_page) const {
  std::vector<PlanSequence> result;
  for (const Sequence* sequence : batch->sequences) {
    const Sequence::Impl& s = sequence->impl();
    PlanSequence shape;
    const auto pages = static_cast<int>(s.pages.size());
    int first_page = s.first_is_exact() ? 1 : 0;
    if (args.window > 0) {
      const std::int64_t oldest = s.length - args.rows + 1 - args.window;
      first_page = std::clamp(static_cast<int>(oldest / kPage), first_page, std::max(first_page, pages));
    }
    shape.first_unit = first_page * units_per_page;
    shape.coded_units = std::max(pages, first_page) * units_per_page;
    shape.sinks = s.sinks;
    const int sink_tiles = (s.sinks + kTile - 1) / kTile;
    const auto tail = static_cast<int>(s.length - s.tail_begin());
    const auto room = static_cast<int>(served_tokens(s, headroom) - s.tail_begin());
    shape.exact_tiles = sink_tiles + (room + kTile - 1) / kTile;
    shape.live_tiles = sink_tiles + (tail + kTile - 1) / kTile;
    result.push_back(shape);
  }
  return result;
}

void AttendPlan::Impl::load(const Split& split, std::span<const PlanSequence> shapes) {
  const DeviceFormat& format = batch->pool->format;
  PlanShape shape;
  shape.kv_heads = batch->pool->shape.kv_heads;
  shape.vectors = args.rows * args.group;
  shape.vectors_per_item = 4 * kernel->variant.n_tiles;
  const double unit_bytes = static_cast<double>(format.head_bytes()) / (split.half ? 2 : 1);
  shape.exact_cost = static_cast<double>(format.exact.tile_bytes()) / unit_bytes;
  plan = make_plan(split, shape, shapes);
  inlined = InlinePlan();
  if (plan.segments.size() == static_cast<std::size_t>(split.groups) && split.groups <= InlinePlan::kSegments &&
      split.aligned) {
    std::copy(plan.segments.begin(), plan.segments.end(), inlined.segments);
    segments = DeviceBuffer<Segment>();
  } else {
    if (plan.segments.size() > 65535) {
      refuse(std::to_string(plan.segments.size()) + " pieces of work in one call; allowed: 65535");
    }
    std::copy(plan.first_segment.begin(), plan.first_segment.end(), inlined.first);
    segments = DeviceBuffer<Segment>(plan.segments.size());
    segments.copy_from(plan.segments.data(), plan.segments.size());
  }
  partials = DeviceBuffer<float>(static_cast<std::size_t>(plan.partials) *
                                 static_cast<std::size_t>(shape.vectors_per_item * (format.value.dim + 2)));
  args.segments = segments.get();
  args.partials = partials.get();
  make_counters(static_cast<std::size_t>(plan.counters));
  prepare_decode(*kernel);
}

void AttendPlan::Impl::make_counters(std::size_t count) {
  counters = DeviceBuffer<std::uint32_t>(count);
  if (count > 0) counters.fill_zero();
  args.counters = counters.get();
}

void AttendPlan::Impl::load_layout(std::span<const PlanSequence> shapes) {
  std::vector<std::int32_t> values;
  for (const PlanSequence& s : shapes) values.push_back(s.first_unit);
  for (const PlanSequence& s : shapes) values.push_back(s.coded_units);
  for (const PlanSequence& s : shapes) values.push_back(s.sinks);
  integers = DeviceBuffer<std::int32_t>(values.size());
  integers.copy_from(values.data(), values.size());
  reference = {integers.get(), integers.get() + shapes.size(), integers.get() + 2 * shapes.size()};
}

void AttendPlan::Impl::split_integer(const DecodeKernel& flat, int headroom) {
  const std::vector<PlanSequence> pages = describe_sequences(headroom, 1);
  int most = 0;
  for (const PlanSequence& s : pages) most = std::max(most, s.coded_units - s.first_unit);
  const int per_item = 4 * flat.variant.n_tiles;
  const int items = sequences * args.kv_heads * ((args.rows * args.group + per_item - 1) / per_item);
  const Split split =
      choose_split(describe_device(flat, batch->pool->format.head_bytes(), args.key_bytes), items, most, alike(pages));
  kernel = kernel_for(flat, split);
  options.overlap = options.overlap && waits_for_predecessor(kernel->function);
  args.pages_settled = options.overlap ? args.pages_settled : 0;
  load(split, split.half ? describe_sequences(headroom, 2) : pages);
}

TeamSplit AttendPlan::Impl::choose_few(std::span<const PlanSequence> shapes) const {
  const std::optional<PrefillKernel> kernel = find_team_kernel(batch->pool->format, batch->pool->block, kAnyTeams);
  if (!kernel) return {};
  int pages = 0;
  for (const PlanSequence& s : shapes) pages = std::max(pages, s.coded_units - s.first_unit);
  const int vector_blocks = (args.rows * args.group + kernel->vectors - 1) / kernel->vectors;
  return choose_teams(device_info().multiprocessors, kernel->threads / 32 / kernel->team,
                      std::int64_t{vector_blocks} * args.kv_heads * sequences, pages);
}

void AttendPlan::Impl::split_few(const TeamSplit& split, std::span<const PlanSequence> shapes) {
  const PagePool::Impl& pool = *batch->pool;
  if (split.teams == 0) {
    block = find_block_kernel(pool.format, pool.block, args.rows, args.group, AttendPath::integer);
    prefill = &*block;
    split_prefill();
    return;
  }
  block = find_team_kernel(pool.format, pool.block, split.teams);
  prefill = &*block;
  prepare_teams(*block);
  prefill_split.vector_blocks = (args.rows * args.group + block->vectors - 1) / block->vectors;
  prefill_split.parts = std::min(split.parts, 65535 / std::max(1, sequences));
  options.overlap = options.overlap && waits_for_predecessor(block->function);
  args.pages_settled = options.overlap ? args.pages_settled : 0;
  partials = DeviceBuffer<float>(prefill_workspace(*block, prefill_split, args.kv_heads, sequences));
  args.partials = partials.get();
  make_counters(static_cast<std::size_t>(prefill_split.vector_blocks * args.kv_heads * sequences));
  team_layout = TeamLayout();
  if (shapes.size() > TeamLayout::kSequences) team_layout.memory = reference;
  for (std::size_t i = 0; i < shapes.size() && i < TeamLayout::kSequences; ++i) {
    team_layout.first_page[i] = shapes[i].first_unit;
    team_layout.coded_pages[i] = shapes[i].coded_units;
    team_layout.sinks[i] = shapes[i].sinks;
  }
}

void AttendPlan::Impl::split_prefill() {
  const std::int64_t vectors = static_cast<std::int64_t>(args.rows) * args.group;
  const auto blocks = static_cast<int>((vectors + prefill->vectors - 1) / prefill->vectors);
  int ranks = std::min(prefill->ranks, blocks);
  int slots = prepare_prefill(*prefill, args.key_bytes, ranks);
  if (slots == 0) {  // a part of a GPU may have no room for a cluster
    ranks = 1;
    slots = prepare_prefill(*prefill, args.key_bytes, ranks);
  }
  prefill_split.ranks = ranks;
  prefill_split.vector_blocks = (blocks + ranks - 1) / ranks * ranks;
  const std::int64_t seen =
      args.window > 0 ? std::min<std::int64_t>(longest, std::int64_t{args.window} + args.rows) : longest;
  const std::int64_t items = static_cast<std::int64_t>(prefill_split.vector_blocks) * args.kv_heads * sequences;
  // What a thread block does at once: 64 tokens, or a page per warp.
  const std::int64_t stage = prefill->few ? prefill->threads / 32 * kPage : 64;
  prefill_split.parts =
      std::min(choose_parts(items, (seen + stage - 1) / stage, slots), 65535 / std::max(1, sequences));
  partials = DeviceBuffer<float>(prefill_workspace(*prefill, prefill_split, args.kv_heads, sequences));
  args.partials = partials.get();
  if (prefill->few) make_counters(static_cast<std::size_t>(items));
}

AttendPlan::~AttendPlan() = default;
AttendPlan::AttendPlan(AttendPlan&&) noexcept = default;

AttendPlan::AttendPlan(const Batch& batch, int query_heads, int rows, const AttendOptions& options, int headroom,
                       AttendPath path)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.batch = &batch.impl();
  const PagePool::Impl& pool = *impl.batch->pool;
  check_shape(pool.shape, query_heads, rows, options, headroom);
  impl.batch->check_current();
  impl.generation = impl.batch->generation;
  impl.options = options;
  impl.query_heads = query_heads;
  impl.sequences = batch.size();

  DecodeArgs& args = impl.args;
  args.pages = pool.pages.get();
  args.page_stride = static_cast<std::int64_t>(pool.page_stride());
  args.exact = pool.exact.get();
  args.exact_stride = static_cast<std::int64_t>(pool.exact_stride());
  args.table = impl.batch->table();
  args.table_stride = impl.batch->table_stride;
  args.exact_table = impl.batch->exact_table();
  args.exact_table_stride = impl.batch->exact_stride;
  args.lengths = impl.batch->lengths();
  args.q_head = pool.shape.key_dim;
  args.q_row = args.q_head * query_heads;
  args.q_sequence = args.q_row * rows;
  args.out_head = pool.shape.value_dim;
  args.out_row = args.out_head * query_heads;
  args.out_sequence = args.out_row * rows;
  args.sinks = options.sinks;
  args.scale = options.scale != 0 ? options.scale : 1.0F / std::sqrt(static_cast<float>(pool.shape.key_dim));
  args.softcap = options.softcap;
  args.softcap_rate = options.softcap > 0 ? 2.0F / options.softcap : 0.0F;
  args.window = std::min(options.sliding_window, 1 << 30);  // positions less a window must not leave their type
  args.rows = rows;
  args.group = query_heads / pool.shape.kv_heads;
  args.kv_heads = pool.shape.kv_heads;
  args.boosted = pool.format.boosted;
  args.key_bytes = pool.format.key.bytes();
  args.pages_settled = options.overlap && options.pages_settled ? 1 : 0;

  for (const Sequence* sequence : impl.batch->sequences) {
    impl.served.push_back(impl.served_tokens(sequence->impl(), headroom));
    impl.longest = std::max(impl.longest, impl.served_tokens(sequence->impl(), std::min(headroom, kPage)));
  }
  DecodeVariant variant = variant_of(pool.format);
  variant.n_tiles = rows * args.group > 4 ? 2 : 1;
  const DecodeKernel* flat = find_flat(variant, args.key_bytes);
  impl.block = find_block_kernel(pool.format, pool.block, rows, args.group, path);
  impl.prefill = impl.block ? &*impl.block : find_prefill_kernel(pool.format);
  const bool few = impl.block && impl.block->few;
  impl.path = choose_path(path, rows, flat != nullptr || few, impl.prefill != nullptr && !few);
  if (impl.path == AttendPath::integer && !few) {
    impl.split_integer(*flat, headroom);
    return;
  }
  const std::vector<PlanSequence> shapes = impl.describe_sequences(headroom, 1);
  impl.load_layout(shapes);
  if (impl.path == AttendPath::reference) return;
  if (few) {
    impl.split_few(impl.choose_few(shapes), shapes);
  } else {
    impl.split_prefill();
  }
}

void AttendPlan::run(const void* q, void* out, float* lse, void* stream) const {
  const Impl& impl = *impl_;
  if (impl.generation != impl.batch->generation) {
    refuse("the plan is older than the batch's pages: they were sealed or bound anew since");
  }
  impl.batch->check_current();
  for (std::size_t b = 0; b < impl.served.size(); ++b) {
    const std::int64_t length = impl.batch->sequences[b]->length();
    if (length > impl.served[b]) {
      refuse("sequence " + std::to_string(b) + " has grown to " + std::to_string(length) + " tokens; the plan serves " +
             std::to_string(impl.served[b]));
    }
  }
  check_alignment("q", q, 8);
  check_alignment("out", out, 4);
  check_alignment("lse", lse, 4);
  DecodeArgs args = impl.args;
  args.q = q;
  args.out = out;
  args.lse = lse;
  if (impl.sequences == 0) return;
  if (impl.path == AttendPath::reference) {
    launch_reference(impl.batch->pool->format, impl.batch->pool->block, args, impl.reference, impl.sequences, stream);
    return;
  }
  if (impl.block && impl.block->team > 1) {
    launch_teams(*impl.block, args, impl.team_layout, impl.batch->pool->block, impl.prefill_split, impl.sequences,
                 impl.options.overlap, stream);
    return;
  }
  if (impl.path == AttendPath::prefill || impl.block) {
    launch_prefill(*impl.prefill, args, impl.reference, impl.batch->pool->block, impl.prefill_split, impl.sequences,
                   stream);
    return;
  }
  launch_decode(*impl.kernel, args, impl.inlined, impl.plan.split.groups, impl.plan.split.ranks, impl.options.overlap,
                stream);
}

AttendPath AttendPlan::path() const {
  return impl_->path;
}

namespace {

std::string describe_teams(const AttendPlan::Impl& impl) {
  const PrefillKernel& kernel = *impl.prefill;
  if (kernel.team == 1) return "";
  return ", " + std::to_string(kernel.threads / 32 / kernel.team) + " teams of " + std::to_string(kernel.team) +
         " warps" + (impl.options.overlap ? ", overlapped" : "");
}

std::string describe_clusters(const PrefillSplit& split) {
  return split.ranks == 1 ? "" : ", clusters of " + std::to_string(split.ranks);
}

}  // namespace

std::string AttendPlan::describe() const {
  if (impl_->path == AttendPath::reference) return "reference";
  if (impl_->path == AttendPath::prefill || impl_->block) {
    const std::string name = !impl_->prefill->block ? "prefill, "
                             : impl_->prefill->few  ? "integer from CPU blocks, "
                                                    : "prefill from CPU blocks, ";
    return name + std::to_string(impl_->prefill_split.vector_blocks) + " blocks of " +
           std::to_string(impl_->prefill->vectors) + " vectors, " + std::to_string(impl_->prefill_split.parts) +
           " parts" + describe_clusters(impl_->prefill_split) + describe_teams(*impl_);
  }
  const Split& split = impl_->plan.split;
  return "integer, " + std::to_string(split.groups) + " x " + std::to_string(split.ranks) + " blocks of " +
         std::to_string(impl_->kernel->warps) + " warps" + (split.half ? ", half pages" : "") +
         (impl_->options.overlap ? ", overlapped" : "") + ", " + std::to_string(impl_->plan.segments.size()) +
         " segments";
}

}  // namespace kvant::cuda
