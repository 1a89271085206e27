// Sealed blocks of image version 1 whose tiles were laid out differently: Kitty's boosted channels were a list, and the
// channels themselves lay in their own order (docs/format.md).
#pragma once

#include <cstddef>

#include "kvant/layout.hpp"

namespace kvant::cache {

// Bytes of such a block; `layout` is today's layout of the same recipe, with an order of channels.
std::size_t page_bytes_v1(const PageLayout& layout, const CacheShape& shape);

// Fills a block (zeros before) of today's layout. False when the list of channels is not ascending or out of range.
bool convert_v1(const PageLayout& layout, const CacheShape& shape, const std::byte* old_block, std::byte* block);

}  // namespace kvant::cache
