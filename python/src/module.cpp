#include "module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "kvant/runtime.hpp"

namespace kvant::python {
namespace {

nb::tuple describe(const In& array) {
  nb::list shape;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) shape.append(array.shape(axis));
  return nb::make_tuple(nb::tuple(shape), dtype_name(array.dtype()));
}

}  // namespace
}  // namespace kvant::python

NB_MODULE(_core, module) {
  using namespace kvant::python;
  module.doc() = "Bindings of the kvant library; use the package kvant instead.";
  bind_errors(module);
  module.def("version", &kvant::version, "Version of the library, for example '0.1.0'.");
  module.def("kernel_names", &kvant::kernel_names, "Kernel sets that this CPU can run, best first.");
  module.def("active_kernel", &kvant::active_kernel, "The kernel set in use.");
  module.def(
      "force_kernel", [](const std::string& name) { kvant::force_kernel(name); }, nb::arg("name"),
      "Makes every later call use the named kernel set.");
  module.def("describe", &describe, nb::arg("array"), "(shape, element type) of an array; uint16 reads as bf16.");
  bind_config(module);
  bind_cache(module);
  bind_group_quant(module);
  bind_kitty(module);
  bind_kvquant(module);
  bind_zipcache(module);
#ifdef KVANT_PYTHON_CUDA
  bind_cuda(module);
#endif
}
