// The state of one device's allocator, and the mutex that guards it. CachingAllocator, PageSupply and RegionPages are
// three ways to work on it: blocks, pages from anywhere, and pages of a region that leave and come back.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "allocator/arena.h"
#include "allocator/caching_allocator.h"
#include "allocator/event_pool.h"
#include "allocator/mutex.h"

namespace lowtide {

/// An arena with its place in the address space and the order its blocks follow.
struct PlacedArena {
  PlacedArena(DeviceAddress where, Bytes capacity, Bytes granularity, StreamHandle of, OwnerId by, SizeClass kind)
      : arena(capacity, granularity), base(where), stream(of), owner(by), size_class(kind) {}

  bool contains(DeviceAddress address) const noexcept { return address >= base && address < base + arena.capacity(); }

  Arena arena;
  std::vector<StreamHandle> recorded_streams{};   // every stream recorded for a block of this arena so far
  std::map<DeviceAddress, std::string> pinned{};  // live blocks that may not leave the device, and why
  EventHandle
      last_use{};  // recorded on `stream` when somebody asked whether it is past its unused pages; 0: nobody did
  bool freed_since = false;  // a block was freed after that
  const DeviceAddress base;
  const StreamHandle stream;
  const OwnerId owner;
  const SizeClass size_class;
};

struct LiveBlock {
  PlacedArena* arena = nullptr;
  Bytes size = 0;
  Bytes requested = 0;
  std::vector<StreamHandle> other_streams{};  // recorded uses besides the arena's own stream
};

/// A block that was freed while other streams may still use it.
struct PendingFree {
  DeviceAddress address{};
  LiveBlock block;
  std::vector<EventHandle> events{};  // of block.other_streams, in their order; passed ones are null
  bool recorded = false;              // not yet while a capture is under way
};

/// Invariants (check()): pool.held_bytes == pool.free_bytes + sum of arenas' mapped_bytes;
///   the Allocated tiles of all arenas are exactly `live`, the Retired ones `pending_frees`; stats equal the sums.
class Heap {
 public:
  Heap(Device& device_in, AllocatorOptions options_in);
  ~Heap();

  Device& device;
  const AllocatorOptions options;

  mutable Mutex mutex;
  PagePool pool LOWTIDE_GUARDED_BY(mutex);
  EventPool events LOWTIDE_GUARDED_BY(mutex);
  using ArenaKey = std::tuple<OwnerId, StreamHandle, SizeClass>;
  std::map<ArenaKey, std::unique_ptr<PlacedArena>> arenas LOWTIDE_GUARDED_BY(mutex);
  std::map<DeviceAddress, PlacedArena*> arenas_by_address LOWTIDE_GUARDED_BY(mutex);
  std::unordered_map<DeviceAddress, LiveBlock> live LOWTIDE_GUARDED_BY(mutex);
  std::list<PendingFree> pending_frees LOWTIDE_GUARDED_BY(mutex);
  std::vector<std::function<bool()>> reclaimers LOWTIDE_GUARDED_BY(mutex);
  AllocatorStats stats LOWTIDE_GUARDED_BY(mutex);
  double memory_fraction LOWTIDE_GUARDED_BY(mutex) = 1.0;
  std::atomic<int> captures{0};

  /// The arena for a key, made if there is none. Throws OutOfMemory where the address space is used up.
  PlacedArena& arena_for(ArenaKey key) LOWTIDE_REQUIRES(mutex);
  PlacedArena* arena_at(DeviceAddress address) const LOWTIDE_REQUIRES(mutex);
  /// Gives the address range of an arena without blocks and pages back.
  void remove_arena(PlacedArena& placed) noexcept LOWTIDE_REQUIRES(mutex);

  /// Ends pending frees whose streams are past them. Does nothing during a capture. Throws DriverError.
  void process_pending_frees() LOWTIDE_REQUIRES(mutex);
  /// Records the events of a pending free, on its other streams. Throws DriverError; may then be called again.
  void record_events(PendingFree& pending) LOWTIDE_REQUIRES(mutex);
  /// Ends one block: its tile becomes Free (or Withheld).
  void end_block(DeviceAddress address, const LiveBlock& block) LOWTIDE_REQUIRES(mutex);

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
