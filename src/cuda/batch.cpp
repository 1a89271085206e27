// Batch: device tables of the sequences in a call, appending and sealing.
#include <algorithm>

#include "base/half.hpp"
#include "cuda/check.hpp"
#include "cuda/pool.hpp"

namespace kvant::cuda {
namespace {

constexpr int kMaxAppendRows = 1 << 19;  // what a grid of the append kernel holds
constexpr int kMaxSequences = 65535;     // what grids of the attention kernels hold

// Work on a stream that is being captured happens when the graph runs, and again with every run.
bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "the stream's state");
  return status != cudaStreamCaptureStatusNone;
}

// Calls `undo` when it goes, unless all went well.
template <class Undo>
class Rollback {
 public:
  explicit Rollback(Undo undo) : undo_(std::move(undo)) {}
  ~Rollback() {
    if (armed_) undo_();
  }
  Rollback(const Rollback&) = delete;
  Rollback& operator=(const Rollback&) = delete;
  void commit() { armed_ = false; }

 private:
  Undo undo_;
  bool armed_ = true;
};

}  // namespace

Batch::Impl::Impl(std::shared_ptr<PagePool::Impl> p, int max_sequences, std::int64_t max_tokens)
    : pool(std::move(p)), capacity(max_sequences) {
  if (max_sequences < 1 || max_sequences > kMaxSequences) {
    base::fail(ErrorCode::invalid_argument, "max_sequences is " + std::to_string(max_sequences) + "; allowed: 1 to " +
                                                std::to_string(kMaxSequences));
  }
  if (max_tokens < 1 || max_tokens > (std::int64_t{1} << 30)) {
    base::fail(ErrorCode::invalid_argument, "max_tokens is " + std::to_string(max_tokens) + "; allowed: 1 to 2^30");
  }
  table_stride = (max_tokens + kPage - 1) / kPage;
  // The tail may span the whole sequence while nothing is sealed; entry 0 is the page of the sinks.
  exact_stride = 1 + table_stride;
  const auto rows = static_cast<std::size_t>(2 + table_stride + exact_stride);
  tables = DeviceBuffer<std::int32_t>(base::checked_multiply(static_cast<std::size_t>(capacity), rows));
  host_tables.resize(tables.count());
}

void Batch::Impl::upload(bool lengths_too, void* stream) {
  std::int32_t* out = host_tables.data();
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    const Sequence::Impl& s = sequences[b]->impl();
    out[b] = static_cast<std::int32_t>(s.length);
    out[static_cast<std::size_t>(capacity) + b] = static_cast<std::int32_t>(s.tail_begin());
    std::int32_t* pages = out + 2 * static_cast<std::int64_t>(capacity) + static_cast<std::int64_t>(b) * table_stride;
    std::copy(s.pages.begin(), s.pages.end(), pages);
    std::int32_t* exact =
        out + static_cast<std::int64_t>(capacity) * (2 + table_stride) + static_cast<std::int64_t>(b) * exact_stride;
    exact[0] = s.sink_page;
    std::copy(s.tail.begin(), s.tail.end(), exact + 1);
  }
  const std::size_t from = lengths_too ? 0 : static_cast<std::size_t>(capacity);
  check(cudaMemcpyAsync(tables.get() + from, out + from, (tables.count() - from) * sizeof(std::int32_t),
                        cudaMemcpyHostToDevice, as_stream(stream)),
        "copy of the page tables");
}

void Batch::Impl::check_current() const {
  pool->check_device();
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    if (sequences[b]->impl().version == versions[b]) continue;
    base::fail(
        ErrorCode::invalid_argument,
        "sequence " + std::to_string(b) + " was changed by another batch or replaced since it was bound: bind it anew");
  }
}

void Batch::Impl::note_change() {
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    versions[b] = sequences[b]->impl().version = Sequence::Impl::next_version();
  }
}

Batch::Batch(const PagePool& pool, int max_sequences, std::int64_t max_tokens)
    : impl_(std::make_unique<Impl>(pool.impl(), max_sequences, max_tokens)) {}
Batch::~Batch() = default;

int Batch::size() const {
  return static_cast<int>(impl_->sequences.size());
}

