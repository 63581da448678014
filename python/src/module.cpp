#include "bindings.h"
#include "pool/torch/region_tensors.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The C++ side of lowtide. Use the package, not this module.";
  lowtide::bind_errors(module);
  lowtide::bind_install(module);
  lowtide::bind_regions(module);
  lowtide::bind_tensors(module);
  lowtide::bind_stats(module);
  // Here rather than in install(): regions guard their tensors also where torch was given liblowtide.so as a plain
  // plug-in.
  lowtide::install_region_tensors();
}
