#include "kvant/reference_cache.hpp"

#include "exact/elements.hpp"

namespace kvant {

void ReferenceCache::update_and_fetch(const ConstArray& keys, const ConstArray& values, const Array& out_keys,
                                      const Array& out_values) {
  exact::require_rank("keys", keys.rank, 4);
  exact::require_rank("values", values.rank, 4);
  const auto check = [&](const char* name, const ConstArray& in, const Array& out) {
    exact::require_rank(name, out.rank, 4);
    for (const int axis : {0, 1, 3}) {
      exact::require_extent(name, axis, out.extent[exact::at(axis)], in.extent[exact::at(axis)]);
    }
    exact::require_extent(name, 2, out.extent[2], offset() + in.extent[2]);
  };
  check("out_keys", keys, out_keys);
  check("out_values", values, out_values);
  update(keys, values);
  fetch(out_keys, out_values);
}

}  // namespace kvant