void Batch::bind(std::span<Sequence* const> sequences, void* stream) {
  Impl& impl = *impl_;
  if (sequences.size() > static_cast<std::size_t>(impl.capacity)) {
    base::fail(ErrorCode::invalid_argument, std::to_string(sequences.size()) + " sequences; the batch was made for " +
                                                std::to_string(impl.capacity));
  }
  impl.pool->check_device();
  std::vector<std::int64_t> versions;
  for (const Sequence* sequence : sequences) {
    if (sequence == nullptr || sequence->impl().pool != impl.pool) {
      base::fail(ErrorCode::invalid_argument, "a sequence is null or of another pool");
    }
    const std::int64_t room = sequence->impl().room();  // what is reserved for it counts as well
    if (room > impl.table_stride * kPage) {
      base::fail(ErrorCode::out_of_range, "a sequence has pages for " + std::to_string(room) +
                                              " tokens; the batch was made for " +
                                              std::to_string(impl.table_stride * kPage));
    }
    versions.push_back(sequence->impl().version);
  }
  std::vector<const Sequence*> sorted(sequences.begin(), sequences.end());
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    base::fail(ErrorCode::invalid_argument, "a sequence is bound twice: fork it");
  }
  std::vector<Sequence*> bound(sequences.begin(), sequences.end());
  impl.sequences.swap(bound);
  Rollback rollback([&] { impl.sequences.swap(bound); });
  impl.upload(true, stream);
  rollback.commit();
  impl.versions = std::move(versions);
  ++impl.generation;
}

void Batch::reserve(int tokens, void* stream) {
  Impl& impl = *impl_;
  if (tokens < 0) {
    base::fail(ErrorCode::invalid_argument, "tokens is " + std::to_string(tokens) + "; allowed: 0 and more");
  }
  impl.check_current();
  std::int64_t needed = 0;
  const auto missing = [&](const Sequence::Impl& s) {
    return std::max<std::int64_t>(0, (s.length + tokens - s.room() + kPage - 1) / kPage);
  };
  for (const Sequence* sequence : impl.sequences) {
    if (sequence->length() + tokens > impl.table_stride * kPage) {
      base::fail(ErrorCode::out_of_range, "a sequence would grow to " + std::to_string(sequence->length() + tokens) +
                                              " tokens; the batch was made for " +
                                              std::to_string(impl.table_stride * kPage));
    }
    needed += missing(sequence->impl());
  }
  if (needed == 0) return;
  if (needed > impl.pool->exact_numbers.free()) {
    base::fail(ErrorCode::out_of_memory, std::to_string(needed) + " more exact pages are needed; the pool has " +
                                             std::to_string(impl.pool->exact_numbers.free()));
  }
  if (is_capturing(stream)) {
    base::fail(ErrorCode::invalid_argument, "the stream is being captured and " + std::to_string(needed) +
                                                " more exact pages are needed: call reserve before the capture");
  }
  std::vector<Sequence::Impl*> taken;  // who was given a page, in order
  Rollback rollback([&] {
    for (Sequence::Impl* s : taken) {
      impl.pool->exact_numbers.drop(s->tail.back());
      s->tail.pop_back();
    }
  });
  taken.reserve(static_cast<std::size_t>(needed));
  for (Sequence* sequence : impl.sequences) {
    Sequence::Impl& s = sequence->impl();
    const auto count = static_cast<std::size_t>(missing(s));
    s.tail.reserve(s.tail.size() + count);
    for (std::size_t i = 0; i < count; ++i) {
      s.tail.push_back(impl.pool->exact_numbers.take());
      taken.push_back(&s);
      // Rows behind the end have the weight zero, but zero times a NaN of the page's last owner is a NaN.
      check(cudaMemsetAsync(impl.pool->exact_page(s.tail.back()), 0, impl.pool->exact_stride(), as_stream(stream)),
            "zeros for a page");
    }
  }
  impl.upload(false, stream);
  rollback.commit();
  impl.note_change();
}

void Batch::append(const void* keys, const void* values, int rows, void* stream) {
  if (rows < 0 || rows > kMaxAppendRows) {
    base::fail(ErrorCode::invalid_argument,
               "rows is " + std::to_string(rows) + "; allowed: 0 to " + std::to_string(kMaxAppendRows));
  }
  if (rows == 0 || size() == 0) return;
  impl_->pool->check_rotation();
  if (!impl_->pool->seals()) {
    base::fail(ErrorCode::unsupported,
               "append for recipe '" + to_text(impl_->pool->recipe) + "' with " +
                   std::to_string(impl_->pool->shape.kv_heads) + " KV heads of " +
                   std::to_string(impl_->pool->shape.value_dim) +
                   " channels: a token's values under one grid do not fit a thread block; append and seal on the CPU "
                   "and upload");
  }
  reserve(rows, stream);
  const Impl& impl = *impl_;
  AppendArgs args;
  args.keys = static_cast<const std::uint16_t*>(keys);
  args.values = static_cast<const std::uint16_t*>(values);
  args.exact = impl.pool->exact.get();
  args.exact_stride = static_cast<std::int64_t>(impl.pool->exact_stride());
  args.exact_table = impl.exact_table();
  args.exact_table_stride = impl.exact_stride;
  args.tail_begin = impl.tail_begin();
  args.lengths = impl.lengths();
  args.rows = rows;
  args.kv_heads = impl.pool->shape.kv_heads;
  const float largest = base::largest_stored(impl.pool->shape.dtype);
  args.largest = impl.pool->format.bfloat ? base::float_to_bfloat(largest) : base::float_to_half(largest);
  args.invalid = impl.pool->invalid.get();
  launch_append(impl.pool->format, args, size(), stream);
  count_appended(rows);
}

