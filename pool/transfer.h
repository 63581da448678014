// One region's pages of one device on their way: out (Departure) or back (Arrival). Both are made, queued and committed;
// one that ends before its commit has changed nothing. Walks: pool/README.md.
#pragma once

#include <vector>

#include "allocator/region_pages.h"
#include "pool/host_images.h"

namespace lowtide {

class RegionMover;

/// Copies of this size reach the link's speed (16 MiB: 99 %), and pages return while the next ones are under way.
inline constexpr Bytes kCopyGroup = 32_MiB;

struct TransferCounts {
  Bytes bytes = 0;
  std::int64_t copies = 0;
};

/// An eviction. The owner's resident pages are Evicting while it lives: nothing new is placed on them.
class Departure {
 public:
  /// Throws Misuse if a block of the owner is pinned.
  Departure(RegionMover& mover, OwnerId owner);
  /// Waits for queued copies, then makes pages that did not leave resident again.
  ~Departure();
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;

  /// Finds host memory and queues every copy, after the work queued so far on `streams`. Returns while copies run.
  /// Throws HostMemoryError, DriverError.
  void queue(const std::vector<StreamHandle>& streams);

  /// Lets each page go as its copy completes; from then on `images` holds its bytes. Returns when all have left.
  /// Throws DriverError: pages before the failure have left, with their images; the others stay.
  void commit(HostImages& images);

  bool empty() const noexcept { return leaving_.pages.empty(); }
  bool any_left() const noexcept { return left_ > 0; }
  const TransferCounts& counts() const noexcept { return counts_; }

 private:
  void settle() noexcept;

  RegionMover& mover_;
  RegionPages region_;
  const LeavingPages leaving_;
  std::shared_ptr<HostLease> lease_;
  std::vector<PageImage> images_;
  std::vector<PageGroup> groups_;
  std::vector<EventHandle> stream_events_;
  std::vector<EventHandle> group_events_;
  std::size_t left_ = 0;  // leaving_.pages[0, left_) have left
  TransferCounts counts_;
  bool queued_ = false;
};

/// A restore. The owner's evicted pages are Restoring while it lives.
class Arrival {
 public:
  Arrival(RegionMover& mover, OwnerId owner);
  /// Without commit(): waits for queued copies, unmaps what was mapped; the pages are evicted again.
  ~Arrival();
  Arrival(const Arrival&) = delete;
  Arrival& operator=(const Arrival&) = delete;

  /// Finds device memory, maps it and queues every copy. Returns while copies run. Throws OutOfMemory, DriverError.
  void queue(const HostImages& images);

  /// Returns when the bytes are there; the pages are then resident, and their images gone. Throws DriverError.
  void commit(HostImages& images);

  bool empty() const noexcept { return pages_.empty(); }
  const TransferCounts& counts() const noexcept { return counts_; }

 private:
  bool settle() noexcept;

  RegionMover& mover_;
  RegionPages region_;
  const std::vector<RegionPage> pages_;
  std::vector<Page> memory_;
  std::size_t mapped_ = 0;  // pages_[0, mapped_) are mapped
  TransferCounts counts_;
  bool committed_ = false;
};

}  // namespace lowtide
