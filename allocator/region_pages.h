// Pages of one owner that leave the device and come back. Moves no bytes: pool/ copies between begin and finish.
#pragma once

#include <string>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/page_supply.h"

namespace lowtide {

/// A page of a region on its way.
struct RegionPage {
  PlacedArena* placed = nullptr;
  DeviceAddress address{};
  Bytes offset = 0;
  Bytes size = 0;
};

/// Pages of a region that begin to leave.
struct LeavingPages {
  std::vector<RegionPage> pages{};
  Bytes live_bytes = 0;  // on all of them; frees may lessen them until the pages have left, nothing adds to them
};

/// Each begun page must be finished or cancelled. Safe from any thread; one evict or restore per owner at a time.
class RegionPages {
 public:
  explicit RegionPages(CachingAllocator& allocator) : heap_(allocator.heap()) {}

  /// Streams whose work so far a departure of the owner's pages must wait for: those its blocks were allocated on, and
  /// all that were recorded for blocks of its arenas.
  std::vector<StreamHandle> streams(OwnerId owner) const;

  /// Resident pages of the owner become Evicting; nothing new is placed on them. Waits for pending frees first.
  /// Throws Misuse if a block of the owner is pinned.
  LeavingPages begin_evict(OwnerId owner);
  /// Live bytes of a page that leaves, neighbours as one, in order. Offsets are within the page.
  std::vector<Extent> live_runs(const RegionPage& page) const;
  /// Unmaps the page and gives it to the pool. Pre: every use of it is over. Throws DriverError: still Evicting.
  void finish_evict(const RegionPage& page);
  void cancel_evict(const RegionPage& page) noexcept;

  /// Evicted pages of the owner become Restoring.
  std::vector<RegionPage> begin_restore(OwnerId owner);
  /// Memory for all of `pages`, in their order. May wait for the device. Throws OutOfMemory, DriverError.
  std::vector<Page> acquire(const std::vector<RegionPage>& pages);
  void give_back(const std::vector<Page>& pages) noexcept;
  /// Maps memory at the page's address, for copies only: its blocks stay withheld until finish_restore().
  void map(const RegionPage& page, const Page& memory);
  /// Undoes map() and gives the memory back. Pre: no copy into it is under way.
  void unmap(const RegionPage& page, const Page& memory) noexcept;
  void finish_restore(const RegionPage& page, const Page& memory);
  void cancel_restore(const RegionPage& page) noexcept;

  /// Addresses of the owner's pages without memory: those Evicted, and those Restoring.
  std::vector<DeviceAddress> pages_away(OwnerId owner) const;

  struct Usage {
    Bytes allocated = 0;  // live bytes of the owner
    Bytes evicted = 0;    // of them, away
    bool evicting = false;
    bool restoring = false;
  };
  Usage usage(OwnerId owner) const;

 private:
  template <class F>
  void for_each_arena(OwnerId owner, F&& visit) const LOWTIDE_REQUIRES(heap_.mutex);
  /// Adds memory for the pages that have none yet to `acquired`, as far as it is had without waiting. Throws DriverError:
  /// what was added stays there. Pre: acquired has room for all.
  void take_at_hand(const std::vector<RegionPage>& pages, std::vector<Page>& acquired) LOWTIDE_REQUIRES(heap_.mutex);
  void cancel(const RegionPage& page) noexcept;

  Heap& heap_;
};

}  // namespace lowtide
