#include "tests/support/devices.h"

#include <algorithm>
#include <ostream>

#include "allocator/cuda_device.h"
#include "allocator/host_device.h"

namespace lowtide::testing {

std::ostream& operator<<(std::ostream& out, const DeviceKindUnderTest& kind) { return out << kind.name; }

std::vector<DeviceKindUnderTest> devices_under_test() {
  std::vector<DeviceKindUnderTest> kinds;
  kinds.push_back({"Host", [](Bytes memory) { return make_host_device({.index = 0, .memory = memory}); },
                   [] { return std::string(); }});
#ifdef LOWTIDE_TEST_CUDA
  kinds.push_back({"Cuda", [](Bytes) { return make_cuda_device(0); }, [] { return cuda_unavailable_reason(); }});
#endif
  return kinds;
}

double fraction_for(Device& device, Bytes memory) {
  return std::min(1.0, static_cast<double>(memory) / static_cast<double>(device.memory().total));
}

}  // namespace lowtide::testing
