// The device seam on this computer's memory: pages are parts of a memfd, mapped at fixed addresses; streams are worker
// threads; copies run on them, so they are asynchronous for real. Everything above the seam runs on it without a GPU.
// What CUDA would refuse is refused here too, as DriverError, so that tests on the host find it.
#pragma once

#include <functional>
#include <memory>

#include "allocator/device.h"

namespace lowtide {

struct HostDeviceOptions {
  int index = 0;
  /// What the device pretends to have: create() throws OutOfMemory above it.
  Bytes memory = 4_GiB;
  Bytes granularity = 2_MiB;
};

/// Destroying the device waits for all queued work and ends its threads; leaking it at exit is fine too.
/// A page costs memory once it is touched, and none after release().
/// Throws Misuse for a granularity that is no power of two or less than the system's page, DriverError if the system
/// refuses memfd.
std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options);

/// Queues `function` on a stream of a host device, as cuLaunchHostFunc would. It must not wait for that stream.
/// Throws Misuse if `device` is not what make_host_device() returned.
void enqueue_host_function(Device& device, StreamHandle stream, std::function<void()> function);

}  // namespace lowtide
