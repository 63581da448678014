// The state of one device's allocator, and the mutex that guards it. CachingAllocator, PageSupply and RegionPages are
// three ways to work on it: blocks, pages from anywhere, and pages of a region that leave and come back.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/arena_directory.h"
#include "allocator/caching_allocator.h"
#include "allocator/event_pool.h"
#include "allocator/mutex.h"
#include "allocator/pending_frees.h"

namespace lowtide {

/// Invariants (check()): pool.held_bytes == pool.free_bytes + sum of arenas' mapped_bytes;
///   the Allocated tiles of all arenas are the live blocks, the Retired ones `pending_frees`; stats equal the sums.
class Heap {
 public:
  Heap(Device& device_in, AllocatorOptions options_in);
  ~Heap();

  Device& device;
  const AllocatorOptions options;

  mutable Mutex mutex;
  PagePool pool LOWTIDE_GUARDED_BY(mutex);
  EventPool events LOWTIDE_GUARDED_BY(mutex);
  ArenaDirectory arenas LOWTIDE_GUARDED_BY(mutex);
  PendingFrees pending_frees LOWTIDE_GUARDED_BY(mutex);
  std::vector<std::function<bool()>> reclaimers LOWTIDE_GUARDED_BY(mutex);
  AllocatorStats stats LOWTIDE_GUARDED_BY(mutex);
  double memory_fraction LOWTIDE_GUARDED_BY(mutex) = 1.0;
  std::atomic<int> captures{0};

  /// The arena for a key, made if there is none. Throws OutOfMemory where the address space is used up.
  PlacedArena& arena_for(const ArenaKey& key) LOWTIDE_REQUIRES(mutex);
  /// The live block that starts at `address`.
  struct Block {
    PlacedArena* placed;
    Arena::Tile tile;
  };
  std::optional<Block> block_at(DeviceAddress address) const LOWTIDE_REQUIRES(mutex);
  /// Gives the address range of an arena without blocks and pages back.
  void remove_arena(PlacedArena& placed) noexcept LOWTIDE_REQUIRES(mutex);
  void release_address(const PlacedArena& placed) noexcept LOWTIDE_REQUIRES(mutex);

  /// Ends pending frees whose streams are past them. Does nothing during a capture. Throws DriverError.
  void process_pending_frees() LOWTIDE_REQUIRES(mutex);
  /// Ends one block: its tile becomes Free (or Withheld).
  void end_block(PlacedArena& placed, Bytes offset) LOWTIDE_REQUIRES(mutex);

  /// What changed in `placed` while this lived becomes a change of the stats. The mutex is held all the while.
  class Accounting {
   public:
    Accounting(Heap& heap, const PlacedArena& placed);
    ~Accounting();
    Accounting(const Accounting&) = delete;
    Accounting& operator=(const Accounting&) = delete;

   private:
    Heap& heap_;
    const PlacedArena& placed_;
    Bytes resident_, retired_, evicted_, mapped_;
  };
  /// Adds `n` to the sum and to the class.
  static void add(ClassStats& stat, SizeClass size_class, std::int64_t n) noexcept;
  /// Brings the figures that are read off other structures up to date.
  void refresh_stats() LOWTIDE_REQUIRES(mutex);

  template <class F>
  void for_each_stat(F&& apply) LOWTIDE_REQUIRES(mutex) {
    for (ClassStats* of : {&stats.allocations, &stats.allocated_bytes, &stats.requested_bytes, &stats.active_bytes,
                           &stats.reserved_bytes}) {
      for (Stat& stat : *of) apply(stat);
    }
    apply(stats.evicted_bytes);
  }

  /// Throws std::logic_error naming the first broken invariant.
  void check() const LOWTIDE_EXCLUDES(mutex);
  void check_locked() const LOWTIDE_REQUIRES(mutex);
  /// Every page is in the pool or in an arena. Holds only while no eviction or restore is under way.
  void check_pages() const LOWTIDE_REQUIRES(mutex);
};

/// Walks the heap at the end of a public call in checked builds.
class CheckedCall {
 public:
#ifdef LOWTIDE_CHECKED
  explicit CheckedCall(const Heap& heap) : heap_(heap) {}
  ~CheckedCall() noexcept(false) {
    if (std::uncaught_exceptions() == 0) heap_.check();
  }

 private:
  const Heap& heap_;
#else
  explicit CheckedCall(const Heap&) {}
#endif
};

}  // namespace lowtide
