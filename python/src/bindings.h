// The extension module lowtide._native: one function per topic adds its part. Policy and documentation are in python/lowtide/.
#pragma once

#include <pybind11/pybind11.h>

namespace lowtide {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_install(py::module_& module);
void bind_regions(py::module_& module);
void bind_tensors(py::module_& module);
void bind_stats(py::module_& module);

/// Runs `call` without the GIL: for everything that may wait for a device, for a lock of ours, or for a thread that needs the GIL.
template <typename Call>
auto without_gil(Call&& call) -> decltype(call()) {
  const py::gil_scoped_release release;
  return call();
}

}  // namespace lowtide