void Batch::count_appended(int rows) {
  impl_->check_current();
  for (const Sequence* sequence : impl_->sequences) {
    const std::int64_t room = sequence->impl().room() - sequence->length();
    if (rows < 0 || rows > room) {
      base::fail(ErrorCode::out_of_range,
                 "rows is " + std::to_string(rows) + "; a sequence has room for 0 to " + std::to_string(room));
    }
  }
  for (Sequence* sequence : impl_->sequences) sequence->impl().length += rows;
  impl_->note_change();
}

namespace {

// What sealing changes of a sequence, as it was before.
struct Before {
  Sequence::Impl* sequence;
  std::size_t pages;
  std::vector<std::int32_t> tail;
  std::int32_t sink_page;
  int sinks;
  std::int64_t blind_seals;
};

void restore(PagePool::Impl& pool, std::vector<Before>& all) {
  for (Before& before : all) {
    Sequence::Impl& s = *before.sequence;
    for (; s.pages.size() > before.pages; s.pages.pop_back()) {
      if (s.pages.back() >= 0) pool.page_numbers.drop(s.pages.back());
    }
    s.tail.swap(before.tail);
    s.sink_page = before.sink_page;
    s.sinks = before.sinks;
    s.blind_seals = before.blind_seals;
  }
}

}  // namespace

int Batch::seal_ready(void* stream) {
  Impl& impl = *impl_;
  impl.check_current();
  PagePool::Impl& pool = *impl.pool;
  const int sink = pool.recipe.sink;
  const auto ready = [&](const Sequence::Impl& s) {
    const std::int64_t full = (s.length - pool.recipe.window - s.tail_begin()) / kPage;
    return static_cast<int>(std::clamp<std::int64_t>(full, 0, static_cast<std::int64_t>(s.tail.size())));
  };
  std::int64_t needed = 0;
  int count = 0;
  for (const Sequence* sequence : impl.sequences) {
    const int pages = ready(sequence->impl());
    count += pages;
    needed += pages - (pages > 0 && sequence->impl().pages.empty() && sink == kPage ? 1 : 0);
  }
  if (count == 0) return 0;
  if (needed > pool.page_numbers.free()) {
    base::fail(ErrorCode::out_of_memory, std::to_string(needed) + " pages are ready to be sealed; the pool has " +
                                             std::to_string(pool.page_numbers.free()) + " free");
  }
  std::vector<BlockSealJob> jobs;
  std::vector<std::int32_t> done;  // exact pages free once the jobs have run
  std::vector<Before> changed;
  Rollback rollback([&] { restore(pool, changed); });
  for (Sequence* sequence : impl.sequences) {
    Sequence::Impl& s = sequence->impl();
    const int pages = ready(s);
    if (pages == 0) continue;
    changed.push_back({&s, s.pages.size(), s.tail, s.sink_page, s.sinks, s.blind_seals});
    s.pages.reserve(s.pages.size() + static_cast<std::size_t>(pages));
    for (int i = 0; i < pages; ++i) {
      const std::int32_t exact = s.tail[static_cast<std::size_t>(i)];
      const bool first = s.pages.empty();
      if (first && sink > 0) {
        s.sink_page = exact;
        s.sinks = sink;
      } else {
        done.push_back(exact);
      }
      s.pages.push_back(first && sink == kPage ? -1 : pool.page_numbers.take());
      if (s.pages.back() < 0) continue;
      jobs.push_back({exact, s.pages.back(), first ? sink : 0, static_cast<std::int32_t>(s.pages.size() - 1) * kPage});
      if (pool.blind) ++s.blind_seals;
    }
    s.tail.erase(s.tail.begin(), s.tail.begin() + pages);
  }
  if (!jobs.empty()) pool.seal(jobs, stream);
  impl.upload(false, stream);
  rollback.commit();
  for (const std::int32_t exact : done) pool.exact_numbers.drop(exact);
  impl.note_change();
  ++impl.generation;
  return count;
}

}  // namespace kvant::cuda
