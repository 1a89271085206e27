// Element types and strided views that every entry point shares.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvant {

enum class DType : std::uint8_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr std::size_t size_of(DType type) {
  return type == DType::f32 ? 4 : 2;
}

// "f32", "f16" or "bf16".
const char* name_of(DType type) noexcept;

// A read-only view of a 3-D array [tokens or query rows, heads, channels]; strides count elements and may be anything,
// negative or zero included.
struct ConstView {
  const void* data = nullptr;
  DType type = DType::f32;
  std::array<std::int64_t, 3> extent{};
  std::array<std::int64_t, 3> stride{};
};

// The writable twin of ConstView.
struct View {
  void* data = nullptr;
  DType type = DType::f32;
  std::array<std::int64_t, 3> extent{};
  std::array<std::int64_t, 3> stride{};

  operator ConstView() const { return {data, type, extent, stride}; }
};

// A dense [a, b, c] view over `data`.
inline ConstView dense_view(const void* data, DType type, std::int64_t a, std::int64_t b, std::int64_t c) {
  return {data, type, {a, b, c}, {b * c, c, 1}};
}
inline View dense_view(void* data, DType type, std::int64_t a, std::int64_t b, std::int64_t c) {
  return {data, type, {a, b, c}, {b * c, c, 1}};
}

// What one layer caches per token: K is [kv_heads, key_dim], V is [kv_heads, value_dim].
struct CacheShape {
  int kv_heads = 1;          // 1..1024
  int key_dim = 64;          // channels of a key head, 1..1024
  int value_dim = 64;        // channels of a value head, 1..1024
  DType dtype = DType::f16;  // type of rows kept unquantized and of the stored endpoints
};

}  // namespace kvant
