#include <cstdio>
#include <vector>

#include "kvant/kvant.hpp"

int main() {
  kvant::Cache cache(kvant::parse_recipe("kivi:k=4,v=4,window=0"), {.kv_heads = 1, .key_dim = 64, .value_dim = 64});
  std::vector<float> rows(256 * 64, 0.5F);
  const auto view = kvant::dense_view(rows.data(), kvant::DType::f32, 256, 1, 64);
  cache.append(view, view);
  std::printf("kvant %s: %zu bytes, %lld pages sealed\n", kvant::version(), cache.bytes().total(),
              static_cast<long long>(cache.counts().sealed_pages));
  return cache.counts().sealed_pages == 2 ? 0 : 1;
}
