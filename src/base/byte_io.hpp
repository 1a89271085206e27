// Bytes of files: little-endian, without alignment, closed by an XXH64 of everything before.
#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.hpp"

namespace kvant::base {

class ByteWriter {
 public:
  template <typename T>
  void put(const T& value) {
    put_bytes(reinterpret_cast<const std::byte*>(&value), sizeof value);
  }
  void put_bytes(const std::byte* data, std::size_t size) { bytes_.insert(bytes_.end(), data, data + size); }
  void put_text(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    put_bytes(reinterpret_cast<const std::byte*>(text.data()), text.size());
  }
  std::vector<std::byte> finish() {
    put(static_cast<std::uint64_t>(XXH64(bytes_.data(), bytes_.size(), 0)));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  // `what` begins every message: "calibration file: ends early".
  ByteReader(std::span<const std::byte> bytes, std::string what) : bytes_(bytes), what_(std::move(what)) {}

  [[noreturn]] void bad(const std::string& why) const { fail(ErrorCode::bad_format, what_ + ": " + why); }
  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string get_text(std::size_t most) {
    const auto size = get<std::uint32_t>();
    if (size > most) bad("a text is " + std::to_string(size) + " bytes");
    return {reinterpret_cast<const char*>(take(size)), size};
  }
  const std::byte* take(std::size_t size) {
    if (size > bytes_.size()) bad("ends early");
    const std::byte* data = bytes_.data();
    bytes_ = bytes_.subspan(size);
    return data;
  }
  std::size_t left() const { return bytes_.size(); }
  // Checks and removes the hash at the end; `all` are the bytes from the start.
  void check_hash(std::span<const std::byte> all) {
    std::uint64_t hash = 0;
    if (all.size() < sizeof hash || bytes_.size() < sizeof hash) bad("ends early");
    std::memcpy(&hash, all.data() + all.size() - sizeof hash, sizeof hash);
    if (hash != XXH64(all.data(), all.size() - sizeof hash, 0)) bad("checksum does not match");
    bytes_ = bytes_.first(bytes_.size() - sizeof hash);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string what_;
};

}  // namespace kvant::base
