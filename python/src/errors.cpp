// Errors of C++ as exceptions of Python.
#include "allocator/errors.h"

#include <c10/util/Exception.h>

#include "bindings.h"

namespace lowtide {
namespace {

void raise(const char* module, const char* type, const char* message) {
  // Imported here, not at load: an exception's module may not exist while this one is being loaded.
  py::set_error(py::module_::import(module).attr(type), message);
}

void translate(std::exception_ptr error) {
  if (!error) return;
  try {
    std::rethrow_exception(std::move(error));
  } catch (const OutOfMemory& e) {
    raise("torch", "OutOfMemoryError", e.what());
  } catch (const HostMemoryError& e) {
    raise("lowtide._errors", "HostMemoryError", e.what());
  } catch (const Error& e) {
    raise("lowtide._errors", "LowtideError", e.what());
  } catch (const c10::OutOfMemoryError& e) {
    raise("torch", "OutOfMemoryError", e.what_without_backtrace());
  } catch (const c10::Error& e) {
    raise("builtins", "RuntimeError", e.what_without_backtrace());
  }
}

}  // namespace

void bind_errors(py::module_&) { py::register_local_exception_translator(&translate); }

}  // namespace lowtide
