// Rows of a cache tensor in the type that the host believes it has, converted from and to float32 by the host's own
// functions, so that the plug-in accepts every type the host does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml_abi.hpp"

namespace kvant::llama {

class RowCodec {
 public:
  RowCodec() = default;
  // Throws std::runtime_error when the host cannot convert the type both ways.
  explicit RowCodec(std::int32_t type);

  std::int32_t type() const { return type_; }
  bool quantized() const { return traits_->is_quantized; }
  std::size_t block_bytes() const { return traits_->block_bytes; }
  // Bytes of `count` values, a multiple of the type's block.
  std::size_t bytes(std::int64_t count) const;
  // The index of the value that starts at a byte offset of a row.
  std::int64_t value_at(std::size_t offset) const;

  void decode(const void* from, float* to, std::int64_t count) const;
  void encode(const float* from, void* to, std::int64_t count) const;

 private:
  std::int32_t type_ = abi::kF16;
  const abi::TypeTraits* traits_ = nullptr;
};

}  // namespace kvant::llama
