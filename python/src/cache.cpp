// What the three reference caches share: kvant::ReferenceCache.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <vector>

#include "arrays.hpp"
#include "kvant/reference_cache.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

void update(ReferenceCache& cache, const In& keys, const In& values) {
  const ConstArray k = read_floats(keys, "keys", 4);
  const ConstArray v = read_floats(values, "values", 4);
  without_gil([&] { cache.update(k, v); });
}

void fetch(const ReferenceCache& cache, const Out& keys, const Out& values, std::int64_t first) {
  const Array k = write_floats(keys, "keys", 4);
  const Array v = write_floats(values, "values", 4);
  without_gil([&] { cache.fetch(k, v, first); });
}

void attend(const ReferenceCache& cache, const In& queries, const Out& out, float scale, bool causal, int threads) {
  const ConstArray q = read_floats(queries, "queries", 4);
  const Array o = write_floats(out, "out", 4);
  without_gil([&] { cache.attend(q, o, {.scale = scale, .causal = causal, .threads = threads}); });
}

nb::bytes save(const ReferenceCache& cache) {
  const std::vector<std::byte> image = without_gil([&] { return cache.save(); });
  return nb::bytes(image.data(), image.size());
}

std::unique_ptr<ReferenceCache> load(const nb::bytes& image) {
  const auto* data = static_cast<const std::byte*>(image.data());
  return without_gil([&] { return load_cache({data, image.size()}); });
}

// (batch, heads, key channels, value channels), (key type, value type); None before the first update.
nb::object shape(const ReferenceCache& cache) {
  const ReferenceShape s = cache.shape();
  if (s.batch == 0) return nb::none();
  return nb::make_tuple(nb::make_tuple(s.batch, s.heads, s.key_dim, s.value_dim),
                        nb::make_tuple(name_of(s.key_type), name_of(s.value_type)));
}

}  // namespace

void bind_cache(nb::module_& module) {
  nb::class_<ReferenceCache>(module, "ReferenceCache", "kvant::ReferenceCache: one user at a time")
      .def("update", &update, nb::arg("keys"), nb::arg("values"))
      .def("fetch", &fetch, nb::arg("keys"), nb::arg("values"), nb::arg("first"))
      .def("attend", &attend, nb::arg("queries"), nb::arg("out"), nb::arg("scale"), nb::arg("causal"),
           nb::arg("threads"))
      .def("save", &save, "Everything as bytes.")
      .def_prop_ro("shape", &shape)
      .def_prop_ro("method", [](const ReferenceCache& cache) { return cache.config().method; })
      .def("trim", &ReferenceCache::trim, nb::arg("n"))
      .def_prop_ro("offset", &ReferenceCache::offset)
      .def_prop_ro("key_nbytes", &ReferenceCache::key_nbytes)
      .def_prop_ro("value_nbytes", &ReferenceCache::value_nbytes)
      .def_prop_rw("threads", &ReferenceCache::threads, &ReferenceCache::set_threads);
  module.def("load_cache", &load, nb::arg("image"), "The cache that save() made the image of.");
}

}  // namespace kvant::python
