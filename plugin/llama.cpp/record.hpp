// Rows of keys and values as they are written, appended to a file for `kvant calibrate` (docs/format.md, "Recorded
// rows").
#pragma once

#include <cstdint>
#include <span>

#include "kvant/page_store.hpp"

namespace kvant::llama {

// Appends `cells.size()` rows of heads * dim values, row_stride values apart. Does nothing without KVANT_RECORD. Throws
// std::runtime_error when the file cannot be written.
void record_rows(int layer, Side side, int heads, int dim, std::span<const std::int64_t> cells, const float* rows,
                 std::int64_t row_stride);

}  // namespace kvant::llama
