// CPU tensors of offload regions. On the host device a tensor made inside a region lives in Lowtide's pages; every
// other CPU tensor stays with the allocator that torch had before.
#pragma once

#include <c10/core/Allocator.h>

namespace lowtide {

class HostBridge final : public c10::Allocator {
 public:
  /// `original` serves what belongs to no region; it lives for ever.
  explicit HostBridge(c10::Allocator& original) : original_(original) {}

  c10::DataPtr allocate(size_t size) override;
  /// Frees blocks of both allocators, by address. Blocks outside regions carry the original's own deleter: other code
  /// may know it.
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, size_t size) const override;
  bool is_simple_data_ptr(const c10::DataPtr& data) const override;

  c10::Allocator& original() const noexcept { return original_; }

 private:
  c10::Allocator& original_;
};

/// Makes CPU tensors of regions come from the host device. Pre: select_devices(DeviceKind::Host) was called.
/// Idempotent; not safe beside allocations of other threads, as c10::SetAllocator is not.
void install_host_bridge();

}  // namespace lowtide
