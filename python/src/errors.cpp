// kvant::Error becomes one of the exceptions of kvant/errors.py; all of them are ValueErrors.
#include <exception>

#include "kvant/error.hpp"
#include "module.hpp"

namespace kvant::python {

void bind_errors(nb::module_& /*module*/) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      // Looked up on use: the package that defines them imports this module.
      const nb::object made =
          nb::module_::import_("kvant.errors").attr("make_error")(name_of(error.code()), error.what());
      PyErr_SetObject(made.type().ptr(), made.ptr());
    }
  });
}

}  // namespace kvant::python
