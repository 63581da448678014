// The devices that suites for "every device" run on: the host device, and CUDA where built with LOWTIDE_TEST_CUDA.
#pragma once

#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "allocator/device.h"

namespace lowtide::testing {

struct DeviceKindUnderTest {
  std::string name;
  /// A host device has `memory`; CUDA has what it has, so tests limit their allocators as well.
  std::unique_ptr<Device> (*make)(Bytes memory);
  /// Empty if there is such a device, else why not.
  std::string (*missing)();
};

std::ostream& operator<<(std::ostream& out, const DeviceKindUnderTest& kind);

std::vector<DeviceKindUnderTest> devices_under_test();

/// Makes `allocator.set_memory_fraction()` of this leave about `memory` to the allocator, on any device.
double fraction_for(Device& device, Bytes memory);

}  // namespace lowtide::testing
