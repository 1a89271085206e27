// The parts of kvant._core. Users see the package around it (python/kvant), which knows frameworks, names and docs;
// here are views, numbers and the library's own objects. Results go into arrays that the caller made.
#pragma once

#include <nanobind/nanobind.h>

namespace kvant::python {

namespace nb = nanobind;

void bind_errors(nb::module_& module);
void bind_config(nb::module_& module);
void bind_cache(nb::module_& module);
void bind_group_quant(nb::module_& module);
void bind_kitty(nb::module_& module);
void bind_kvquant(nb::module_& module);
void bind_zipcache(nb::module_& module);
void bind_cuda(nb::module_& module);  // only in builds with the CUDA library

}  // namespace kvant::python
