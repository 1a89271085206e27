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
  int boosted = 0;  // key channels with a high plane
  bool bfloat = false;

  KVANT_BOTH std::size_t head_bytes() const { return static_cast<std::size_t>(key.bytes() + value.bytes()); }
};

// Throws Error(invalid_argument) naming what the device kernels do not take.
DeviceFormat make_device_format(const Recipe& recipe, const CacheShape& shape);

// One head of a sealed page: `block` has layout.head_bytes, `device` format.head_bytes(). The two are inverse, bit by
// bit.
void to_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> block,
               std::span<std::byte> device);
// Throws Error(bad_format) when the channel list of a boosted page is not ascending or names a channel that is not
// there.
void from_device(const DeviceFormat& format, const PageLayout& layout, std::span<const std::byte> device,
                 std::span<std::byte> block);

}  // namespace kvant::cuda
