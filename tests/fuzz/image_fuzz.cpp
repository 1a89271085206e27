// libFuzzer: any bytes are a cache image or refused with bad_format. The checksum is made right first, so that the
// reader behind it is reached; what loads must load again from what it saves, and can be used.
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kvant/kvant.hpp"

namespace {

void use(kvant::Cache cache) {
  const std::vector<std::byte> image = cache.save();
  if (kvant::Cache::load(image).save() != image) std::abort();
  const kvant::CacheShape& shape = cache.shape();
  const std::vector<float> row(
      static_cast<std::size_t>(shape.kv_heads) * static_cast<std::size_t>(std::max(shape.key_dim, shape.value_dim)),
      0.5F);
  if (cache.store().needs_rotation() && cache.length() == 0) {
    if (shape.key_dim < 2) return;  // no pair of channels to rotate
    cache.set_key_rotation({kvant::RotaryPairs::halves, {1.0}, 1});
  }
  const auto view = [&](int dim) { return kvant::dense_view(row.data(), kvant::DType::f32, 1, shape.kv_heads, dim); };
  cache.append(view(shape.key_dim), view(shape.value_dim));
  std::vector<float> out(row.size());
  cache.attend(view(shape.key_dim),
               kvant::dense_view(out.data(), kvant::DType::f32, 1, shape.kv_heads, shape.value_dim));
  cache.trim(cache.length() / 2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::byte> image(size);
  if (size > 0) std::memcpy(image.data(), data, size);
  if (size > sizeof(std::uint64_t)) {
    const std::size_t body = size - sizeof(std::uint64_t);
    const std::uint64_t checksum = XXH64(image.data(), body, 0);
    std::memcpy(image.data() + body, &checksum, sizeof checksum);
  }
  try {
    use(kvant::Cache::load(image));
  } catch (const kvant::Error& error) {
    if (error.code() != kvant::ErrorCode::bad_format) std::abort();
  }
  return 0;
}
