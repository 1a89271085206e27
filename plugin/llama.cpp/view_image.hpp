// ViewImage: the values that a view shows of a packed cache tensor, as a dense array in which any operation can work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.hpp"
#include "ggml_abi.hpp"

namespace kvant::llama {

class ViewImage {
 public:
  // Decodes every row that the view touches.
  ViewImage(const CacheRef& ref, const abi::Tensor& view);

  // The view's elements in order, in the type of `codec`.
  void copy_to(const RowCodec& codec, void* dense) const;
  // Stores the rows of those elements that an operation changed: `dense` held what copy_to gave and was written since.
  void store_changes(const RowCodec& codec, const void* dense);

 private:
  // Calls visit(index in the view, index in the tensor) for every element.
  template <typename Visit>
  void for_each(Visit visit) const;
  std::vector<float> dense_values(const RowCodec& codec, const void* dense) const;

  CacheRef ref_;
  abi::Tensor view_;
  std::int64_t count_ = 0;
  std::int64_t first_row_ = 0;
  std::vector<std::int64_t> rows_;
  std::vector<float> values_;  // of all rows in rows_
};

// The type in which an operation may see a view of the tensor: what the host believes it is, but float32 instead of a
// quantized type, so that nothing is quantized twice.
std::int32_t working_type(const CacheTensor& tensor);

}  // namespace kvant::llama
