// What CachingAllocator shows of itself: lookups, figures, snapshots and the check of its invariants.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "allocator/caching_allocator.h"
#include "allocator/heap.h"

namespace lowtide {
namespace {

BlockInfo info_of(const PlacedArena& placed, const Arena::Tile& block) {
  return {placed.base + block.offset, block.size, block.requested(), placed.key.stream, placed.key.owner};
}

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(fmt::format("lowtide heap: {}", what));
}

}  // namespace

std::optional<BlockInfo> CachingAllocator::find(DeviceAddress address) const {
  MutexLock lock(heap_->mutex);
  const PlacedArena* placed = heap_->arenas.at(address);
  if (placed == nullptr) return std::nullopt;
  const auto block = placed->arena.block_containing(address - placed->base);
  return block ? std::optional(info_of(*placed, *block)) : std::nullopt;
}

bool CachingAllocator::is_resident(DeviceAddress address) const {
  MutexLock lock(heap_->mutex);
  const auto block = heap_->block_at(address);
  return block && block->placed->arena.is_resident(block->tile.offset);
}

std::vector<BlockInfo> CachingAllocator::live_blocks(OwnerId owner) const {
  std::vector<BlockInfo> blocks;
  MutexLock lock(heap_->mutex);
  for (const auto& [base, placed] : heap_->arenas.by_address()) {
    if (placed->key.owner != owner) continue;
    placed->arena.for_each_block([&, of = placed](const Arena::Tile& block) { blocks.push_back(info_of(*of, block)); });
  }
  return blocks;
}

std::vector<std::pair<DeviceAddress, Bytes>> CachingAllocator::live_ranges(OwnerId owner) const {
  std::vector<std::pair<DeviceAddress, Bytes>> ranges;
  MutexLock lock(heap_->mutex);
  for (const auto& [base, placed] : heap_->arenas.by_address()) {
    if (placed->key.owner != owner) continue;
    placed->arena.for_each_block(
        [&, at = base](const Arena::Tile& block) { ranges.emplace_back(at + block.offset, block.size); });
  }
  return ranges;
}

AllocatorStats CachingAllocator::stats() const {
  MutexLock lock(heap_->mutex);
  heap_->refresh_stats();
  heap_->stats.metadata_bytes = 0;
  for (const auto& [key, placed] : heap_->arenas) heap_->stats.metadata_bytes += placed->metadata_bytes();
  return heap_->stats;
}

void CachingAllocator::reset_peak_stats() {
  MutexLock lock(heap_->mutex);
  heap_->for_each_stat([](Stat& stat) { stat.reset_peak(); });
}

void CachingAllocator::reset_accumulated_stats() {
  MutexLock lock(heap_->mutex);
  heap_->for_each_stat([](Stat& stat) { stat.reset_accumulated(); });
  heap_->stats.num_alloc_retries = heap_->stats.num_ooms = 0;
}

std::vector<ArenaSnapshot> CachingAllocator::snapshot() const {
  std::vector<ArenaSnapshot> arenas;
  MutexLock lock(heap_->mutex);
  for (const auto& [base, placed] : heap_->arenas.by_address()) {
    ArenaSnapshot shown{base, placed->key.stream, placed->key.owner, placed->key.size_class, {}};
    for (const Arena::Tile& tile : placed->arena.tiles()) {
      if (tile.kind == TileKind::Vacant) continue;
      ArenaSnapshot::Tile out{base + tile.offset, tile.size, 0, tile.kind, tile.kind == TileKind::Retired, false};
      if (tile.kind == TileKind::Allocated) {
        out.requested = tile.requested();
        out.evicted = !placed->arena.is_resident(tile.offset);
      }
      shown.tiles.push_back(out);
    }
    if (!shown.tiles.empty()) arenas.push_back(std::move(shown));
  }
  return arenas;
}

void CachingAllocator::check() const { heap_->check(); }

void Heap::check_locked() const {
  Bytes mapped = 0, allocated = 0, retired = 0, evicted = 0, requested = 0, blocks = 0;
  for (const auto& [key, placed] : arenas) {
    placed->arena.check();
    mapped += placed->arena.mapped_bytes();
    allocated += placed->arena.allocated_bytes();
    retired += placed->arena.retired_bytes();
    evicted += placed->arena.evicted_bytes();
    placed->arena.for_each_block([&](const Arena::Tile& block) {
      ++blocks;
      requested += block.requested();
    });
    for (const auto& [offset, streams] : placed->other_streams) {
      require(placed->arena.find_block(offset).has_value(), "streams of what is no live block");
    }
  }
  const auto current = [](const ClassStats& stat) {
    require(stat[0].current == stat[1].current + stat[2].current, "a sum that is not that of its classes");
    return static_cast<Bytes>(stat[0].current);
  };
  require(pending_frees.bytes() == retired, "pending frees and Retired tiles differ");
  require(current(stats.allocations) == blocks, "stats.allocations");
  require(current(stats.requested_bytes) == requested, "stats.requested_bytes");
  require(current(stats.allocated_bytes) == allocated - evicted, "stats.allocated_bytes");
  require(current(stats.active_bytes) == allocated - evicted + retired, "stats.active_bytes");
  require(static_cast<Bytes>(stats.evicted_bytes.current) == evicted, "stats.evicted_bytes");
  require(static_cast<Bytes>(stats.reserved_bytes[1].current + stats.reserved_bytes[2].current) == mapped,
          "stats.reserved_bytes of the classes");
}

void Heap::check_pages() const {
  Bytes mapped = 0;
  for (const auto& [key, placed] : arenas) mapped += placed->arena.mapped_bytes();
  require(pool.held_bytes() == pool.free_bytes() + mapped, "pages that nobody has");
}

}  // namespace lowtide
