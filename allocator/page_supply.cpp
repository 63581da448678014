#include "allocator/page_supply.h"

#include <exception>

#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

/// Below this much growth a failed try costs less than asking the driver first.
constexpr Bytes kAskFirst = 256_MiB;

/// A large page saves the driver fifteen small ones, and may overshoot a request for that: by what the arena has already,
/// so that small arenas stay small, and by this part of what can still be had, so that scarce memory is not spent on it.
constexpr Bytes kOvershootDivisor = 16;

}  // namespace

std::optional<Page> PageSupply::create(Bytes size) {
  try {
    return heap_.pool.create(size);
  } catch (const OutOfMemory&) {
    return std::nullopt;
  }
}

std::optional<Page> PageSupply::take(Bytes size, const PlacedArena* growing, Extent kept) {
  if (const auto page = heap_.pool.take(size)) return page;
  if (const auto page = take_unused(size, growing, kept)) return page;
  if (const auto page = create(size)) return page;
  const PageSizes& sizes = heap_.pool.sizes();
  const Bytes other = size == sizes.small ? sizes.large : sizes.small;
  if (heap_.pool.release_some(other, std::max(size, other))) return create(size);
  return std::nullopt;
}

/// Whether the arena's stream is past all use of its unused pages. Blocks used on other streams are freed only after
/// events of those, so no other stream can still use them. The event stays until a block is freed again: one that was
/// recorded just now has hardly ever passed, the one of an earlier question has.
bool PageSupply::has_passed(PlacedArena& placed) {
  try {
    if (placed.last_use == EventHandle{} || placed.freed_since) {
      const EventHandle event = heap_.events.record(placed.key.stream);
      if (placed.last_use != EventHandle{}) heap_.events.give(placed.last_use);
      placed.last_use = event;
      placed.freed_since = false;
    }
    return heap_.device.query(placed.last_use);
  } catch (const std::exception& error) {
    // A stream that its owner destroyed, say: its pages stay where they are, and others do without them.
    log(LogLevel::Debug, "keeping unused pages mapped: {}", error.what());
    return false;
  }
}

Page PageSupply::detach(PlacedArena& placed, const Extent& page) {
  heap_.device.unmap(placed.base + page.offset, page.size);
  const Heap::Accounting accounting(heap_, placed);
  placed.arena.withdraw(page.offset);
  return placed.arena.detach(page.offset);
}

void PageSupply::collect_passed(OwnerId owner) {
  if (heap_.captures.load(std::memory_order_relaxed) > 0) return;
  for (auto& [key, placed] : heap_.arenas) {
    if (placed->key.owner != owner) continue;
    const auto pages = placed->arena.unused_pages();
    if (pages.empty() || !has_passed(*placed)) continue;
    for (const Extent& page : pages) heap_.pool.give(detach(*placed, page));
  }
}

std::optional<Page> PageSupply::take_unused(Bytes size, const PlacedArena* growing, Extent kept) {
  // During a capture nothing may be unmapped and no event queried.
  if (heap_.captures.load(std::memory_order_relaxed) > 0) return std::nullopt;
  for (auto& [key, placed] : heap_.arenas) {
    for (const Extent& extent : placed->arena.unused_pages()) {
      if (extent.size != size) continue;
      const bool is_kept = placed.get() == growing && extent.offset >= kept.offset && extent.end() <= kept.end();
      if (is_kept) continue;
      if (!has_passed(*placed)) break;
      return detach(*placed, extent);
    }
  }
  return std::nullopt;
}

bool PageSupply::take_cover(const PlacedArena& growing, const Arena::Vacancy& vacancy, PageBatch& batch) {
  const auto [small, large] = heap_.pool.sizes();
  if (vacancy.needed >= kAskFirst && !plausible(vacancy.needed)) return false;
  bool try_large = true;
  for (Bytes covered = 0; covered < vacancy.needed;) {
    const Bytes rest = vacancy.needed - covered;
    const Bytes overshoot = rest < large ? large - rest : 0;
    const bool worth = overshoot == 0 || (overshoot <= growing.arena.mapped_bytes() + covered &&
                                          overshoot <= obtainable() / kOvershootDivisor);
    std::optional<Page> page;
    if (try_large && worth && covered + large <= vacancy.room) {
      page = take(large, &growing, vacancy.kept);
      if (!page) try_large = false;
    }
    if (!page) page = take(small, &growing, vacancy.kept);
    if (!page) return false;
    batch.add(*page);
    covered += page->size;
  }
  return true;
}

