// Putting Lowtide into torch, and what this process and machine have.
#include <c10/cuda/CUDACachingAllocator.h>

#include <string>

#include "allocator/cuda_device.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/log_message.h"
#include "allocator/torch/install.h"
#include "allocator/torch/version_adapter.h"
#include "bindings.h"

namespace lowtide {
namespace {

InstallDevice parse_device(const std::string& word) {
  if (word == "auto") return InstallDevice::Auto;
  if (word == "cuda") return InstallDevice::Cuda;
  if (word == "host") return InstallDevice::Host;
  throw Misuse("device is '" + word + "'; choose \"auto\", \"cuda\" or \"host\"");
}

const char* kind_word(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::Cuda:
      return "cuda";
    case DeviceKind::Host:
      return "host";
    case DeviceKind::None:
      break;
  }
  return "";
}

}  // namespace

void bind_install(py::module_& module) {
  // The GIL stays: torch's registries of allocators are not synchronised, and other Python threads allocate.
  module.def(
      "install",
      [](const std::string& device, Bytes host_memory) {
        HostKindOptions host;
        host.memory = host_memory;
        install_allocator(parse_device(device), host);
      },
      py::arg("device"), py::arg("host_memory"));
  module.def("installed_device", &installed_device);
  module.def("torch_mismatch", [] { return torch_mismatch(); });
  module.def("cuda_allocator", &cuda_allocator);

  module.def("device_kind", [] { return std::string(kind_word(device_kind())); });
  module.def("device_count", &device_count);
  module.def("in_forked_child", &in_forked_child);
  module.def("device_name", [](int index) { return without_gil([&] { return allocator_of(index).device().name(); }); });
  module.def("device_memory", [](int index) {
    const DeviceMemory memory = without_gil([&] { return allocator_of(index).device().memory(); });
    return py::make_tuple(memory.free, memory.total);
  });

  module.def("cuda_device_count", &cuda_device_count);
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason);
  module.def("cuda_driver_version", &cuda_driver_version);

  module.def("log_info", [](const std::string& text) { lowtide::log_message(lowtide::LogLevel::Info, text); });
  module.def("log_warning", [](const std::string& text) { lowtide::log_message(lowtide::LogLevel::Warn, text); });
}

}  // namespace lowtide
