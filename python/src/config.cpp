#include "kvant/config.hpp"

#include <nanobind/stl/string.h>

#include "module.hpp"

namespace kvant::python {

void bind_config(nb::module_& module) {
  using Config = KVCacheConfig;
  nb::class_<Config>(module, "Config", "kvant::KVCacheConfig")
      .def(nb::init<>())
      .def_rw("method", &Config::method)
      .def_rw("head_dim", &Config::head_dim)
      .def_rw("kitty_hi_fraction", &Config::kitty_hi_fraction)
      .def_rw("kitty_hi_bit", &Config::kitty_hi_bit)
      .def_rw("kitty_lo_bit", &Config::kitty_lo_bit)
      .def_rw("kitty_group_size", &Config::kitty_group_size)
      .def_rw("kvquant_bits", &Config::kvquant_bits)
      .def_rw("kvquant_outlier_fraction", &Config::kvquant_outlier_fraction)
      .def_rw("kvquant_group_size", &Config::kvquant_group_size)
      .def_rw("kvquant_lloyd_iters", &Config::kvquant_lloyd_iters)
      .def_rw("kvquant_refit_interval", &Config::kvquant_refit_interval)
      .def_rw("kvquant_n_sink", &Config::kvquant_n_sink)
      .def_rw("zipcache_hi_bits", &Config::zipcache_hi_bits)
      .def_rw("zipcache_lo_bits", &Config::zipcache_lo_bits)
      .def_rw("zipcache_hi_fraction", &Config::zipcache_hi_fraction)
      .def_rw("zipcache_group_size", &Config::zipcache_group_size)
      .def_rw("zipcache_quantize_values", &Config::zipcache_quantize_values);
}

}  // namespace kvant::python
