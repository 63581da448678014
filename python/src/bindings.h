// The extension module lowtide._native: one function per topic adds its part. Policy and documentation are in
// python/lowtide/.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace lowtide {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_install(py::module_& module);
void bind_regions(py::module_& module);
void bind_tensors(py::module_& module);
void bind_stats(py::module_& module);

/// The GIL given up for a scope, as pybind11's gil_scoped_release, but for one case: a daemon thread that wants it back
/// while the interpreter shuts down. Python ends that thread by unwinding its stack, which may not pass through a
/// destructor or through C++ that catches everything; the process would abort. Such a thread waits here for the process
/// to end instead.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// Runs `call` without the GIL: for everything that may wait for a device, for a lock of ours, or for a thread that
/// needs the GIL.
template <typename Call>
auto without_gil(Call&& call) -> decltype(call()) {
  const WithoutGil released;
  return call();
}

}  // namespace lowtide
