// Which device format a recipe and a shape have, and the conversion of sealed pages from and to the CPU's bytes.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/page_format.hpp"
#include "kvant/layout.hpp"

namespace kvant::cuda {

struct DeviceFormat {
  KeyFormat key;
  ValueFormat value;
  ExactFormat exact;
  int boosted = 0;   // key channels with a high plane
  int rotation = 1;  // values are stored Hadamard-rotated in blocks of this many channels; 1: as they are
  bool bfloat = false;

  KVANT_BOTH std::size_t head_bytes() const {
    return static_cast<std::size_t>(key.bytes()) + static_cast<std::size_t>(value.bytes());
  }
};

// Throws Error(invalid_argument) where pages of the shape cannot be on the device in any format: tokens of a page, head
// dimensions, type.
void check_device_shape(const Recipe& recipe, const CacheShape& shape);

// The tuned format of the integer kernels. Throws Error(invalid_argument) naming what they do not take (block pages
// may: block.hpp).
DeviceFormat make_device_format(const Recipe& recipe, const CacheShape& shape);

// One head of a sealed page: `block` is the whole page of layout.page_bytes, `device` has format.head_bytes(). The two
// are inverse, bit by bit: grids that all heads share are in each head's device page.
void to_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> block, int head,
               std::span<std::byte> device);
// Writes this head's part of the page, and the shared grids. Throws Error(bad_format) when a channel list or the counts
// of width classes cannot be those of a page; the block is then half written.
void from_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> device, int head,
                 std::span<std::byte> block);

}  // namespace kvant::cuda
