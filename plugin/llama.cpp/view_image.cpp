#include "view_image.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace kvant::llama {

std::int32_t working_type(const CacheTensor& tensor) {
  return tensor.codec.quantized() ? static_cast<std::int32_t>(abi::kF32) : tensor.codec.type();
}

ViewImage::ViewImage(const CacheRef& ref, const abi::Tensor& view) : ref_(ref), view_(view) {
  count_ = view.ne[0] * view.ne[1] * view.ne[2] * view.ne[3];
  std::int64_t low = std::numeric_limits<std::int64_t>::max();
  std::int64_t high = -1;
  for_each([&](std::int64_t, std::int64_t element) {
    low = std::min(low, element);
    high = std::max(high, element);
  });
  if (high < 0) return;
  const std::int64_t row_values = ref.layer->tensor(ref.side).row_values;
  first_row_ = low / row_values;
  rows_.resize(static_cast<std::size_t>(high / row_values - first_row_ + 1));
  std::iota(rows_.begin(), rows_.end(), first_row_);
  values_.resize(rows_.size() * static_cast<std::size_t>(row_values));
  ref.layer->read(ref.side, rows_, values_.data());
}

// A cache tensor is dense, so a byte offset in it is also the index of a value; quantized types have whole blocks
// there.
template <typename Visit>
void ViewImage::for_each(Visit visit) const {
  const RowCodec& codec = ref_.layer->tensor(ref_.side).codec;
  const bool dense_lines = codec.quantized() || view_.nb[0] == codec.bytes(1);
  const std::size_t start = view_.view_src != nullptr ? view_.view_offs : 0;
  std::int64_t index = 0;
  for (std::int64_t i3 = 0; i3 < view_.ne[3]; ++i3) {
    for (std::int64_t i2 = 0; i2 < view_.ne[2]; ++i2) {
      for (std::int64_t i1 = 0; i1 < view_.ne[1]; ++i1) {
        const std::size_t line = start + static_cast<std::size_t>(i1) * view_.nb[1] +
                                 static_cast<std::size_t>(i2) * view_.nb[2] +
                                 static_cast<std::size_t>(i3) * view_.nb[3];
        const std::int64_t first = codec.value_at(line);
        for (std::int64_t i0 = 0; i0 < view_.ne[0]; ++i0) {
          visit(index++, dense_lines ? first + i0 : codec.value_at(line + static_cast<std::size_t>(i0) * view_.nb[0]));
        }
      }
    }
  }
}

void ViewImage::copy_to(const RowCodec& codec, void* dense) const {
  const std::int64_t base = first_row_ * ref_.layer->tensor(ref_.side).row_values;
  std::vector<float> values(static_cast<std::size_t>(count_));
  for_each([&](std::int64_t index, std::int64_t element) {
    values[static_cast<std::size_t>(index)] = values_[static_cast<std::size_t>(element - base)];
  });
  codec.encode(values.data(), dense, count_);
}

std::vector<float> ViewImage::dense_values(const RowCodec& codec, const void* dense) const {
  std::vector<float> values(static_cast<std::size_t>(count_));
  codec.decode(dense, values.data(), count_);
  return values;
}

void ViewImage::store_changes(const RowCodec& codec, const void* dense) {
  // What copy_to gave, with the rounding of its type.
  std::vector<std::byte> original(codec.bytes(count_));
  copy_to(codec, original.data());
  const std::vector<float> before = dense_values(codec, original.data());
  const std::vector<float> after = dense_values(codec, dense);
  const std::int64_t row_values = ref_.layer->tensor(ref_.side).row_values;
  const std::int64_t base = first_row_ * row_values;
  std::vector<std::uint8_t> changed(rows_.size(), 0);
  for_each([&](std::int64_t index, std::int64_t element) {
    const auto i = static_cast<std::size_t>(index);
    if (std::bit_cast<std::uint32_t>(before[i]) == std::bit_cast<std::uint32_t>(after[i])) return;
    values_[static_cast<std::size_t>(element - base)] = after[i];
    changed[static_cast<std::size_t>((element - base) / row_values)] = 1;
  });
  for (std::size_t first = 0; first < changed.size();) {
    std::size_t behind = first;
    while (behind < changed.size() && changed[behind] != 0) ++behind;
    if (behind > first) {
      ref_.layer->write(ref_.side, std::span(rows_).subspan(first, behind - first),
                        values_.data() + static_cast<std::int64_t>(first) * row_values);
    }
    first = std::max(behind, first + 1);
  }
}

}  // namespace kvant::llama
