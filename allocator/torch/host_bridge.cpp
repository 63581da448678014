#include "allocator/torch/host_bridge.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/log_message.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

/// Above every priority that torch itself uses.
constexpr std::uint8_t kPriority = 255;

HostBridge* the_host_bridge = nullptr;  // never destroyed: tensors outlive static objects

void report(void* pointer, std::int64_t size, CachingAllocator& allocator) {
  if (!c10::memoryProfilingEnabled()) return;
  const AllocatorStats stats = allocator.stats();
  c10::reportMemoryUsageToProfiler(pointer, size, static_cast<size_t>(stats.allocated_bytes[0].current),
                                   static_cast<size_t>(stats.reserved_bytes[0].current), c10::DeviceType::CPU);
}

/// Gives a block of a region back. Runs in destructors, on any thread, while the process exits.
void release_region_block(void* pointer) noexcept {
  // The parent's block, and the locks that freeing takes may be held for ever here.
  if (pointer == nullptr || in_forked_child()) return;
  CachingAllocator* const owner = owner_of(to_address(pointer));
  try {
    if (owner != nullptr && c10::memoryProfilingEnabled()) {
      if (const auto block = owner->find(to_address(pointer))) {
        report(pointer, -static_cast<std::int64_t>(block->requested), *owner);
      }
    }
  } catch (const std::exception& error) {
    log_message(LogLevel::Warn, c10::str("freeing block ", pointer, " could not be reported: ", reason_of(error)));
  }
  if (owner == nullptr || !owner->free(to_address(pointer))) {
    log_message(LogLevel::Error, c10::str("no live block starts at ", pointer, "; it is not freed"));
  }
}

void release_any_block(void* pointer) {
  // In a forked child nothing can be asked about the block; leaking it is what is left.
  if (pointer == nullptr || in_forked_child()) return;
  if (owner_of(to_address(pointer)) != nullptr) {
    release_region_block(pointer);
  } else {
    the_host_bridge->original().raw_deallocate(pointer);
  }
}

}  // namespace

c10::DataPtr HostBridge::allocate(size_t size) {
  const OwnerId owner = current_owner();
  if (owner == kNoOwner || size == 0 || in_forked_child()) return original_.allocate(size);
  return with_torch_errors([&]() -> c10::DataPtr {
    CachingAllocator& allocator = allocator_of(0);
    // Tensors are used by the calling thread as soon as they exist: the device's default stream stands for that.
    void* const pointer = to_pointer(allocator.allocate(size, StreamHandle{0}, owner));
    report(pointer, static_cast<std::int64_t>(size), allocator);
    return {pointer, pointer, &release_region_block, c10::DeviceType::CPU};
  });
}

c10::DeleterFnPtr HostBridge::raw_deleter() const {
  return original_.raw_deleter() != nullptr ? &release_any_block : nullptr;
}

void HostBridge::copy_data(void* target, const void* source, size_t size) const {
  default_copy_data(target, source, size);
}

bool HostBridge::is_simple_data_ptr(const c10::DataPtr& data) const {
  // The original may wrap its own blocks; ours never are.
  return data.get_deleter() == &release_region_block || original_.is_simple_data_ptr(data);
}

void install_host_bridge() {
  if (the_host_bridge != nullptr) return;
  the_host_bridge = new HostBridge(*c10::GetAllocator(c10::DeviceType::CPU));
  c10::SetAllocator(c10::DeviceType::CPU, the_host_bridge, kPriority);
  TORCH_CHECK(c10::GetAllocator(c10::DeviceType::CPU) == the_host_bridge,
              "torch refused Lowtide as its allocator of CPU memory");
}

}  // namespace lowtide
