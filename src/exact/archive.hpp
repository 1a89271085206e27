// The image of a reference cache, written and read by one description of its parts. Numbers lie in the machine's byte
// order, which is little-endian everywhere kvant runs; a checksum ends the image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/checked.hpp"
#include "kvant/types.hpp"

namespace kvant::exact {

class Archive {
 public:
  Archive() = default;  // writes
  explicit Archive(std::span<const std::byte> image) : left_(image), reads_(true) {}

  bool reads() const { return reads_; }
  std::vector<std::byte> take_image() { return std::move(image_); }

  void bytes(void* data, std::size_t count) {
    if (count == 0) return;
    if (reads_) {
      need(count);
      std::memcpy(data, left_.data(), count);
      left_ = left_.subspan(count);
    } else {
      const auto* from = static_cast<const std::byte*>(data);
      image_.insert(image_.end(), from, from + count);
    }
  }
  template <typename T>
  void number(T& value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes(&value, sizeof value);
  }
  // A number that must lie in low..high when it is read.
  template <typename T>
  void number(const char* name, T& value, std::int64_t low, std::int64_t high) {
    number(value);
    if (!reads_) return;
    const auto wide = static_cast<std::int64_t>(value);
    if (wide < low || wide > high) bad(std::string(name) + " = " + std::to_string(wide));
  }
  void type(DType& value) {
    auto code = static_cast<std::uint8_t>(value);
    number("type", code, 0, static_cast<std::int64_t>(DType::bf16));
    value = static_cast<DType>(code);
  }
  template <typename T>
  void numbers(std::vector<T>& values) {
    auto count = static_cast<std::uint64_t>(values.size());
    number(count);
    if (reads_) {
      need_items(count, sizeof(T));
      values.assign(static_cast<std::size_t>(count), T{});
    }
    bytes(values.data(), values.size() * sizeof(T));
  }
  void text(std::string& value) {
    std::vector<char> letters(value.begin(), value.end());
    numbers(letters);
    value.assign(letters.begin(), letters.end());
  }

  // Refuses an image that is too short for `count` items, before anything is allocated for them.
  void need_items(std::uint64_t count, std::uint64_t item_bytes) const {
    if (reads_ && (item_bytes == 0 || count > left_.size() / item_bytes)) bad("ends early");
  }
  void need(std::uint64_t count) const { need_items(count, 1); }
  void require(bool condition, const char* what) const {
    if (reads_ && !condition) bad(what);
  }
  void require_end() const { require(left_.empty(), "bytes after the end"); }

  [[noreturn]] static void bad(const std::string& what) {
    base::fail(ErrorCode::bad_format, "image of a reference cache: " + what);
  }

 private:
  std::vector<std::byte> image_;
  std::span<const std::byte> left_;
  bool reads_ = false;
};

}  // namespace kvant::exact
