// Batch: device tables of the sequences in a call, appending and sealing.
#include <algorithm>

#include "base/half.hpp"
#include "cuda/check.hpp"
#include "cuda/pool.hpp"

namespace kvant::cuda {
namespace {

constexpr int kMaxAppendRows = 1 << 19;  // what a grid of the append kernel holds

}  // namespace

Batch::Impl::Impl(std::shared_ptr<PagePool::Impl> p, int max_sequences, std::int64_t max_tokens)
    : pool(std::move(p)), capacity(max_sequences) {
  if (max_sequences < 1 || max_sequences > 65536) {
    base::fail(ErrorCode::invalid_argument,
               "max_sequences is " + std::to_string(max_sequences) + "; allowed: 1 to 65536");
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
  for (const Sequence* sequence : sequences) {
    if (sequence == nullptr || sequence->impl().pool != impl.pool) {
      base::fail(ErrorCode::invalid_argument, "a sequence is null or of another pool");
    }
    if (sequence->length() > impl.table_stride * kPage) {
      base::fail(ErrorCode::out_of_range, "a sequence has " + std::to_string(sequence->length()) +
                                              " tokens; the batch was made for " +
                                              std::to_string(impl.table_stride * kPage));
    }
  }
  impl.sequences.assign(sequences.begin(), sequences.end());
  ++impl.generation;
  impl.upload(true, stream);
}

void Batch::reserve(int tokens, void* stream) {
  Impl& impl = *impl_;
  int needed = 0;
  const auto missing = [&](const Sequence::Impl& s) {
    const std::int64_t end = (s.length + tokens + kPage - 1) / kPage;
    return static_cast<int>(end - static_cast<std::int64_t>(s.pages.size() + s.tail.size()));
  };
  for (const Sequence* sequence : impl.sequences) {
    if (sequence->length() + tokens > impl.table_stride * kPage) {
      base::fail(ErrorCode::out_of_range, "a sequence would grow to " + std::to_string(sequence->length() + tokens) +
                                              " tokens; the batch was made for " +
                                              std::to_string(impl.table_stride * kPage));
    }
    needed += std::max(0, missing(sequence->impl()));
  }
  if (needed == 0) return;
  if (needed > impl.pool->exact_numbers.free()) {
    base::fail(ErrorCode::out_of_memory, std::to_string(needed) + " more exact pages are needed; the pool has " +
                                             std::to_string(impl.pool->exact_numbers.free()));
  }
  for (Sequence* sequence : impl.sequences) {
    Sequence::Impl& s = sequence->impl();
    for (int i = missing(s); i > 0; --i) {
      s.tail.push_back(impl.pool->exact_numbers.take());
      // Rows behind the end have the weight zero, but zero times a NaN of the page's last owner is a NaN.
      check(cudaMemsetAsync(impl.pool->exact_page(s.tail.back()), 0, impl.pool->exact_stride(), as_stream(stream)),
            "zeros for a page");
    }
  }
  impl.upload(false, stream);
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
  for (const Sequence* sequence : impl_->sequences) {
    const Sequence::Impl& s = sequence->impl();
    const std::int64_t room = s.tail_begin() + static_cast<std::int64_t>(s.tail.size()) * kPage - s.length;
    if (rows < 0 || rows > room) {
      base::fail(ErrorCode::out_of_range,
                 "rows is " + std::to_string(rows) + "; a sequence has room for 0 to " + std::to_string(room));
    }
  }
  for (Sequence* sequence : impl_->sequences) sequence->impl().length += rows;
}

int Batch::seal_ready(void* stream) {
  Impl& impl = *impl_;
  PagePool::Impl& pool = *impl.pool;
  const int window = pool.recipe.window;
  const int sink = pool.recipe.sink;
  const auto ready = [&](const Sequence::Impl& s, std::size_t i) {
    return s.length - (s.tail_begin() + static_cast<std::int64_t>(i + 1) * kPage) >= window;
  };
  std::vector<BlockSealJob> jobs;
  std::vector<std::int32_t> done;  // exact pages free once the jobs have run
  int needed = 0;
  bool changes = false;
  for (const Sequence* sequence : impl.sequences) {
    const Sequence::Impl& s = sequence->impl();
    for (std::size_t i = 0; i < s.tail.size() && ready(s, i); ++i) {
      changes = true;
      needed += s.pages.empty() && i == 0 && sink == kPage ? 0 : 1;
    }
  }
  if (!changes) return 0;
  if (needed > pool.page_numbers.free()) {
    base::fail(ErrorCode::out_of_memory, std::to_string(needed) + " pages are ready to be sealed; the pool has " +
                                             std::to_string(pool.page_numbers.free()) + " free");
  }
  for (Sequence* sequence : impl.sequences) {
    Sequence::Impl& s = sequence->impl();
    while (!s.tail.empty() && ready(s, 0)) {
      const std::int32_t exact = s.tail.front();
      const bool first = s.pages.empty();
      s.tail.erase(s.tail.begin());
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
  }
  if (!jobs.empty()) pool.seal(jobs, stream);
  for (const std::int32_t exact : done) pool.exact_numbers.drop(exact);
  ++impl.generation;
  impl.upload(false, stream);
  return static_cast<int>(jobs.size());
}

}  // namespace kvant::cuda
