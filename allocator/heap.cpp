#include "allocator/heap.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "allocator/address_owners.h"
#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

/// Address space of one arena: more than the device's memory, so that holes between live blocks do not use it up. Large
/// ordinary blocks come and go the most, and one that stays in the middle leaves only what is beside it for the next.
/// Addresses cost nothing, but a process has 128 TiB of them in all, and regions may be many.
Bytes arena_capacity(Bytes total, Bytes page, const ArenaKey& key) {
  const bool large_ordinary = key.owner == kNoOwner && key.size_class == SizeClass::Large;
  const Bytes wanted = round_up(large_ordinary ? 4 * total : total + total / 8, page);
  return std::min(wanted, round_down(SizeIndex::kLimit - 1, page));
}

std::int64_t signed_difference(Bytes after, Bytes before) {
  return static_cast<std::int64_t>(after) - static_cast<std::int64_t>(before);
}

}  // namespace

Heap::Heap(Device& device_in, AllocatorOptions options_in)
    : device(device_in),
      options(options_in),
      pool(device_in, options_in.page_sizes),
      events(device_in),
      pending_frees(device_in, events) {}

Heap::~Heap() {
  MutexLock lock(mutex);
  for (auto& [key, placed] : arenas) {
    if (placed->last_use != EventHandle{}) events.give(placed->last_use);
    for (const auto& [offset, page] : placed->arena.mapped_pages()) {
      try {
        device.unmap(placed->base + offset, page.size);
        pool.give(page);
      } catch (const std::exception& error) {
        log(LogLevel::Error, "a page stays allocated: {}", error.what());
      }
    }
    release_address(*placed);
  }
}

PlacedArena& Heap::arena_for(const ArenaKey& key) {
  if (PlacedArena* const found = arenas.find(key)) return *found;
  // Room is made in whole pages, so that is the arena's unit, not the device's finer one.
  const Bytes page = pool.sizes().small;
  Bytes capacity = arena_capacity(device.memory().total, page, key);
  if (options.owners != nullptr) capacity = std::max(capacity, round_up(AddressOwners::kLeastRange, page));
  const DeviceAddress base = device.reserve(capacity);
  PlacedArena* placed = nullptr;
  try {
    placed = &arenas.add(std::make_unique<PlacedArena>(base, capacity, page, key));
    if (options.owners != nullptr) options.owners->claim(base, capacity, options.number);
    return *placed;
  } catch (...) {
    if (placed != nullptr) arenas.remove(*placed);
    device.release_address(base, capacity);
    throw;
  }
}

void Heap::release_address(const PlacedArena& placed) noexcept {
  if (options.owners != nullptr) options.owners->disown(placed.base, placed.arena.capacity());
  device.release_address(placed.base, placed.arena.capacity());
}

std::optional<Heap::Block> Heap::block_at(DeviceAddress address) const {
  PlacedArena* const placed = arenas.at(address);
  if (placed == nullptr) return std::nullopt;
  const auto tile = placed->arena.find_block(address - placed->base);
  return tile ? std::optional(Block{placed, *tile}) : std::nullopt;
}

void Heap::remove_arena(PlacedArena& placed) noexcept {
  if (placed.last_use != EventHandle{}) events.give(placed.last_use);
  release_address(placed);
  arenas.remove(placed);
}

void Heap::process_pending_frees() {
  if (pending_frees.empty() || captures.load(std::memory_order_relaxed) > 0) return;
  pending_frees.record();
  pending_frees.process([this](const PendingFrees::Block& block) {
    mutex.assert_held();
    end_block(*block.placed, block.offset);
  });
}

void Heap::end_block(PlacedArena& placed, Bytes offset) {
  const Accounting accounting(*this, placed);
  placed.arena.free(offset);
  placed.freed_since = true;
}

Heap::Accounting::Accounting(Heap& heap, const PlacedArena& placed)
    : heap_(heap),
      placed_(placed),
      resident_(placed.arena.allocated_bytes() - placed.arena.evicted_bytes()),
      retired_(placed.arena.retired_bytes()),
      evicted_(placed.arena.evicted_bytes()),
      mapped_(placed.arena.mapped_bytes()) {}

Heap::Accounting::~Accounting() {
  const Arena& arena = placed_.arena;
  const SizeClass size_class = placed_.key.size_class;
  AllocatorStats& stats = heap_.stats;
  const std::int64_t resident = signed_difference(arena.allocated_bytes() - arena.evicted_bytes(), resident_);
  const std::int64_t retired = signed_difference(arena.retired_bytes(), retired_);
  const std::int64_t evicted = signed_difference(arena.evicted_bytes(), evicted_);
  const std::int64_t mapped = signed_difference(arena.mapped_bytes(), mapped_);
  if (resident != 0) add(stats.allocated_bytes, size_class, resident);
  if (resident + retired != 0) add(stats.active_bytes, size_class, resident + retired);
  if (evicted != 0) stats.evicted_bytes.add(evicted);
  if (mapped == 0) return;
  stats.reserved_bytes[static_cast<std::size_t>(size_class) + 1].add(mapped);
  heap_.refresh_stats();
}

void Heap::add(ClassStats& stat, SizeClass size_class, std::int64_t n) noexcept {
  stat[0].add(n);
  stat[static_cast<std::size_t>(size_class) + 1].add(n);
}

void Heap::refresh_stats() {
  stats.reserved_bytes[0].add(
      signed_difference(pool.held_bytes(), static_cast<Bytes>(stats.reserved_bytes[0].current)));
  stats.free_page_bytes = pool.free_bytes();
  stats.pages = pool.pages();
  stats.num_page_creations = pool.creations();
  stats.num_page_releases = pool.releases();
}

void Heap::check() const {
  MutexLock lock(mutex);
  check_locked();
}

}  // namespace lowtide
