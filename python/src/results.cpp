// Memory of result arrays. A cache returns all of its rows at every call, megabytes that the caller drops before the
// next call: fresh pages for them cost more time than the rows. So the two blocks that came back last (keys and values)
// are kept and used again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "kvant/error.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmall = std::size_t{1} << 16;  // bytes; smaller blocks are not worth keeping
constexpr std::size_t kKept = 2;

struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;
};

class BlockPool {
 public:
  // A kept block that is large enough and not twice as large, else a new one with room for some more tokens.
  Block take(std::size_t bytes) {
    if (bytes >= kSmall) {
      const std::lock_guard lock(mutex_);
      for (auto block = kept_.begin(); block != kept_.end(); ++block) {
        if (block->bytes < bytes || block->bytes / 2 > bytes) continue;
        const Block found = *block;
        kept_.erase(block);
        return found;
      }
    }
    const std::size_t room = bytes >= kSmall ? bytes + bytes / 16 : std::max<std::size_t>(bytes, 1);
    const std::size_t rounded = (room + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) throw std::bad_alloc();
    return {data, rounded};
  }

  void give_back(const Block& block) {
    Block dropped = block;
    if (block.bytes >= kSmall) {
      const std::lock_guard lock(mutex_);
      kept_.push_back(block);
      dropped = {};
      if (kept_.size() > kKept) {
        dropped = kept_.front();
        kept_.erase(kept_.begin());
      }
    }
    std::free(dropped.data);
  }

  std::size_t kept_bytes() {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const Block& block : kept_) bytes += block.bytes;
    return bytes;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    for (const Block& block : kept_) std::free(block.data);
    kept_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<Block> kept_;
};

// Never destroyed: arrays may outlive this module at the end of the process.
BlockPool& pool() {
  static auto* const blocks = new BlockPool;
  return *blocks;
}

nb::dlpack::dtype type_of(const std::string& name) {
  using Code = nb::dlpack::dtype_code;
  const auto make = [](Code code, std::uint8_t bits) {
    return nb::dlpack::dtype{static_cast<std::uint8_t>(code), bits, 1};
  };
  if (name == "f32") return make(Code::Float, 32);
  if (name == "f16") return make(Code::Float, 16);
  if (name == "bf16") return make(Code::Bfloat, 16);
  if (name == "uint16") return make(Code::UInt, 16);
  if (name == "uint8") return make(Code::UInt, 8);
  if (name == "int32") return make(Code::Int, 32);
  if (name == "bool") return make(Code::Bool, 8);
  throw Error(ErrorCode::invalid_argument, "dtype = " + name + " is not f32, f16, bf16, uint16, uint8, int32 or bool");
}

nb::ndarray<nb::array_api> allocate(const std::vector<std::size_t>& shape, const std::string& dtype) {
  const nb::dlpack::dtype type = type_of(dtype);
  std::size_t bytes = type.bits / 8;
  for (const std::size_t extent : shape) bytes *= extent;
  auto block = std::make_unique<Block>(pool().take(bytes));
  void* const data = block->data;
  const nb::capsule owner(block.get(), [](void* pointer) noexcept {
    const std::unique_ptr<Block> owned(static_cast<Block*>(pointer));
    pool().give_back(*owned);
  });
  block.release();
  return nb::ndarray<nb::array_api>(data, shape.size(), shape.data(), owner, nullptr, type, nb::device::cpu::value, 0);
}

}  // namespace

void bind_results(nb::module_& module) {
  module.def("allocate", &allocate, nb::arg("shape"), nb::arg("dtype"),
             "An array without contents that speaks DLPack and the buffer protocol.");
  module.def("result_memory", [] { return pool().kept_bytes(); });
  module.def("clear_results", [] { pool().clear(); });
}

}  // namespace kvant::python
