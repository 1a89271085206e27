// The outliers of a head's values in shared memory. Where they lie in the list that heads share is known a page ahead,
// so that nobody waits for memory: the range comes with the page before, the slots with the page after that.
#pragma once

#include "cuda/block_page.cuh"

namespace kvant::cuda {

// Of two pages by turns: the range, then the slots' values, channels and places, each from the last 4 bytes' boundary
// on.
struct SlotRoom {
  static constexpr int slots = 192;  // more of them are read from memory
  static constexpr int page = 8;     // bytes before the address of the page
  static constexpr int values = 16;
  static constexpr int channels = values + 2 * slots + 16;
  static constexpr int places = channels + slots + 16;
  static constexpr int bytes = places + slots + 16;
};

// After a page's fetch() its copies must have arrived and those who unpack must have met before fetch_list(), and again
// after that before for_each().
template <class C>
class ListedSlots {
 public:
  __device__ explicit ListedSlots(std::uint8_t* shared) : rooms_(shared + C::slots_offset) {}

  __device__ void fetch(const BlockFormat& format, const std::uint8_t* page, int head) {
    fetched_ ^= 1;
    if (C::unpack_thread() != 0) return;
    std::uint8_t* to = room(fetched_);
    const std::uint8_t* starts = page + format.value.outliers.start_offset + 4 * head;
    ptx::async_copy4(ptx::shared_address(to), starts);
    ptx::async_copy4(ptx::shared_address(to + 4), starts + 4);
    *reinterpret_cast<const std::uint8_t**>(to + SlotRoom::page) = page;
  }
  // Of the page that was fetched last.
  __device__ void fetch_list(const BlockFormat& format) const {
    const BlockOutliers& list = format.value.outliers;
    const std::uint8_t* at = room(fetched_);
    const BlockRange range = range_of(at);
    const std::uint8_t* page = page_of(at);
    const int count = min(range.count(), SlotRoom::slots);
    copy(at + SlotRoom::values, page, list.value_offset + 2 * range.begin, 2 * count);
    copy(at + SlotRoom::channels, page, list.row_offset + range.begin, count);
    copy(at + SlotRoom::places, page, list.depth_offset + range.begin, count);
  }
  __device__ void prepare(const BlockFormat& /*format*/) { current_ = fetched_; }
  template <class Use>
  __device__ __forceinline__ void for_each(const BlockFormat& format, const Use& use) const {
    const BlockOutliers& list = format.value.outliers;
    const std::uint8_t* at = room(current_);
    const BlockRange range = range_of(at);
    const std::uint8_t* values = at + SlotRoom::values + ((list.value_offset + 2 * range.begin) & 3);
    const std::uint8_t* channels = at + SlotRoom::channels + ((list.row_offset + range.begin) & 3);
    const std::uint8_t* places = at + SlotRoom::places + ((list.depth_offset + range.begin) & 3);
    int i = C::unpack_thread();
#pragma unroll 1
    for (; i < min(range.count(), SlotRoom::slots); i += C::unpack_threads) {
      use(*reinterpret_cast<const std::uint16_t*>(values + 2 * i), channels[i], places[i]);
    }
#pragma unroll 1
    for (i = SlotRoom::slots + C::unpack_thread(); i < range.count(); i += C::unpack_threads) {
      use_outlier(load_outlier(list, page_of(at), range.begin + i), use);
    }
  }

 private:
  __device__ std::uint8_t* room(int number) const {
    return rooms_ + number * SlotRoom::bytes;
  }
  static __device__ BlockRange range_of(const std::uint8_t* room) {
    const auto* ends = reinterpret_cast<const int*>(room);
    return {ends[0], ends[1]};
  }
  static __device__ const std::uint8_t* page_of(const std::uint8_t* room) {
    return *reinterpret_cast<const std::uint8_t* const*>(room + SlotRoom::page);
  }
  // Bytes [offset, offset + bytes) of the page. It ends at a multiple of 16 bytes.
  static __device__ __forceinline__ void copy(const std::uint8_t* to, const std::uint8_t* page, int offset, int bytes) {
    const std::uint32_t address = ptx::shared_address(to);
    const int begin = offset & ~3;
#pragma unroll 1
    for (int i = C::unpack_thread() * 4; i < offset + bytes - begin; i += C::unpack_threads * 4) {
      ptx::async_copy4(address + static_cast<std::uint32_t>(i), page + begin + i);
    }
  }

  std::uint8_t* rooms_;
  int fetched_ = 0;
  int current_ = 0;
};

}  // namespace kvant::cuda
