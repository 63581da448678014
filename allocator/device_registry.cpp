#include "allocator/device_registry.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "allocator/address_owners.h"
#include "allocator/bytes_format.h"
#include "allocator/cuda_device.h"
#include "allocator/errors.h"
#include "allocator/fork_guard.h"
#include "allocator/host_device.h"
#include "allocator/mutex.h"

namespace lowtide {
namespace {

constexpr int kMaxDevices = 64;

Bytes memory_of_machine() {
  return static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * static_cast<Bytes>(sysconf(_SC_PAGESIZE));
}

struct Registry {
  Mutex mutex;
  std::atomic<DeviceKind> kind{DeviceKind::None};
  std::atomic<int> count{0};
  HostKindOptions host LOWTIDE_GUARDED_BY(mutex);
  ForkGuard fork_guard;
  AddressOwners owners;
  // Written once each, under the mutex; read without it.
  std::array<std::atomic<CachingAllocator*>, kMaxDevices> allocators{};
};

/// Leaked: tensors are freed after static objects are gone.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

std::string_view name_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::Cuda:
      return "cuda";
    case DeviceKind::Host:
      return "host";
    case DeviceKind::None:
      break;
  }
  return "none";
}

}  // namespace

DeviceKind device_kind() noexcept { return registry().kind.load(std::memory_order_acquire); }

void select_devices(DeviceKind kind, const HostKindOptions& host) {
  Registry& r = registry();
  refuse_forked_child();
  MutexLock lock(r.mutex);
  const DeviceKind before = r.kind.load();
  if (before == kind) return;
  if (before != DeviceKind::None) {
    throw Misuse(fmt::format("Lowtide already uses the {} device in this process; it cannot change to {}",
                             name_of(before), name_of(kind)));
  }
  int count = 0;
  if (kind == DeviceKind::Cuda) {
    count = cuda_device_count();
    if (count == 0) throw Misuse(fmt::format("there is no CUDA device: {}", cuda_unavailable_reason()));
  } else if (kind == DeviceKind::Host) {
    count = host.devices;
    // What a page needs at least; and what could never be used.
    if (host.memory != 0 && (host.memory < 2_MiB || host.memory > memory_of_machine())) {
      throw Misuse(fmt::format("a host device of {} cannot be: 2 MiB to the {} of this machine can",
                               format_bytes(host.memory), format_bytes(memory_of_machine())));
    }
  }
  if (count < 1 || count > kMaxDevices)
    throw Misuse(fmt::format("{} devices; 1 to {} can be used", count, kMaxDevices));
  r.host = host;
  if (r.host.memory == 0) r.host.memory = round_down(memory_of_machine() / 2, 2_MiB);
  r.count = count;
  r.kind.store(kind, std::memory_order_release);
}

int device_count() noexcept { return registry().count.load(std::memory_order_acquire); }

CachingAllocator& allocator_of(int index) {
  Registry& r = registry();
  refuse_forked_child();
  if (index < 0 || index >= device_count()) {
    throw Misuse(device_kind() == DeviceKind::None
                     ? std::string("no device was chosen yet: call lowtide.install() first")
                     : fmt::format("there is no device {}: {} are in use", index, device_count()));
  }
  auto& slot = r.allocators[static_cast<std::size_t>(index)];
  if (CachingAllocator* allocator = slot.load(std::memory_order_acquire)) return *allocator;
  MutexLock lock(r.mutex);
  if (CachingAllocator* allocator = slot.load(std::memory_order_relaxed)) return *allocator;
  std::unique_ptr<Device> device = r.kind == DeviceKind::Cuda
                                       ? make_cuda_device(index)
                                       : make_host_device({.index = index, .memory = r.host.memory});
  auto allocator = std::make_unique<CachingAllocator>(
      *device, AllocatorOptions{.owners = &r.owners, .number = static_cast<std::uint16_t>(index)});
  device.release();  // leaked with the allocator, for the same reason as the registry
  slot.store(allocator.get(), std::memory_order_release);
  return *allocator.release();
}

std::vector<CachingAllocator*> existing_allocators() {
  std::vector<CachingAllocator*> found;
  for (auto& slot : registry().allocators) {
    if (CachingAllocator* allocator = slot.load(std::memory_order_acquire)) found.push_back(allocator);
  }
  return found;
}

CachingAllocator* owner_of(DeviceAddress address) noexcept {
  Registry& r = registry();
  if (r.fork_guard.in_child()) return nullptr;
  const auto number = r.owners.owner(address);
  return number ? r.allocators[*number].load(std::memory_order_acquire) : nullptr;
}

bool in_forked_child() noexcept { return registry().fork_guard.in_child(); }
void refuse_forked_child() { registry().fork_guard.check(); }

}  // namespace lowtide
