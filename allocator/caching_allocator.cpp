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

/// The block's memory may be used again only after events on `streams`. On a throw nothing has changed.
void retire(Heap& heap, const Heap::Block& block, const std::vector<StreamHandle>& streams)
    LOWTIDE_REQUIRES(heap.mutex) {
  const bool record = heap.captures.load(std::memory_order_relaxed) == 0;
  heap.pending_frees.add({block.placed, block.tile.offset, block.tile.size}, streams, record);
  const Heap::Accounting accounting(heap, *block.placed);
  block.placed->arena.retire(block.tile.offset);
}

/// One try without waiting: a free block, or one made with pages at hand. `slack` of its bytes were not asked for.
std::optional<DeviceAddress> try_allocate(Heap& heap, const ArenaKey& key, Bytes size, std::uint32_t slack)
    LOWTIDE_REQUIRES(heap.mutex) {
  heap.process_pending_frees();
  PlacedArena& placed = heap.arena_for(key);
  const auto take_block = [&]() LOWTIDE_REQUIRES(heap.mutex) -> std::optional<DeviceAddress> {
    const auto offset = placed.arena.allocate(size, slack);
    if (!offset) return std::nullopt;
    Heap::add(heap.stats.allocations, key.size_class, 1);
    Heap::add(heap.stats.allocated_bytes, key.size_class, static_cast<std::int64_t>(size));
    Heap::add(heap.stats.active_bytes, key.size_class, static_cast<std::int64_t>(size));
    Heap::add(heap.stats.requested_bytes, key.size_class, static_cast<std::int64_t>(size - slack));
    return placed.base + *offset;
  };
  if (const auto address = take_block()) return address;
  const auto vacancy = placed.arena.find_vacancy(size);
  if (!vacancy) return std::nullopt;
  PageBatch batch(heap.pool);
  PageSupply supply(heap);
  supply.assert_held();
  if (!supply.take_cover(placed, *vacancy, batch)) return std::nullopt;
  place(heap, placed, vacancy->offset, batch);
  return take_block();
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
  const auto slack = static_cast<std::uint32_t>(rounded - size);
  const SizeClass size_class = rounded <= heap_->options.small_limit ? SizeClass::Small : SizeClass::Large;
  PageSupply supply(*heap_);
  std::optional<Bytes> held_before;
  for (Remedy tried = Remedy::None; tried != Remedy::Exhausted; tried = supply.apply_next(tried)) {
    MutexLock lock(heap_->mutex);
    if (!held_before) held_before = heap_->pool.held_bytes();
    if (const auto address = try_allocate(*heap_, {owner, stream, size_class}, rounded, slack)) return *address;
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
  const auto block = heap.block_at(address);
  if (!block) return false;
  PlacedArena& placed = *block->placed;
  const Bytes offset = block->tile.offset;
  const auto used_elsewhere = placed.other_streams.find(offset);
  try {
    // A block that is away, or on the way, was waited for when it left; its other streams are past it.
    if (used_elsewhere != placed.other_streams.end() && placed.arena.is_resident(offset)) {
      retire(heap, *block, used_elsewhere->second);
    } else {
      heap.end_block(placed, offset);
    }
  } catch (const std::exception& error) {
    log(LogLevel::Error, "a freed block of {} stays allocated: {}", format_bytes(block->tile.size), error.what());
    return true;
  }
  Heap::add(heap.stats.allocations, placed.key.size_class, -1);
  Heap::add(heap.stats.requested_bytes, placed.key.size_class, -static_cast<std::int64_t>(block->tile.requested()));
  if (!placed.pinned.empty()) placed.pinned.erase(address);
  if (used_elsewhere != placed.other_streams.end()) placed.other_streams.erase(used_elsewhere);
#ifdef LOWTIDE_CHECKED
  heap.check_locked();
#endif
  return true;
}

bool CachingAllocator::record_stream(DeviceAddress address, StreamHandle stream) {
  MutexLock lock(heap_->mutex);
  const auto block = heap_->block_at(address);
  if (!block) return false;
  PlacedArena& placed = *block->placed;
  if (stream == placed.key.stream) return true;
  auto& of_arena = placed.recorded_streams;
  if (std::ranges::find(of_arena, stream) == of_arena.end()) of_arena.push_back(stream);
  auto& streams = placed.other_streams[block->tile.offset];
  if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
  return true;
}

void CachingAllocator::pin(DeviceAddress address, std::string reason) {
  MutexLock lock(heap_->mutex);
  const auto block = heap_->block_at(address);
  if (!block) throw Misuse("no block of Lowtide starts at this address");
  if (!block->placed->arena.is_resident(block->tile.offset)) {
    throw Misuse("the block is evicted: restore its region first");
  }
  block->placed->pinned.insert_or_assign(address, std::move(reason));
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
    PageSupply supply(*heap_);
    supply.assert_held();
    supply.collect_passed(owner);
    std::vector<PlacedArena*> empty;
    for (auto it = heap_->arenas.first_of(owner); it != heap_->arenas.end() && it->first.owner == owner; ++it) {
      PlacedArena* const placed = it->second.get();
      if (placed->arena.empty()) {
        empty.push_back(placed);
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
