#include "allocator/region_pages.h"

#include <fmt/format.h>

#include <algorithm>

#include "allocator/bytes_format.h"
#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {

template <class F>
void RegionPages::for_each_arena(OwnerId owner, F&& visit) const {
  // Keys start with the owner, so its arenas are neighbours.
  for (auto it = heap_.arenas.lower_bound({owner, StreamHandle{}, SizeClass::Small});
       it != heap_.arenas.end() && std::get<OwnerId>(it->first) == owner; ++it) {
    visit(*it->second);
  }
}

std::vector<StreamHandle> RegionPages::streams(OwnerId owner) const {
  std::vector<StreamHandle> found;
  MutexLock lock(heap_.mutex);
  for_each_arena(owner, [&](PlacedArena& placed) { found.push_back(placed.stream); });
  for (const auto& [address, block] : heap_.live) {
    if (block.arena->owner == owner) found.insert(found.end(), block.other_streams.begin(), block.other_streams.end());
  }
  std::ranges::sort(found);
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<RegionPage> RegionPages::begin(OwnerId owner, PageState from) {
  std::vector<RegionPage> pages;
  for_each_arena(owner, [&](PlacedArena& placed) {
    const Arena& arena = placed.arena;
    const auto extents = from == PageState::Resident ? arena.evictable_pages() : arena.pages(from);
    for (const Extent& extent : extents) {
      RegionPage page{&placed, placed.base + extent.offset, extent.offset, extent.size, arena.live_runs(extent.offset)};
      for (Extent& run : page.live) run.offset -= extent.offset;
      pages.push_back(std::move(page));
    }
  });
  // Only now, with the whole list made, does anything change.
  for (const RegionPage& page : pages) {
    if (from == PageState::Resident) {
      page.placed->arena.begin_evict(page.offset);
    } else {
      page.placed->arena.begin_restore(page.offset);
    }
  }
  return pages;
}

std::vector<RegionPage> RegionPages::begin_evict(OwnerId owner) {
  PageSupply(heap_).await_pending_frees(owner);
  MutexLock lock(heap_.mutex);
  for (const auto& [address, block] : heap_.live) {
    if (block.arena->owner == owner && !block.pin_reason.empty()) {
      throw Misuse(fmt::format("a block of {} may not leave the device: {}", format_bytes(block.size), block.pin_reason));
    }
  }
  return begin(owner, PageState::Resident);
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
  MutexLock lock(heap_.mutex);
  return begin(owner, PageState::Evicted);
}

std::vector<Page> RegionPages::acquire(const std::vector<RegionPage>& pages) {
  std::vector<Page> acquired(pages.size());
  std::size_t count = 0;
  Bytes needed = 0;
  for (const RegionPage& page : pages) needed += page.size;
  PageSupply supply(heap_);
  try {
    for (Remedy tried = Remedy::None; tried != Remedy::Exhausted; tried = supply.apply_next(tried)) {
      MutexLock lock(heap_.mutex);
      for (; count < pages.size(); ++count) {
        const auto page = supply.take(pages[count].size);
        if (!page) break;
        acquired[count] = *page;
      }
      heap_.refresh_stats();
      if (count == pages.size()) return acquired;
    }
    MutexLock lock(heap_.mutex);
    ++heap_.stats.num_ooms;
    throw OutOfMemory(heap_.device.index(), needed,
                      fmt::format("{} are needed to restore the region; {} of the device are free", format_bytes(needed),
                                  format_bytes(heap_.device.memory().free)));
  } catch (...) {
    acquired.resize(count);
    give_back(acquired);
    throw;
  }
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
    log().error("a page of {} is lost: {}", format_bytes(memory.size), error.what());
    return;
  }
  give_back({memory});
}

void RegionPages::finish_restore(const RegionPage& page, const Page& memory) {
  MutexLock lock(heap_.mutex);
  const Heap::Accounting accounting(heap_, *page.placed);
  page.placed->arena.finish_restore(page.offset, memory);
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
