// Regions: memory that can leave the device and come back at the same address; and the guard that puts a thread's
// allocations into one. Torch-free. How torch's tensors are told: pool/torch/region_tensors.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/caching_allocator.h"

namespace lowtide {

enum class RegionState { Resident, Evicting, Evicted, Restoring };
/// "resident", "evicting", "evicted", "restoring".
std::string_view to_string(RegionState state) noexcept;

/// A stream of one device.
struct DeviceStream {
  int device = 0;
  StreamHandle stream{};
};

/// What an eviction does with live blocks that no tensor is known for: using them while they are away would be a fault.
enum class Untracked {
  Refuse,  // throw Misuse naming their number and sizes
  Unmap,   // the caller knows that nothing uses them
};

struct EvictOptions {
  Untracked untracked = Untracked::Refuse;
  /// Besides the current streams that the region observer names, work queued so far on these is waited for.
  std::vector<DeviceStream> after{};
};

class RegionCore;

/// A handle to a region. A name is a region: handles made with the same name share it, process-wide, on all devices.
/// The region lives while a handle or a live block does; an evicted region whose handles are gone keeps its bytes,
/// and is found again by its name. Safe from any thread; evict and restore of one region exclude each other.
class Region {
 public:
  /// The region called `name`, made if there is none. Throws Misuse for an empty name.
  explicit Region(std::string_view name);
  /// The region called `name`. Throws Misuse, listing the regions there are, if there is none.
  static Region find(std::string_view name);
  /// Regions that exist, in order of creation.
  static std::vector<Region> all();

  const std::string& name() const noexcept;
  OwnerId id() const noexcept;

  /// Copies the live bytes to pinned host memory and gives the device memory to this process's next allocations.
  /// Returns when that is done; nothing to do: returns at once. Copies start after the work queued so far on the
  /// caller's streams (options.after and region_observer.h), on the streams blocks were allocated on, and on streams
  /// recorded for them. With an observer, tensors of the region raise from the call on; without one, using a block
  /// before restore() is a fault.
  /// Throws Misuse (capture under way; pinned or untracked blocks), HostMemoryError, DriverError: the region is then
  /// as before.
  void evict(const EvictOptions& options = {});

  /// Maps memory at the same addresses and copies the bytes back. Returns when that is done, as seen by the host and by
  /// every stream. Nothing to do: returns at once.
  /// Throws OutOfMemory, Misuse, DriverError: the region is then still evicted, its bytes intact; may be retried.
  void restore();

  RegionState state() const;
  /// Live bytes of the region, wherever they are: resident_bytes + evicted_bytes.
  Bytes allocated_bytes() const;
  Bytes resident_bytes() const;
  Bytes evicted_bytes() const;
  /// Host memory that holds evicted bytes of this region now.
  Bytes pinned_bytes() const;
  std::vector<BlockInfo> live_blocks() const;

  RegionCore& core() const noexcept { return *core_; }

 private:
  explicit Region(std::shared_ptr<RegionCore> core) : core_(std::move(core)) {}
  std::shared_ptr<RegionCore> core_;
};

/// While it lives, what this thread allocates goes into the region. Guards nest; the innermost wins.
/// A guard belongs to the thread that made it; to use a region on another thread, make a guard from its handle there.
class OffloadRegion {
 public:
  explicit OffloadRegion(std::string_view name) : OffloadRegion(Region(name)) {}
  explicit OffloadRegion(Region region);
  ~OffloadRegion();
  OffloadRegion(const OffloadRegion&) = delete;
  OffloadRegion& operator=(const OffloadRegion&) = delete;

  Region& region() noexcept { return region_; }

 private:
  Region region_;
};

/// While it lives, what this thread allocates goes into no region.
class NoRegion {
 public:
  NoRegion();
  ~NoRegion();
  NoRegion(const NoRegion&) = delete;
  NoRegion& operator=(const NoRegion&) = delete;
};

}  // namespace lowtide
