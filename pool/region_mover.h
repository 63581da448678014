// Moves one region's pages of one device out to host memory and back: order, copies, and what happens when a step fails.
// A walk through an eviction: pool/README.md.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/region_pages.h"
#include "pool/copy_plan.h"
#include "pool/host_memory.h"
#include "pool/pool_stats.h"

namespace lowtide {

/// The bytes of a region that are on the host: an image of each evicted page, and the memory the images lie in.
/// The transfer lock of the region guards it.
class HostImages {
 public:
  bool empty() const noexcept { return pages_.empty(); }
  void add(PageImage image, std::shared_ptr<HostLease> lease);
  /// The image of the page at `address`. Pre: there is one.
  const PageImage& at(DeviceAddress address) const { return pages_.at(address).image; }
  const std::shared_ptr<HostLease>& lease_of(DeviceAddress address) const { return pages_.at(address).lease; }
  void erase(DeviceAddress address) noexcept { pages_.erase(address); }
  void clear() noexcept { pages_.clear(); }
  /// Host memory held, in bytes.
  Bytes bytes() const;

 private:
  struct Held {
    PageImage image;
    std::shared_ptr<HostLease> lease;
  };
  std::map<DeviceAddress, Held> pages_;
};

/// One per device. Safe from any thread for different owners; the caller serialises calls for one owner.
class RegionMover {
 public:
  RegionMover(CachingAllocator& allocator, HostBudget& budget, HostMemoryOptions options = {});
  ~RegionMover();
  RegionMover(const RegionMover&) = delete;
  RegionMover& operator=(const RegionMover&) = delete;

  /// Copies the owner's resident live bytes out, after the work queued so far on `after` and on the streams of its
  /// blocks, and gives the pages to the pool. Returns when that is done. Images of what left are added to `images`.
  /// Throws Misuse, HostMemoryError, DriverError: the owner's pages are then as they were, unless bringing back those
  /// that had left fails too; these are then still evicted, with their images, and restore() may be tried again.
  void evict(OwnerId owner, const std::vector<StreamHandle>& after, HostImages& images);

  /// Maps memory for the owner's evicted pages and copies their images in. Returns when that is done.
  /// Throws OutOfMemory, DriverError: all pages are then still evicted, with their images.
  void restore(OwnerId owner, HostImages& images);

  /// Throws Misuse if `streams` or this allocator take part in a graph capture.
  void refuse_capture(const std::vector<StreamHandle>& streams) const;

  CachingAllocator& allocator() noexcept { return allocator_; }
  HostMemory& host_memory() noexcept { return host_memory_; }
  PoolStats stats() const;

 private:
  class Departure;
  class Arrival;

  CachingAllocator& allocator_;
  Device& device_;
  HostMemory host_memory_;
  const StreamHandle out_stream_;
  const StreamHandle in_stream_;
  mutable std::mutex mutex_;
  EventPool events_;  // mutex_
  PoolStats stats_;   // mutex_; the host memory figures are filled in by stats()
};

}  // namespace lowtide