bool PageSupply::plausible(Bytes bytes) {
  Bytes idle = heap_.pool.free_bytes();
  for (const auto& [key, placed] : heap_.arenas) {
    for (const Extent& page : placed->arena.unused_pages()) idle += page.size;
  }
  return idle + obtainable() >= bytes;
}

Bytes PageSupply::obtainable() {
  const Bytes held = heap_.pool.held_bytes();
  const Bytes allowed = heap_.pool.limit() > held ? heap_.pool.limit() - held : 0;
  return std::min(heap_.device.memory().free, allowed);
}

Remedy PageSupply::apply_next(Remedy tried) {
  {
    MutexLock lock(heap_.mutex);
    ++heap_.stats.num_alloc_retries;
  }
  switch (tried) {
    case Remedy::None:
      await_pending_frees();
      await_unused();
      return Remedy::AwaitStreams;
    case Remedy::AwaitStreams: {
      std::vector<std::function<bool()>> reclaimers;
      {
        MutexLock lock(heap_.mutex);
        reclaimers = heap_.reclaimers;
      }
      bool reclaimed = false;
      for (const auto& reclaim : reclaimers) reclaimed = reclaim() || reclaimed;
      if (reclaimed) {
        // What they freed may have been blocks of ours.
        await_pending_frees();
        await_unused();
      }
      return Remedy::AskReclaimers;
    }
    case Remedy::AskReclaimers:
    case Remedy::Exhausted:
      break;
  }
  return Remedy::Exhausted;
}

void PageSupply::await_unused() {
  struct Draining {
    PlacedArena* placed;
    std::vector<Extent> pages;
    EventHandle event;
  };
  std::vector<Draining> draining;
  {
    MutexLock lock(heap_.mutex);
    if (heap_.captures.load(std::memory_order_relaxed) > 0) return;
    for (auto& [key, placed] : heap_.arenas) {
      auto pages = placed->arena.unused_pages();
      if (pages.empty()) continue;
      try {
        draining.push_back({placed.get(), {}, heap_.events.record(placed->key.stream)});
      } catch (const std::exception& error) {
        // A stream that its owner destroyed, say: its pages stay where they are.
        log(LogLevel::Warn, "keeping {} unused pages mapped: {}", pages.size(), error.what());
        continue;
      }
      for (const Extent& page : pages) placed->arena.withdraw(page.offset);
      draining.back().pages = std::move(pages);
    }
  }
  // No lock here: a kernel may run for seconds.
  std::exception_ptr failure;
  for (Draining& entry : draining) {
    bool passed = false;
    try {
      heap_.device.synchronize(entry.event);
      passed = true;
    } catch (...) {
      failure = std::current_exception();
    }
    MutexLock lock(heap_.mutex);
    const Heap::Accounting accounting(heap_, *entry.placed);
    heap_.events.give(entry.event);
    for (const Extent& page : entry.pages) {
      if (passed) {
        try {
          heap_.device.unmap(entry.placed->base + page.offset, page.size);
        } catch (...) {
          failure = std::current_exception();
          entry.placed->arena.cancel(page.offset);
          continue;
        }
        heap_.pool.give(entry.placed->arena.detach(page.offset));
      } else {
        entry.placed->arena.cancel(page.offset);
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void PageSupply::await_pending_frees(OwnerId owner) {
  std::vector<StreamHandle> streams;
  {
    MutexLock lock(heap_.mutex);
    if (heap_.captures.load(std::memory_order_relaxed) > 0) return;
    heap_.pending_frees.record();
    streams = heap_.pending_frees.streams(owner);
  }
  for (const StreamHandle stream : streams) heap_.device.synchronize(stream);
  MutexLock lock(heap_.mutex);
  heap_.process_pending_frees();
}

}  // namespace lowtide
