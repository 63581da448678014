// The devices of this process and their allocators. Made on first use and never destroyed: tensors, graphs and threads
// may outlive every static object.
#pragma once

#include <string>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/device.h"

namespace lowtide {

enum class DeviceKind { None, Cuda, Host };

struct HostKindOptions {
  int devices = 1;
  Bytes memory = 0;  // per device; 0: half of this computer's memory
};

/// What this process uses: None until the first select_devices() or the first CUDA allocation through the plug-in.
DeviceKind device_kind() noexcept;

/// Chooses the devices of this process, once; again with the same kind it does nothing.
/// Throws Misuse when another kind was chosen before, or when there is no device of that kind (saying why).
void select_devices(DeviceKind kind, const HostKindOptions& host = {});

/// Number of devices of the chosen kind; 0 if None.
int device_count() noexcept;

/// Allocator of device `index`, made on first use (for CUDA this creates the primary context).
/// Throws Misuse for an unknown index or before select_devices().
CachingAllocator& allocator_of(int index);

/// Allocators made so far, in order of device. Creates nothing.
std::vector<CachingAllocator*> existing_allocators();

/// The allocator that owns `address`, or null; null in a forked child.
CachingAllocator* owner_of(DeviceAddress address) noexcept;

/// True in a child that fork() made after devices were chosen: device memory belongs to the parent, and every
/// operation here throws Misuse. The host device's blocks must not be touched either.
bool in_forked_child() noexcept;
/// Throws Misuse in such a child. For what takes a lock, first: another thread of the parent may have held it while it
/// forked, and nobody lets it go here.
void refuse_forked_child();

}  // namespace lowtide
