#include "kvant/cuda.hpp"

#include <cstdio>

#include "kvant/kvant.hpp"

int main() {
  const kvant::CacheShape shape{.kv_heads = 8, .key_dim = 128, .value_dim = 128, .dtype = kvant::DType::f16};
  std::printf("%zu bytes a page\n", kvant::cuda::page_bytes(kvant::parse_recipe("kivi:k=2,v=2"), shape));
}
