#include "allocator/caching_allocator.h"

#include <fmt/format.h>

#include <algorithm>

#include "allocator/bytes_format.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "allocator/log.h"
#include "allocator/page_supply.h"

namespace lowtide {
namespace {

/// No device has this much; rounding such a size up would overflow.
constexpr Bytes kMaxRequest = Bytes{1} << 60;

/// Puts the pages of `batch` behind the vacancy, in address order. On a throw the pages placed so far stay in the
/// arena as free memory, the rest in the batch.
void place(Heap& heap, PlacedArena& placed, Bytes offset, PageBatch& batch) LOWTIDE_REQUIRES(heap.mutex) {
  const Heap::Accounting accounting(heap, placed);
  while (!batch.empty()) {
    const Page page = batch.next();
    heap.device.map(placed.base + offset, page.size, page.handle);
    placed.arena.attach(offset, page);
    batch.drop_next();
    offset += page.size;
  }
}

/// One try without waiting: a free block, or one made with pages at hand.
std::optional<DeviceAddress> try_allocate(Heap& heap, Heap::ArenaKey key, Bytes size, Bytes requested)
    LOWTIDE_REQUIRES(heap.mutex) {
  heap.process_pending_frees();
  PlacedArena& placed = heap.arena_for(key);
  const auto commit = [&](Bytes offset) {
    const DeviceAddress address = placed.base + offset;
    heap.live.emplace(address, LiveBlock{&placed, size, requested});
    Heap::add(heap.stats.allocations, placed.size_class, 1);
    Heap::add(heap.stats.requested_bytes, placed.size_class, static_cast<std::int64_t>(requested));
    return address;
  };
  {
    const Heap::Accounting accounting(heap, placed);
    if (const auto offset = placed.arena.allocate(size)) return commit(*offset);
  }
  const auto vacancy = placed.arena.find_vacancy(size);
  if (!vacancy) return std::nullopt;
  PageBatch batch(heap.pool);
  PageSupply supply(heap);
  if (!supply.take_cover(placed, *vacancy, batch)) return std::nullopt;
  place(heap, placed, vacancy->offset, batch);
  const Heap::Accounting accounting(heap, placed);
  const auto offset = placed.arena.allocate(size);
  if (!offset) return std::nullopt;
  return commit(*offset);
}

}  // namespace

CachingAllocator::CachingAllocator(Device& device, AllocatorOptions options)
    : heap_(std::make_unique<Heap>(device, options)) {}

CachingAllocator::~CachingAllocator() = default;

Device& CachingAllocator::device() noexcept { return heap_->device; }

DeviceAddress CachingAllocator::allocate(Bytes size, StreamHandle stream, OwnerId owner) {
  if (size == 0) return DeviceAddress{};
  const CheckedCall checked(*heap_);
  if (size > kMaxRequest) {
    throw OutOfMemory(heap_->device.index(), size, "more than 1 EiB was asked for");
  }
  const Bytes rounded = round_up(size, kBlockUnit);
  const SizeClass size_class = rounded <= heap_->options.small_limit ? SizeClass::Small : SizeClass::Large;
  PageSupply supply(*heap_);
  std::optional<Bytes> held_before;
  for (Remedy tried = Remedy::None; tried != Remedy::Exhausted; tried = supply.apply_next(tried)) {
    MutexLock lock(heap_->mutex);
    if (!held_before) held_before = heap_->pool.held_bytes();
    if (const auto address = try_allocate(*heap_, {owner, stream, size_class}, rounded, size)) return *address;
  }
  MutexLock lock(heap_->mutex);
  ++heap_->stats.num_ooms;
  // What the tries took from the driver goes back: a neighbour may need it, and it was not enough for us.
  heap_->pool.shrink_to(*held_before);
  heap_->refresh_stats();
  throw OutOfMemory(
      heap_->device.index(), size,
      fmt::format("out of memory on {} device {}: {} asked for, {} held by Lowtide, of it {} in blocks, {} of the "
                  "device free, limit {}",
                  heap_->device.kind(), heap_->device.index(), format_bytes(size),
                  format_bytes(heap_->pool.held_bytes()),
                  format_bytes(static_cast<Bytes>(heap_->stats.allocated_bytes[0].current)),
                  format_bytes(heap_->device.memory().free),
                  heap_->memory_fraction < 1.0 ? format_bytes(heap_->pool.limit()) : "none"));
}

bool CachingAllocator::free(DeviceAddress address) noexcept {
  if (address == DeviceAddress{}) return true;
  Heap& heap = *heap_;
  MutexLock lock(heap.mutex);
  const auto found = heap.live.find(address);
  if (found == heap.live.end()) return false;
  PlacedArena& placed = *found->second.arena;
  try {
    // A block that is away, or on the way, was waited for when it left; its other streams are past it.
    const bool pending = !found->second.other_streams.empty() && placed.arena.is_resident(address - placed.base);
    if (pending) {
      heap.pending_frees.push_back({address, found->second});
      if (heap.captures.load(std::memory_order_relaxed) == 0) heap.record_events(heap.pending_frees.back());
      const Heap::Accounting accounting(heap, placed);
      placed.arena.retire(address - placed.base);
    } else {
      heap.end_block(address, found->second);
    }
  } catch (const std::exception& error) {
    log(LogLevel::Error, "a freed block of {} stays allocated: {}", format_bytes(found->second.size), error.what());
    if (!heap.pending_frees.empty() && heap.pending_frees.back().address == address) {
      for (const EventHandle event : heap.pending_frees.back().events) heap.events.give(event);
      heap.pending_frees.pop_back();
    }
    return true;
  }
  Heap::add(heap.stats.allocations, placed.size_class, -1);
  Heap::add(heap.stats.requested_bytes, placed.size_class, -static_cast<std::int64_t>(found->second.requested));
  placed.pinned.erase(address);
  heap.live.erase(found);
#ifdef LOWTIDE_CHECKED
  heap.check_locked();
#endif
  return true;
}

bool CachingAllocator::record_stream(DeviceAddress address, StreamHandle stream) {
  MutexLock lock(heap_->mutex);
  const auto found = heap_->live.find(address);
  if (found == heap_->live.end()) return false;
  auto& streams = found->second.other_streams;
  const bool known = stream == found->second.arena->stream || std::ranges::find(streams, stream) != streams.end();
  if (known) return true;
  auto& of_arena = found->second.arena->recorded_streams;
  if (std::ranges::find(of_arena, stream) == of_arena.end()) of_arena.push_back(stream);
  streams.push_back(stream);
  return true;
}

void CachingAllocator::pin(DeviceAddress address, std::string reason) {
  MutexLock lock(heap_->mutex);
  const auto found = heap_->live.find(address);
  if (found == heap_->live.end()) throw Misuse("no block of Lowtide starts at this address");
  if (!found->second.arena->arena.is_resident(address - found->second.arena->base)) {
    throw Misuse("the block is evicted: restore its region first");
  }
  found->second.arena->pinned.insert_or_assign(address, std::move(reason));
}

Bytes CachingAllocator::trim() {
  const CheckedCall checked(*heap_);
  PageSupply supply(*heap_);
  supply.await_pending_frees();
  supply.await_unused();
  MutexLock lock(heap_->mutex);
  const Bytes released = heap_->pool.release_free();
  heap_->refresh_stats();
  return released;
}

void CachingAllocator::set_memory_fraction(double fraction) {
  if (!(fraction >= 0.0 && fraction <= 1.0)) {
    throw Misuse(fmt::format("a memory fraction lies between 0 and 1, not {}", fraction));
  }
  const Bytes total = heap_->device.memory().total;
  MutexLock lock(heap_->mutex);
  heap_->memory_fraction = fraction;
  heap_->pool.set_limit(fraction < 1.0 ? static_cast<Bytes>(fraction * static_cast<double>(total)) : ~Bytes{0});
}

double CachingAllocator::memory_fraction() const {
  MutexLock lock(heap_->mutex);
  return heap_->memory_fraction;
}

void CachingAllocator::begin_capture() noexcept { heap_->captures.fetch_add(1); }
void CachingAllocator::end_capture() noexcept { heap_->captures.fetch_sub(1); }
bool CachingAllocator::capturing() const noexcept { return heap_->captures.load() > 0; }

void CachingAllocator::add_reclaimer(std::function<bool()> reclaim) {
  MutexLock lock(heap_->mutex);
  heap_->reclaimers.push_back(std::move(reclaim));
}

bool CachingAllocator::release_arenas(OwnerId owner) noexcept {
  MutexLock lock(heap_->mutex);
  bool none_left = true;
  try {
    heap_->process_pending_frees();
    PageSupply(*heap_).collect_passed(owner);
    std::vector<PlacedArena*> empty;
    for (auto& [key, placed] : heap_->arenas) {
      if (placed->owner != owner) continue;
      if (placed->arena.empty()) {
        empty.push_back(placed.get());
      } else {
        none_left = false;
      }
    }
    for (PlacedArena* placed : empty) heap_->remove_arena(*placed);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "arenas of a region that ended stay reserved: {}", error.what());
    return false;
  }
  return none_left;
}

}  // namespace lowtide
