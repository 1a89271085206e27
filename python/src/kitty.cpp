#include "kvant/kitty.hpp"

#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "module.hpp"

namespace kvant::python {
namespace {

using kitty::KittyKVCache;
using Indices = std::vector<std::int64_t>;

nb::tuple rank_channels(const In& keys, double hi_fraction) {
  const ConstArray view = read_floats(keys, "keys", 2);
  const kitty::ChannelRanks ranks = without_gil([&] { return kitty::rank_channels_by_sensitivity(view, hi_fraction); });
  return nb::make_tuple(ranks.hi, ranks.lo);
}

void quantize_mixed(const In& keys, const Indices& hi, const Indices& lo, const Out& out, int hi_bit, int lo_bit,
                    std::int64_t group_size) {
  const ConstArray from = read_floats(keys, "keys", 2);
  const Array to = write_floats(out, "out", 2);
  without_gil([&] { kitty::quantize_mixed_channels(from, hi, lo, to, hi_bit, lo_bit, group_size); });
}

void running_variance(const In& key_sum, const In& key_sq_sum, std::int64_t n, const Out& variance) {
  const ConstArray sum = read_floats(key_sum, "key_sum", 1);
  const ConstArray squares = read_floats(key_sq_sum, "key_sq_sum", 1);
  const Array to = write_floats(variance, "variance", 1);
  without_gil([&] { kitty::compute_running_variance(sum, squares, n, to); });
}

void hi_mask(const In& variance, double hi_fraction, const Out& mask) {
  const ConstArray from = read_floats(variance, "variance", 2);
  const Strided<std::uint8_t> to = write_grid<std::uint8_t>(mask, "mask", 2);
  without_gil([&] { kitty::hi_mask_from_variance_batched(from, hi_fraction, to); });
}

void quantize_mixed_batched(const In& keys, const In& mask, const Out& out, int hi_bit, int lo_bit,
                            std::int64_t group_size) {
  const ConstArray from = read_floats(keys, "keys", 3);
  const Strided<const std::uint8_t> hi = read_grid<std::uint8_t>(mask, "hi_mask", 2);
  const Array to = write_floats(out, "out", 3);
  without_gil([&] { kitty::quantize_mixed_channels_batched(from, hi, to, hi_bit, lo_bit, group_size); });
}

}  // namespace

void bind_kitty(nb::module_& module) {
  module.def("rank_channels_by_sensitivity", &rank_channels, nb::arg("keys"), nb::arg("hi_fraction"));
  module.def("quantize_mixed_channels", &quantize_mixed, nb::arg("keys"), nb::arg("hi_indices"), nb::arg("lo_indices"),
             nb::arg("out"), nb::arg("hi_bit"), nb::arg("lo_bit"), nb::arg("group_size"));
  module.def("compute_running_variance", &running_variance, nb::arg("key_sum"), nb::arg("key_sq_sum"), nb::arg("n"),
             nb::arg("variance"));
  module.def("hi_mask_from_variance_batched", &hi_mask, nb::arg("variance"), nb::arg("hi_fraction"), nb::arg("mask"));
  module.def("quantize_mixed_channels_batched", &quantize_mixed_batched, nb::arg("keys"), nb::arg("hi_mask"),
             nb::arg("out"), nb::arg("hi_bit"), nb::arg("lo_bit"), nb::arg("group_size"));

  nb::class_<KittyKVCache, ReferenceCache>(module, "KittyKVCache")
      .def(nb::init<const KVCacheConfig&>(), nb::arg("config"))
      .def_prop_ro("compressed_key_bytes", &KittyKVCache::compressed_key_bytes)
      .def_prop_ro("fp16_key_bytes", &KittyKVCache::fp16_key_bytes)
      .def_prop_ro("value_fp16_bytes", &KittyKVCache::value_fp16_bytes)
      .def_prop_ro("assigned_avg_bits", &KittyKVCache::assigned_avg_bits)
      .def_prop_ro("hi_fraction", &KittyKVCache::hi_fraction)
      .def_prop_ro("hi_bit", &KittyKVCache::hi_bit)
      .def_prop_ro("lo_bit", &KittyKVCache::lo_bit)
      .def_prop_ro("group_size", &KittyKVCache::group_size)
      .def_prop_ro("n_keys", &KittyKVCache::n_keys);
}

}  // namespace kvant::python
