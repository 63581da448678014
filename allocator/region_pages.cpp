#include "allocator/region_pages.h"

#include <fmt/format.h>

#include <algorithm>

#include "allocator/bytes_format.h"
#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {

template <class F>
void RegionPages::for_each_arena(OwnerId owner, F&& visit) const {
  for (auto it = heap_.arenas.first_of(owner); it != heap_.arenas.end() && it->first.owner == owner; ++it) {
    visit(*it->second);
  }
}

std::vector<StreamHandle> RegionPages::streams(OwnerId owner) const {
  std::vector<StreamHandle> found;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [&](const PlacedArena& placed) {
    found.push_back(placed.key.stream);
    found.insert(found.end(), placed.recorded_streams.begin(), placed.recorded_streams.end());
  });
  std::ranges::sort(found);
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

LeavingPages RegionPages::begin_evict(OwnerId owner) {
  PageSupply(heap_).await_pending_frees(owner);
  LeavingPages leaving;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [](const PlacedArena& placed) {
    if (placed.pinned.empty()) return;
    const auto& [address, reason] = *placed.pinned.begin();
    throw Misuse(fmt::format("a block of {} may not leave the device: {}",
                             format_bytes(placed.arena.find_block(address - placed.base)->size), reason));
  });
  try {
    for_each_arena(owner, [&](PlacedArena& placed) {
      std::vector<Bytes> offsets;
      const std::vector<Extent> evictable = placed.arena.evictable_pages();
      offsets.reserve(evictable.size());
      leaving.pages.reserve(leaving.pages.size() + evictable.size());
      for (const Extent& page : evictable) offsets.push_back(page.offset);
      leaving.live_bytes += placed.arena.begin_evict(offsets);
      for (const Extent& page : evictable) {
        leaving.pages.push_back({&placed, placed.base + page.offset, page.offset, page.size});
      }
    });
  } catch (...) {
    for (const RegionPage& page : leaving.pages) page.placed->arena.cancel(page.offset);
    throw;
  }
  return leaving;
}

std::vector<Extent> RegionPages::live_runs(const RegionPage& page) const {
  MutexLock lock(heap_.mutex);
  std::vector<Extent> runs = page.placed->arena.live_runs(page.offset);
  for (Extent& run : runs) run.offset -= page.offset;
  return runs;
}

void RegionPages::finish_evict(const RegionPage& page) {
  MutexLock lock(heap_.mutex);
  heap_.device.unmap(page.address, page.size);
  const Heap::Accounting accounting(heap_, *page.placed);
  heap_.pool.give(page.placed->arena.finish_evict(page.offset));
}

void RegionPages::cancel(const RegionPage& page) noexcept {
  MutexLock lock(heap_.mutex);
  const Heap::Accounting accounting(heap_, *page.placed);
  page.placed->arena.cancel(page.offset);
}

void RegionPages::cancel_evict(const RegionPage& page) noexcept { cancel(page); }
void RegionPages::cancel_restore(const RegionPage& page) noexcept { cancel(page); }

std::vector<RegionPage> RegionPages::begin_restore(OwnerId owner) {
  std::vector<RegionPage> pages;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [&](PlacedArena& placed) {
    for (const Extent& extent : placed.arena.pages(PageState::Evicted)) {
      pages.push_back({&placed, placed.base + extent.offset, extent.offset, extent.size});
    }
  });
  for (const RegionPage& page : pages) page.placed->arena.begin_restore(page.offset);
  return pages;
}

void RegionPages::take_at_hand(const std::vector<RegionPage>& pages, std::vector<Page>& acquired) {
  PageSupply supply(heap_);
  supply.assert_held();
  while (acquired.size() < pages.size()) {
    const auto page = supply.take(pages[acquired.size()].size);
    if (!page) break;
    acquired.push_back(*page);
  }
  heap_.refresh_stats();
}

std::vector<Page> RegionPages::acquire(const std::vector<RegionPage>& pages) {
  std::vector<Page> acquired;
  acquired.reserve(pages.size());
  Bytes needed = 0;
  std::optional<Bytes> held_before;
  for (const RegionPage& page : pages) needed += page.size;
  const auto give_back_acquired = [&] {
    give_back(acquired);
    MutexLock lock(heap_.mutex);
    heap_.pool.shrink_to(held_before.value_or(0));
    heap_.refresh_stats();
  };
  PageSupply supply(heap_);
  try {
    for (Remedy tried = Remedy::None; tried != Remedy::Exhausted; tried = supply.apply_next(tried)) {
      MutexLock lock(heap_.mutex);
      if (!held_before) held_before = heap_.pool.held_bytes();
      take_at_hand(pages, acquired);
      if (acquired.size() == pages.size()) return acquired;
    }
  } catch (...) {
    give_back_acquired();
    throw;
  }
  // First what was taken goes back, so that the message has the figures that the caller finds.
  give_back_acquired();
  MutexLock lock(heap_.mutex);
  ++heap_.stats.num_ooms;
  throw OutOfMemory(
      heap_.device.index(), needed,
      fmt::format("{} of device memory are needed; {} of the device are free, and {} in pages that Lowtide keeps. Free "
                  "or evict something and restore again: the bytes are safe on the host",
                  format_bytes(needed), format_bytes(heap_.device.memory().free),
                  format_bytes(heap_.pool.free_bytes())));
}

void RegionPages::give_back(const std::vector<Page>& pages) noexcept {
  MutexLock lock(heap_.mutex);
  for (const Page& page : pages) heap_.pool.give(page);
  heap_.refresh_stats();
}

void RegionPages::map(const RegionPage& page, const Page& memory) {
  heap_.device.map(page.address, memory.size, memory.handle);
}

void RegionPages::unmap(const RegionPage& page, const Page& memory) noexcept {
  try {
    heap_.device.unmap(page.address, memory.size);
  } catch (const std::exception& error) {
    // Still mapped, so it can serve nobody else: better lost than handed out twice.
    log(LogLevel::Error, "a page of {} is lost: {}", format_bytes(memory.size), error.what());
    return;
  }
  give_back({memory});
}

void RegionPages::finish_restore(const RegionPage& page, const Page& memory) {
  MutexLock lock(heap_.mutex);
  const Heap::Accounting accounting(heap_, *page.placed);
  page.placed->arena.finish_restore(page.offset, memory);
}

std::vector<DeviceAddress> RegionPages::pages_away(OwnerId owner) const {
  std::vector<DeviceAddress> away;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [&](const PlacedArena& placed) {
    for (const PageState state : {PageState::Evicted, PageState::Restoring}) {
      for (const Extent& page : placed.arena.pages(state)) away.push_back(placed.base + page.offset);
    }
  });
  return away;
}

RegionPages::Usage RegionPages::usage(OwnerId owner) const {
  Usage usage;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [&](const PlacedArena& placed) {
    usage.allocated += placed.arena.allocated_bytes();
    usage.evicted += placed.arena.evicted_bytes();
    usage.evicting = usage.evicting || !placed.arena.pages(PageState::Evicting).empty();
    usage.restoring = usage.restoring || !placed.arena.pages(PageState::Restoring).empty();
  });
  return usage;
}

}  // namespace lowtide
