// How the layer that knows tensors takes part in evict and restore. pool/torch implements it; without one, regions move
// bytes and nobody else is told.
#pragma once

#include <vector>

#include "pool/offload_region.h"

namespace lowtide {

/// Called on the thread that evicts or restores, with the region's transfer lock held and no other lock of ours.
/// An observer may take the GIL only where it is not held by a thread that waits for this region: Python callers
/// release it before evict and restore.
class RegionObserver {
 public:
  virtual ~RegionObserver() = default;

  /// A guard for a region, or for no region, opened on this thread or closed.
  virtual void scope_changed() = 0;

  /// Streams on which the caller's work so far must be done before bytes leave: per device the current stream.
  virtual std::vector<DeviceStream> current_streams() = 0;

  /// The region's bytes are being copied and will leave next: make every use of its tensors an error. Throws, having
  /// changed nothing, to refuse.
  virtual void before_evict(const Region& region, const EvictOptions& options) = 0;
  /// The eviction that before_evict() allowed did not happen: the tensors are usable again.
  virtual void evict_failed(const Region& region) noexcept = 0;
  /// The bytes are on their way back: time to prepare after_restore(), which the caller waits for. Nothing may change
  /// yet, since the restore may still fail.
  virtual void while_restoring(const Region& region) noexcept { static_cast<void>(region); }
  /// The restore that while_restoring() was told of did not happen.
  virtual void restore_failed(const Region& region) noexcept { static_cast<void>(region); }
  /// The bytes are back: make the tensors usable again.
  virtual void after_restore(const Region& region) noexcept = 0;
};

/// Sets the observer of this process; it must outlive the process. Null: none.
void set_region_observer(RegionObserver* observer) noexcept;
RegionObserver* region_observer() noexcept;

}  // namespace lowtide
