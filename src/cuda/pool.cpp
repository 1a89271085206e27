#include "cuda/pool.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "base/half.hpp"
#include "cache/store.hpp"
#include "methods/method.hpp"

namespace kvant::cuda {

// ---- the device

DeviceInfo device_info() {
  int device = 0;
  check(cudaGetDevice(&device), "CUDA device");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "CUDA device properties");
  DeviceInfo info{properties.name,          device, properties.major, properties.minor, properties.multiProcessorCount,
                  properties.totalGlobalMem};
  if (info.major < 8) {
    base::fail(ErrorCode::unsupported, "device '" + info.name + "' has compute capability " +
                                           std::to_string(info.major) + "." + std::to_string(info.minor) +
                                           "; kvant needs 8.0");
  }
  return info;
}

bool is_available() noexcept {
  try {
    device_info();
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::size_t page_bytes(const Recipe& recipe, const CacheShape& shape) {
  const PoolFormat format = choose_format(recipe, shape);
  if (format.block.present()) return static_cast<std::size_t>(format.block.page_bytes);
  return format.device.head_bytes() * static_cast<std::size_t>(shape.kv_heads);
}

// ---- Numbers

Numbers::Numbers(int count) : uses_(static_cast<std::size_t>(count)) {
  for (int i = count; i-- > 0;) free_.push_back(i);
}

std::int32_t Numbers::take() {
  if (free_.empty()) {
    base::fail(ErrorCode::out_of_memory, "the pool has no free page left of its " + std::to_string(uses_.size()));
  }
  const std::int32_t number = free_.back();
  free_.pop_back();
  uses_[static_cast<std::size_t>(number)] = 1;
  return number;
}

void Numbers::drop(std::int32_t number) {
  if (--uses_[static_cast<std::size_t>(number)] == 0) free_.push_back(number);
}

// ---- PagePool

namespace {

// What the CPU counts as Counts::blind_seals where no query was observed.
bool looks_at_queries(const Recipe& recipe) {
  const auto classes = catalog::token_classes(recipe);
  return catalog::uses_queries(recipe) || (classes && classes->saliency == Saliency::attention);
}

int checked_count(const char* name, int count) {
  if (count < 0)
    base::fail(ErrorCode::invalid_argument,
               std::string(name) + " is " + std::to_string(count) + "; allowed: 0 and more");
  return count;
}

}  // namespace

PagePool::Impl::Impl(const Recipe& r, const CacheShape& s, int page_count, int exact_count)
    : Impl(r, s, choose_format(r, s), page_count, exact_count) {}

PagePool::Impl::Impl(const Recipe& r, const CacheShape& s, const PoolFormat& chosen, int page_count, int exact_count)
    : recipe(r),
      shape(s),
      layout(make_layout(r, s)),
      format(chosen.device),
      block(chosen.block),
      blind(looks_at_queries(r)),
      pages(base::checked_multiply(page_stride(), static_cast<std::size_t>(checked_count("pages", page_count)))),
      exact(
          base::checked_multiply(exact_stride(), static_cast<std::size_t>(checked_count("exact_pages", exact_count)))),
      invalid(1),
      page_numbers(page_count),
      exact_numbers(exact_count) {
  device_info();  // refuses devices without kernels
  // Tiles are read as wholes: rows past a sequence's end must at least be numbers.
  if (exact_count > 0) exact.fill_zero();
  invalid.fill_zero();
  if (!block.present()) return;
  const std::vector<std::uint16_t> ranges = calibrated_ranges(layout, shape.kv_heads, shape.dtype);
  if (!ranges.empty()) {
    key_ranges = DeviceBuffer<std::uint16_t>(ranges.size());
    key_ranges.copy_from(ranges.data(), ranges.size());
  }
  block_seal = make_block_seal(recipe, layout, block);
  block_seal.exact = exact.get();
  block_seal.exact_stride = static_cast<std::int64_t>(exact_stride());
  block_seal.pages = pages.get();
  block_seal.page_stride = static_cast<std::int64_t>(page_stride());
  block_seal.key_ranges = key_ranges.get();
  list_counts = DeviceBuffer<std::uint32_t>(block_list_counts(block_seal));
  block_seal.list_counts = list_counts.get();
}

void PagePool::Impl::check_device() const {
  const int current = current_device();
  if (current == device) return;
  base::fail(ErrorCode::invalid_argument,
             "the current device is " + std::to_string(current) + "; the pool is on " + std::to_string(device));
}

bool PagePool::Impl::seals() const {
  return block.present() ? can_seal_blocks(block_seal, most_shared_bytes()) : can_seal(format, layout, shape.kv_heads);
}

void PagePool::Impl::seal(std::span<const BlockSealJob> jobs, void* stream) const {
  if (block.present()) return launch_block_seal(block_seal, format.bfloat, jobs, stream);
  SealArgs args = make_seal_args(format, layout, shape.kv_heads);
  args.exact = exact.get();
  args.exact_stride = static_cast<std::int64_t>(exact_stride());
  args.pages = pages.get();
  args.page_stride = static_cast<std::int64_t>(page_stride());
  std::vector<SealJob> plain;
  for (const BlockSealJob& job : jobs) plain.push_back({job.exact_page, job.page, job.skip});
  launch_seal(format, args, plain, stream);
}

PagePool::PagePool(const Recipe& recipe, const CacheShape& shape, int pages, int exact_pages)
    : impl_(std::make_shared<Impl>(recipe, shape, pages, exact_pages)) {}
const Recipe& PagePool::recipe() const {
  return impl_->recipe;
}
const CacheShape& PagePool::shape() const {
  return impl_->shape;
}
int PagePool::free_pages() const {
  return impl_->page_numbers.free();
}
int PagePool::free_exact_pages() const {
  return impl_->exact_numbers.free();
}
std::size_t PagePool::bytes() const {
  return impl_->pages.bytes() + impl_->exact.bytes() + impl_->invalid.bytes() + impl_->key_ranges.bytes() +
         impl_->list_counts.bytes() + impl_->turns.bytes() + impl_->turn_offsets.bytes() + impl_->turn_places.bytes();
}
std::int64_t PagePool::invalid_values(void* stream) const {
  unsigned long long count = 0;
  check(cudaMemcpyAsync(&count, impl_->invalid.get(), sizeof(count), cudaMemcpyDeviceToHost, as_stream(stream)),
        "count of invalid values");
  check(cudaStreamSynchronize(as_stream(stream)), "count of invalid values");
  return static_cast<std::int64_t>(count);
}

// ---- Sequence

std::int64_t Sequence::Impl::next_version() {
  static std::atomic<std::int64_t> last{0};
  return ++last;
}

Sequence::Impl::~Impl() {
  for (const std::int32_t page : pages) {
    if (page >= 0) pool->page_numbers.drop(page);
  }
  for (const std::int32_t page : tail) pool->exact_numbers.drop(page);
  if (sink_page >= 0) pool->exact_numbers.drop(sink_page);
}

Sequence::Sequence(const PagePool& pool) : impl_(std::make_unique<Impl>(pool.impl())) {}
Sequence::~Sequence() = default;
Sequence::Sequence(Sequence&&) noexcept = default;
Sequence& Sequence::operator=(Sequence&&) noexcept = default;

std::int64_t Sequence::length() const {
  return impl_->length;
}
std::int64_t Sequence::blind_seals() const {
  return impl_->blind_seals;
}
std::int64_t Sequence::sealed_pages() const {
  return static_cast<std::int64_t>(impl_->pages.size()) - (impl_->first_is_exact() ? 1 : 0);
}

namespace {

// One page of unquantized rows of the CPU as an exact page of the device. `tokens` rows, token i at row cells[i].
std::vector<std::uint8_t> exact_image(const PagePool::Impl& pool, const cache::RowsLayout& rows, const std::byte* data,
                                      std::span<const int> cells) {
  std::vector<std::uint8_t> image(pool.exact_stride());
  for (int head = 0; head < pool.shape.kv_heads; ++head) {
    std::uint8_t* out = image.data() + static_cast<std::size_t>(head * pool.format.exact.page_bytes());
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const int row = static_cast<int>(i);
      for (int d = 0; d < pool.shape.key_dim; ++d) {
        std::memcpy(out + pool.format.exact.key_at(cells[i], d), data + rows.key_at(head, d, row), 2);
      }
      for (int d = 0; d < pool.shape.value_dim; ++d) {
        std::memcpy(out + pool.format.exact.value_at(cells[i], d), data + rows.value_at(head, d, row), 2);
      }
    }
  }
  return image;
}

void upload_exact(const PagePool::Impl& pool, std::int32_t number, const std::vector<std::uint8_t>& image) {
  check(cudaMemcpy(pool.exact_page(number), image.data(), image.size(), cudaMemcpyHostToDevice), "upload of a page");
}

std::vector<int> first_cells(int count) {
  std::vector<int> cells(static_cast<std::size_t>(count));
  std::iota(cells.begin(), cells.end(), 0);
  return cells;
}

void upload_sealed(const PagePool::Impl& pool, std::int32_t number, std::span<const std::byte> block) {
  std::vector<std::byte> image(pool.page_stride());
  if (pool.block.present()) std::copy(block.begin(), block.end(), image.begin());
  for (int head = 0; !pool.block.present() && head < pool.shape.kv_heads; ++head) {
    to_device(
        pool.format, pool.layout, block, head,
        std::span(image).subspan(static_cast<std::size_t>(head) * pool.format.head_bytes(), pool.format.head_bytes()));
  }
  check(cudaMemcpy(pool.page(number), image.data(), image.size(), cudaMemcpyHostToDevice), "upload of a page");
}

}  // namespace

void check_sinks(const PageStore::Impl& store, int sink) {
  for (std::size_t i = 0; i < store.pages.size(); ++i) {
    if (!store.pages[i].sealed) continue;
    const std::vector<std::uint8_t>& cells = store.pages[i].sealed->exact.cells;
    bool fits = i == 0 || cells.empty();
    for (std::size_t k = 0; k < cells.size(); ++k) fits &= cells[k] == k;
    fits &= i == 0 || store.pages[i - 1].sealed != nullptr || (i == 1 && sink == kPage);
    if (!fits) {
      base::fail(ErrorCode::invalid_argument,
                 "positions: page " + std::to_string(i) +
                     " of the cache is sealed beside exact tokens that are not its first; on the GPU sinks come first");
    }
  }
}

Sequence Sequence::upload(const PagePool& pool, const Cache& cache) {
  PagePool::Impl& p = *pool.impl();
  const CacheShape& shape = cache.shape();
  const bool same = cache.recipe() == p.recipe && shape.kv_heads == p.shape.kv_heads &&
                    shape.key_dim == p.shape.key_dim && shape.value_dim == p.shape.value_dim &&
                    shape.dtype == p.shape.dtype;
  if (!same) base::fail(ErrorCode::invalid_argument, "the cache's recipe or shape is not the pool's");
  p.check_device();
  p.check_rotation_of(cache);
  const PageStore::Impl& store = cache.store().impl();
  check_sinks(store, p.recipe.sink);
  Sequence sequence(pool);
  Sequence::Impl& s = sequence.impl();
  for (std::size_t i = 0; i < store.pages.size(); ++i) {
    const cache::Page& page = store.pages[i];
    if (page.sealed) {
      if (s.pages.empty() && !s.tail.empty()) {  // the first page holds sinks only and was passed over by sealing
        s.sink_page = s.tail.back();
        s.tail.clear();
        s.sinks = p.recipe.sink;
        s.pages.push_back(-1);
      }
      s.pages.push_back(p.page_numbers.take());
      upload_sealed(p, s.pages.back(), cache.store().sealed_block(static_cast<std::int64_t>(i)));
      const cache::ExactRows& exact = page.sealed->exact;
      if (exact.cells.empty()) continue;
      s.sink_page = p.exact_numbers.take();
      s.sinks = static_cast<int>(exact.cells.size());
      const std::vector<int> cells(exact.cells.begin(), exact.cells.end());
      upload_exact(p, s.sink_page, exact_image(p, cache::RowsLayout(p.shape, exact.capacity), exact.rows.get(), cells));
    } else if (page.open) {
      s.tail.push_back(p.exact_numbers.take());
      upload_exact(p, s.tail.back(), exact_image(p, store.rows, page.open.get(), first_cells(kPage)));
    }
  }
  s.length = cache.length();
  settle_default_stream();
  return sequence;
}

std::vector<std::byte> Sequence::download_block(std::int64_t page) const {
  const PagePool::Impl& p = *impl_->pool;
  const auto count = static_cast<std::int64_t>(impl_->pages.size());
  if (page < 0 || page >= count || impl_->pages[static_cast<std::size_t>(page)] < 0) {
    base::fail(ErrorCode::out_of_range, "page " + std::to_string(page) + " is not sealed; the sequence has " +
                                            std::to_string(count) + " pages before its tail");
  }
  std::vector<std::byte> image(p.page_stride());
  check(cudaMemcpy(image.data(), p.page(impl_->pages[static_cast<std::size_t>(page)]), image.size(),
                   cudaMemcpyDeviceToHost),
        "download of a page");
  if (p.block.present()) return image;
  std::vector<std::byte> block(p.layout.page_bytes);
  for (int head = 0; head < p.shape.kv_heads; ++head) {
    from_device(p.format, p.layout,
                std::span<const std::byte>(image).subspan(static_cast<std::size_t>(head) * p.format.head_bytes(),
                                                          p.format.head_bytes()),
                head, block);
  }
  return block;
}

Sequence Sequence::fork(void* stream) const {
  impl_->pool->check_device();
  Sequence copy(PagePool(impl_->pool));
  Impl& to = copy.impl();
  PagePool::Impl& p = *impl_->pool;
  for (const std::int32_t page : impl_->pages) {
    if (page >= 0) p.page_numbers.share(page);
    to.pages.push_back(page);
  }
  if (impl_->sink_page >= 0) p.exact_numbers.share(impl_->sink_page);  // sinks are never written again
  to.sink_page = impl_->sink_page;
  to.sinks = impl_->sinks;
  to.length = impl_->length;
  to.blind_seals = impl_->blind_seals;
  for (const std::int32_t page : impl_->tail) {
    to.tail.push_back(p.exact_numbers.take());
    check(cudaMemcpyAsync(p.exact_page(to.tail.back()), p.exact_page(page), p.exact_stride(), cudaMemcpyDeviceToDevice,
                          as_stream(stream)),
          "copy of an open page");
  }
  return copy;
}

}  // namespace kvant::cuda
