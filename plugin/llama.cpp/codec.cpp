#include "codec.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

#include "host.hpp"

namespace kvant::llama {

RowCodec::RowCodec(std::int32_t type) : type_(type), traits_(host().type_traits(type)) {
  const bool convertible = traits_->to_float != nullptr && traits_->from_float != nullptr;
  if (type != abi::kF32 && !convertible) {
    throw std::runtime_error(std::string("the host cannot convert its cache type ") + traits_->type_name);
  }
}

std::size_t RowCodec::bytes(std::int64_t count) const {
  return static_cast<std::size_t>(count / traits_->block_values) * traits_->block_bytes;
}

std::int64_t RowCodec::value_at(std::size_t offset) const {
  return static_cast<std::int64_t>(offset / traits_->block_bytes) * traits_->block_values;
}

void RowCodec::decode(const void* from, float* to, std::int64_t count) const {
  if (type_ == abi::kF32) {
    std::memcpy(to, from, bytes(count));
  } else {
    traits_->to_float(from, to, count);
  }
}

void RowCodec::encode(const float* from, void* to, std::int64_t count) const {
  if (type_ == abi::kF32) {
    std::memcpy(to, from, bytes(count));
  } else {
    traits_->from_float(from, to, count);
  }
}

}  // namespace kvant::llama
