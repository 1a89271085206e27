// The inside of PagePool, Sequence and Batch.
#pragma once

#include <optional>
#include <vector>

#include "cuda/block.hpp"
#include "cuda/block_seal.hpp"
#include "cuda/block_turn.hpp"
#include "cuda/device_buffer.hpp"
#include "cuda/device_format.hpp"
#include "cuda/seal.hpp"
#include "kvant/cuda.hpp"

namespace kvant::cuda {

// Numbers 0..count-1 with reference counts.
class Numbers {
 public:
  explicit Numbers(int count);
  int free() const { return static_cast<int>(free_.size()); }
  int used() const { return static_cast<int>(uses_.size() - free_.size()); }
  std::int32_t take();  // Error(out_of_memory) when none is free
  void share(std::int32_t number) { ++uses_[static_cast<std::size_t>(number)]; }
  void drop(std::int32_t number);

 private:
  std::vector<std::int32_t> free_;
  std::vector<std::int32_t> uses_;
};

struct PagePool::Impl {
  int device = current_device();
  Recipe recipe;
  CacheShape shape;
  PageLayout layout;
  DeviceFormat format;
  BlockFormat block;   // present(): pages are blocks
  bool blind = false;  // what seals a page here would look at queries
  DeviceBuffer<std::uint8_t> pages;
  DeviceBuffer<std::uint8_t> exact;
  DeviceBuffer<unsigned long long> invalid;  // AppendArgs::invalid
  DeviceBuffer<std::uint16_t> key_ranges;    // BlockSealArgs::key_ranges
  DeviceBuffer<std::uint32_t> list_counts;   // BlockSealArgs::list_counts
  DeviceBuffer<double> turns;                // BlockTurns::turns
  DeviceBuffer<float> turn_offsets;          // BlockTurns::offsets
  DeviceBuffer<float> turn_places;           // BlockTurns::places
  std::optional<KeyRotation> rotation;       // of recipes with keys before RoPE, once the host has given it
  Numbers page_numbers;
  Numbers exact_numbers;
  BlockSealArgs block_seal;  // of block pages

  Impl(const Recipe& r, const CacheShape& s, int page_count, int exact_count);
  Impl(const Recipe& r, const CacheShape& s, const PoolFormat& chosen, int page_count, int exact_count);
  // Throws Error(invalid_argument) where the current device is not the pool's.
  void check_device() const;
  // Whether this build has kernels that write the pool's pages.
  bool seals() const;
  void seal(std::span<const BlockSealJob> jobs, void* stream) const;
  // ---- pool_rotation.cpp
  bool needs_rotation() const { return block.before_rope != 0; }
  // Throws Error(invalid_argument) while a rotation is needed and not known.
  void check_rotation() const;
  // Throws Error(invalid_argument) for a cache whose keys were turned otherwise, or by other positions.
  void check_rotation_of(const Cache& cache) const;
  std::size_t page_stride() const {
    if (block.present()) return static_cast<std::size_t>(block.page_bytes);
    return format.head_bytes() * static_cast<std::size_t>(shape.kv_heads);
  }
  std::size_t exact_stride() const {
    return static_cast<std::size_t>(format.exact.page_bytes()) * static_cast<std::size_t>(shape.kv_heads);
  }
  std::uint8_t* page(std::int32_t number) const {
    return pages.get() + static_cast<std::size_t>(number) * page_stride();
  }
  std::uint8_t* exact_page(std::int32_t number) const {
    return exact.get() + static_cast<std::size_t>(number) * exact_stride();
  }
};

struct Sequence::Impl {
  std::shared_ptr<PagePool::Impl> pool;
  std::int64_t length = 0;
  std::int64_t blind_seals = 0;
  // Pages in order of position. Sealed ones come first, but for a first page that holds sinks only: it stays exact, its
  // entry here is -1.
  std::vector<std::int32_t> pages;
  std::vector<std::int32_t> tail;  // exact pages from position 128 * pages.size() on
  std::int32_t sink_page = -1;     // exact page of the first `sinks` tokens once the first page is behind the window
  int sinks = 0;
  // Unlike that of any other state of any sequence: a batch tells by it whether its tables are up to date.
  std::int64_t version = next_version();

  explicit Impl(std::shared_ptr<PagePool::Impl> p) : pool(std::move(p)) {}
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::int64_t tail_begin() const { return static_cast<std::int64_t>(pages.size()) * kPage; }
  // Tokens that the pages it has hold.
  std::int64_t room() const { return tail_begin() + static_cast<std::int64_t>(tail.size()) * kPage; }
  bool first_is_exact() const { return !pages.empty() && pages.front() < 0; }
  static std::int64_t next_version();
};

// Throws Error(invalid_argument) for a cache that is no [sinks | sealed pages | open tail] by number of token: one that
// was given positions may keep exact tokens elsewhere, and with them open pages.
void check_sinks(const PageStore::Impl& store, int sink);

struct Batch::Impl {
  std::shared_ptr<PagePool::Impl> pool;
  int capacity = 0;
  std::int64_t table_stride = 0;
  std::int64_t exact_stride = 0;
  std::vector<Sequence*> sequences;
  std::vector<std::int64_t> versions;  // of the sequences, as the tables have them
  std::int64_t generation = 0;         // grows when pages are sealed or sequences bound: older plans do not fit
  DeviceBuffer<std::int32_t> tables;   // lengths, tail starts, page table, exact table: one copy sets all
  std::vector<std::int32_t> host_tables;

  Impl(std::shared_ptr<PagePool::Impl> p, int max_sequences, std::int64_t max_tokens);
  std::int32_t* lengths() const { return tables.get(); }
  std::int32_t* tail_begin() const { return tables.get() + capacity; }
  std::int32_t* table() const { return tables.get() + 2 * static_cast<std::int64_t>(capacity); }
  std::int32_t* exact_table() const { return table() + static_cast<std::int64_t>(capacity) * table_stride; }
  // Copies the sequences' tables; nothing has changed when it throws.
  void upload(bool lengths_too, void* stream);
  // Throws Error(invalid_argument) where the current device is another one, or a sequence was changed or replaced
  // otherwise than by this batch since it was bound.
  void check_current() const;
  // After a change of the sequences by this batch.
  void note_change();
};

}  // namespace kvant::cuda
