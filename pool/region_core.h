// What a Region handle points to, and the registry of all regions. Inside pool/ only.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pool/offload_region.h"
#include "pool/region_mover.h"

namespace lowtide {

/// One region on all devices. Lock order: transfer mutex, registry mutex, locks of allocator/.
class RegionCore {
 public:
  RegionCore(std::string name, OwnerId id) : name_(std::move(name)), id_(id) {}

  const std::string& name() const noexcept { return name_; }
  OwnerId id() const noexcept { return id_; }

  void evict(const Region& handle, const EvictOptions& options);
  void restore(const Region& handle);
  /// Sum over the devices.
  RegionPages::Usage usage() const;
  /// Host memory that holds this region's bytes, as far as none of it can be given up.
  Bytes pinned_bytes();
  /// Gives up host memory of tensors that were freed while away. Does nothing while the region moves.
  void drop_images_of_freed();
  /// Drops images of blocks that were all freed while away, and arenas without blocks. Returns whether the region holds
  /// nothing any more.
  bool release_what_is_unused();

 private:
  using Departures = std::map<int, std::unique_ptr<Departure>>;

  /// After a failed eviction: what left comes back, the rest stays.
  void bring_back(Departures& departures) noexcept;
  void drop_images_of_freed_locked();
  void count_pinned() noexcept;
  /// Says once that the region has nothing to evict: whoever calls evict() believes otherwise.
  void warn_if_empty(const RegionPages::Usage& usage);

  const std::string name_;
  const OwnerId id_;
  mutable std::mutex transfer_mutex_;
  bool warned_empty_ = false;           // transfer_mutex_
  std::map<int, HostImages> images_;    // by device; transfer_mutex_
  std::atomic<Bytes> pinned_bytes_{0};  // of images_, for those who ask while it moves
};

/// The mover of device `index`, made on first use and never destroyed.
RegionMover& mover_of(int index);
/// Movers made so far, by device. Makes none.
std::map<int, RegionMover*> existing_movers();
HostBudget& process_host_budget();

}  // namespace lowtide
