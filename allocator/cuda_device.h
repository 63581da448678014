// The device seam on the CUDA driver API. Entry points are looked up at run time: this library loads, and says why
// there is no CUDA device, on a machine without a driver.
#pragma once

#include <memory>
#include <string>

#include "allocator/device.h"

namespace lowtide {

/// Number of CUDA devices that this process may use; 0 without a driver. Creates no context.
int cuda_device_count() noexcept;

/// Why cuda_device_count() is 0, for people; empty if it is not.
std::string cuda_unavailable_reason();

/// Driver version as the driver states it (13000 for 13.0), 0 without a driver.
int cuda_driver_version() noexcept;

/// Device `index` in its primary context, which this creates if nobody did before.
/// Throws Misuse if there is no such device, DriverError if it lacks virtual memory management.
std::unique_ptr<Device> make_cuda_device(int index);

}  // namespace lowtide
