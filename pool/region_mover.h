// Moves regions of one device out to host memory and back: its copy streams, events, host memory and figures.
#pragma once

#include <memory>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/event_pool.h"
#include "allocator/mutex.h"
#include "pool/host_images.h"
#include "pool/host_memory.h"
#include "pool/pool_stats.h"
#include "pool/transfer.h"

namespace lowtide {

/// One per device. Safe from any thread for different owners; the caller serialises calls for one owner.
class RegionMover {
 public:
  RegionMover(CachingAllocator& allocator, HostBudget& budget, HostMemoryOptions options = {});
  ~RegionMover();
  RegionMover(const RegionMover&) = delete;
  RegionMover& operator=(const RegionMover&) = delete;

  /// Copies the owner's resident live bytes out, after the work queued so far on `after` and on the streams of its
  /// blocks, and gives the pages to the pool. Returns when that is done. Images of what left are added to `images`.
  /// Throws Misuse, HostMemoryError, DriverError: the owner's pages are then resident, unless bringing back those that
  /// had left fails too; these are then still evicted, with their images, and restore() may be tried again.
  void evict(OwnerId owner, const std::vector<StreamHandle>& after, HostImages& images);

  /// Maps memory for the owner's evicted pages and copies their images in. Returns when that is done.
  /// Throws OutOfMemory, DriverError: all pages are then still evicted, with their images.
  void restore(OwnerId owner, HostImages& images);

  // The same in steps, for who moves one region on several devices.

  /// A departure with its copies queued. Throws as evict() does; nothing has changed then.
  std::unique_ptr<Departure> depart(OwnerId owner, const std::vector<StreamHandle>& after);
  /// An arrival with its copies queued. Throws as restore() does; nothing has changed then.
  std::unique_ptr<Arrival> arrive(OwnerId owner, const HostImages& images);
  void count(const Departure& departure, double seconds);
  void count(const Arrival& arrival, double seconds);

  /// Throws Misuse if `streams` or this allocator take part in a graph capture.
  void refuse_capture(const std::vector<StreamHandle>& streams) const;

  CachingAllocator& allocator() noexcept { return allocator_; }
  Device& device() noexcept { return device_; }
  HostMemory& host_memory() noexcept { return host_memory_; }
  StreamHandle out_stream() const noexcept { return out_stream_; }
  StreamHandle in_stream() const noexcept { return in_stream_; }
  /// An event recorded on `stream`, to be given back.
  EventHandle record(StreamHandle stream);
  void give_event(EventHandle event) noexcept;
  PoolStats stats() const;

 private:
  CachingAllocator& allocator_;
  Device& device_;
  HostMemory host_memory_;
  const StreamHandle out_stream_;
  const StreamHandle in_stream_;
  mutable Mutex mutex_;
  EventPool events_ LOWTIDE_GUARDED_BY(mutex_);
  PoolStats stats_ LOWTIDE_GUARDED_BY(mutex_);  // the host memory figures are filled in by stats()
};

}  // namespace lowtide
