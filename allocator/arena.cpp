#include "allocator/arena.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace lowtide {
namespace {

/// A broken invariant of ours: going on would hand out memory that belongs to somebody else.
[[noreturn]] void fail(const std::string& what) { throw std::logic_error("lowtide arena: " + what); }

bool is_block(TileKind kind) { return kind == TileKind::Allocated || kind == TileKind::Retired; }

bool holds_memory(PageState state) { return state != PageState::Evicted && state != PageState::Restoring; }

bool keeps_live(PageState state) { return state != PageState::Resident && state != PageState::Draining; }

}  // namespace

std::string_view to_string(PageState state) noexcept {
  switch (state) {
    case PageState::Resident:
      return "resident";
    case PageState::Draining:
      return "draining";
    case PageState::Evicting:
      return "evicting";
    case PageState::Evicted:
      return "evicted";
    case PageState::Restoring:
      return "restoring";
  }
  return "unknown";
}

Arena::Arena(Bytes capacity, Bytes granularity) : capacity_(capacity), granularity_(granularity) {
  insert_tile(0, capacity, TileKind::Vacant);
}

// Tiles: every change goes through insert_tile and erase_tile, which keep the indexes and sums.

void Arena::insert_tile(Bytes offset, Bytes size, TileKind kind) {
  tiles_.emplace(offset, TileValue{size, kind});
  if (kind == TileKind::Free) free_.emplace(size, offset);
  if (kind == TileKind::Vacant) vacant_.insert(offset);
  if (kind == TileKind::Allocated) allocated_bytes_ += size;
  if (kind == TileKind::Retired) retired_bytes_ += size;
}

void Arena::erase_tile(TileMap::iterator tile) {
  const auto [offset, value] = *tile;
  if (value.kind == TileKind::Free) free_.erase({value.size, offset});
  if (value.kind == TileKind::Vacant) vacant_.erase(offset);
  if (value.kind == TileKind::Allocated) allocated_bytes_ -= value.size;
  if (value.kind == TileKind::Retired) retired_bytes_ -= value.size;
  tiles_.erase(tile);
}

/// Makes a tile start at `offset`, unless a block lies across it: blocks are never cut.
void Arena::split_at(Bytes offset) {
  if (offset == 0 || offset == capacity_) return;
  auto tile = std::prev(tiles_.upper_bound(offset));
  const auto [begin, value] = *tile;
  if (begin == offset || is_block(value.kind)) return;
  erase_tile(tile);
  insert_tile(begin, offset - begin, value.kind);
  insert_tile(offset, begin + value.size - offset, value.kind);
}

/// Replaces the tiles that fill [begin, end) exactly by one of `kind`, merged with neighbours where the kind merges.
void Arena::paint(Bytes begin, Bytes end, TileKind kind) {
  auto tile = tiles_.find(begin);
  while (tile != tiles_.end() && tile->first < end) {
    const auto next = std::next(tile);
    erase_tile(tile);
    tile = next;
  }
  if (kind == TileKind::Free || kind == TileKind::Vacant) {
    if (tile != tiles_.end() && tile->second.kind == kind) {
      end = tile->first + tile->second.size;
      const auto next = std::next(tile);
      erase_tile(tile);
      tile = next;
    }
    if (tile != tiles_.begin() && std::prev(tile)->second.kind == kind) {
      tile = std::prev(tile);
      begin = tile->first;
      erase_tile(tile);
    }
  }
  insert_tile(begin, end - begin, kind);
}

void Arena::repaint_unallocated(Extent range, TileKind kind) {
  split_at(range.offset);
  split_at(range.end());
  // A block may reach into the range from before it, so start at the first tile that begins inside.
  Bytes offset = range.offset;
  for (auto tile = tiles_.lower_bound(offset); tile != tiles_.end() && tile->first < range.end();
       tile = tiles_.lower_bound(offset)) {
    const auto [begin, value] = *tile;
    offset = begin + value.size;
    if (!is_block(value.kind)) paint(begin, offset, kind);
  }
}

// Blocks.

std::optional<Bytes> Arena::allocate(Bytes size) {
  const auto found = free_.lower_bound({size, 0});
  if (found == free_.end()) return std::nullopt;
  const auto [tile_size, offset] = *found;
  erase_tile(tiles_.find(offset));
  insert_tile(offset, size, TileKind::Allocated);
  if (tile_size > size) insert_tile(offset + size, tile_size - size, TileKind::Free);
  return offset;
}

void Arena::free(Bytes offset) {
  const auto tile = tiles_.find(offset);
  if (tile == tiles_.end() || !is_block(tile->second.kind)) fail("free of what is no block");
  const Extent block{offset, tile->second.size};
  erase_tile(tile);
  insert_tile(block.offset, block.size, TileKind::Withheld);

  auto slot = slots_.find(slot_covering(block.offset)->first);
  while (slot != slots_.end() && slot->first < block.end()) {
    const Extent page{slot->first, slot->second.page.size};
    const Bytes begin = std::max(block.offset, page.offset);
    const Bytes end = std::min(block.end(), page.end());
    split_at(begin);
    split_at(end);
    const PageState state = slot->second.state;
    if (state == PageState::Resident) paint(begin, end, TileKind::Free);
    if (!holds_memory(state)) evicted_bytes_ -= end - begin;
    if (keeps_live(state)) slot->second.live -= end - begin;
    const auto next = std::next(slot);
    if (state == PageState::Evicted && slot->second.live == 0) forget(slot);
    slot = next;
  }
}

void Arena::retire(Bytes offset) {
  const auto tile = tiles_.find(offset);
  if (tile == tiles_.end() || tile->second.kind != TileKind::Allocated) fail("retirement of what is no block");
  if (!is_resident(offset)) fail("retirement of a block that is away");
  const Bytes size = tile->second.size;
  erase_tile(tile);
  insert_tile(offset, size, TileKind::Retired);
}

bool Arena::is_resident(Bytes offset) const {
  const auto tile = tiles_.find(offset);
  if (tile == tiles_.end()) fail("residence of what is no block");
  const Bytes end = offset + tile->second.size;
  for (auto slot = slot_covering(offset); slot != slots_.end() && slot->first < end; ++slot) {
    if (slot->second.state != PageState::Resident) return false;
  }
  return true;
}

Bytes Arena::block_size(Bytes offset) const {
  const auto tile = tiles_.find(offset);
  if (tile == tiles_.end() || tile->second.kind != TileKind::Allocated) fail("size of what is no block");
  return tile->second.size;
}

std::optional<Bytes> Arena::block_containing(Bytes offset) const {
  const auto tile = std::prev(tiles_.upper_bound(offset));
  if (tile->second.kind != TileKind::Allocated) return std::nullopt;
  return tile->first;
}

// Growth.

std::optional<Arena::Vacancy> Arena::find_vacancy(Bytes size) const {
  std::optional<Vacancy> best;
  const auto consider = [&](Vacancy candidate) {
    if (candidate.needed <= candidate.room && (!best || candidate.needed < best->needed)) best = candidate;
  };
  for (const Bytes offset : vacant_) {
    const auto tile = tiles_.find(offset);
    const Bytes room = tile->second.size;
    const auto next = std::next(tile);
    const bool free_before = tile != tiles_.begin() && std::prev(tile)->second.kind == TileKind::Free;
    const bool free_after = next != tiles_.end() && next->second.kind == TileKind::Free;
    const Bytes before = free_before ? std::prev(tile)->second.size : 0;
    const Bytes after = free_after ? next->second.size : 0;
    const Extent kept{offset - before, before + room + after};
    // allocate() just failed, so neither neighbour holds the block alone.
    if (before < size) consider({offset, round_up(size - before, granularity_), room, kept});
    if (after > 0 && after < size) {
      const Bytes needed = round_up(size - after, granularity_);
      if (needed <= room) consider({offset + room - needed, needed, needed, kept});
    }
    if (before + room + after >= size) consider({offset, room, room, kept});
  }
  return best;
}

void Arena::attach(Bytes offset, Page page) {
  const auto tile = std::prev(tiles_.upper_bound(offset));
  const bool fits = tile->second.kind == TileKind::Vacant && offset + page.size <= tile->first + tile->second.size;
  if (!fits) fail("attach where the address range is taken");
  slots_.emplace(offset, Slot{page, PageState::Resident});
  mapped_bytes_ += page.size;
  repaint_unallocated({offset, page.size}, TileKind::Free);
}

// Moves of pages.

Arena::SlotMap::const_iterator Arena::slot_covering(Bytes offset) const {
  auto slot = slots_.upper_bound(offset);
  if (slot == slots_.begin()) fail("no page behind a block");
  --slot;
  if (offset >= slot->first + slot->second.page.size) fail("no page behind a block");
  return slot;
}

Arena::SlotMap::iterator Arena::slot_in_state(Bytes offset, PageState expected, std::string_view move) {
  const auto slot = slots_.find(offset);
  if (slot == slots_.end()) fail(fmt::format("{} of a page that is not there", move));
  if (slot->second.state != expected) {
    fail(fmt::format("{} of a page that is {}, not {}", move, to_string(slot->second.state), to_string(expected)));
  }
  return slot;
}

Bytes Arena::bytes_of(TileKind kind, Extent range) const {
  Bytes bytes = 0;
  auto tile = std::prev(tiles_.upper_bound(range.offset));
  for (; tile != tiles_.end() && tile->first < range.end(); ++tile) {
    if (tile->second.kind != kind) continue;
    bytes += std::min(tile->first + tile->second.size, range.end()) - std::max(tile->first, range.offset);
  }
  return bytes;
}

void Arena::forget(SlotMap::iterator slot) {
  const Extent page{slot->first, slot->second.page.size};
  slots_.erase(slot);
  repaint_unallocated(page, TileKind::Vacant);
}

void Arena::withdraw(Bytes offset) {
  const auto slot = slot_in_state(offset, PageState::Resident, "withdraw");
  const Extent page{offset, slot->second.page.size};
  if (bytes_of(TileKind::Free, page) != page.size) fail("withdraw of a page in use");
  slot->second.state = PageState::Draining;
  repaint_unallocated(page, TileKind::Withheld);
}

Page Arena::detach(Bytes offset) {
  const auto slot = slot_in_state(offset, PageState::Draining, "detach");
  const Page page = slot->second.page;
  mapped_bytes_ -= page.size;
  forget(slot);
  return page;
}

Bytes Arena::begin_evict(const std::vector<Bytes>& pages) {
  for (const Bytes offset : pages) {
    const auto slot = slot_in_state(offset, PageState::Resident, "evict");
    if (retired_bytes_ > 0 && bytes_of(TileKind::Retired, {offset, slot->second.page.size}) != 0) {
      fail("evict of a page with a retired block");
    }
  }
  const auto leaves = [&](Bytes offset) { return std::ranges::binary_search(pages, offset); };
  std::vector<Extent> free_parts;
  for (const auto& [size, begin] : free_) {
    const Extent tile{begin, size};
    for (auto slot = slot_covering(tile.offset); slot != slots_.end() && slot->first < tile.end(); ++slot) {
      if (!leaves(slot->first)) continue;
      const Bytes from = std::max(tile.offset, slot->first);
      free_parts.push_back({from, std::min(tile.end(), slot->first + slot->second.page.size) - from});
    }
  }
  Bytes live = 0;
  for (const Bytes offset : pages) {
    Slot& slot = slots_.at(offset);
    slot.state = PageState::Evicting;
    slot.live = slot.page.size;
    live += slot.page.size;
  }
  for (const Extent& part : free_parts) {
    slots_.at(slot_covering(part.offset)->first).live -= part.size;
    live -= part.size;
    repaint_unallocated(part, TileKind::Withheld);
  }
  return live;
}

Page Arena::finish_evict(Bytes offset) {
  const auto slot = slot_in_state(offset, PageState::Evicting, "end of evict");
  const Page page = slot->second.page;
  const Bytes live = slot->second.live;
  mapped_bytes_ -= page.size;
  slot->second = Slot{{PageHandle{}, page.size}, PageState::Evicted, live};
  evicted_bytes_ += live;
  if (live == 0) forget(slot);
  return page;
}

void Arena::begin_restore(Bytes offset) {
  slot_in_state(offset, PageState::Evicted, "restore")->second.state = PageState::Restoring;
}

void Arena::finish_restore(Bytes offset, Page page) {
  const auto slot = slot_in_state(offset, PageState::Restoring, "end of restore");
  if (slot->second.page.size != page.size) fail("restore with a page of another size");
  const Bytes live = slot->second.live;
  slot->second = Slot{page, PageState::Resident};
  mapped_bytes_ += page.size;
  evicted_bytes_ -= live;
  if (live != page.size) repaint_unallocated({offset, page.size}, TileKind::Free);
}

void Arena::cancel(Bytes offset) {
  const auto slot = slots_.find(offset);
  if (slot == slots_.end()) fail("cancel of a page that is not there");
  const Extent page{offset, slot->second.page.size};
  switch (slot->second.state) {
    case PageState::Draining:
    case PageState::Evicting:
      slot->second.state = PageState::Resident;
      repaint_unallocated(page, TileKind::Free);
      return;
    case PageState::Restoring:
      slot->second.state = PageState::Evicted;
      if (slot->second.live == 0) forget(slot);
      return;
    case PageState::Resident:
    case PageState::Evicted:
      fail("cancel of a page that is on no way");
  }
}

// Looks.

std::vector<Extent> Arena::pages(PageState state) const {
  std::vector<Extent> found;
  for (const auto& [offset, slot] : slots_) {
    if (slot.state == state) found.push_back({offset, slot.page.size});
  }
  return found;
}

std::vector<Extent> Arena::unused_pages() const {
  std::vector<Extent> found;
  // An unused page lies in one Free tile, so only tiles at least as large as the smallest page are looked at.
  for (auto it = free_.lower_bound({granularity_, 0}); it != free_.end(); ++it) {
    const Extent tile{it->second, it->first};
    for (auto slot = slots_.lower_bound(tile.offset); slot != slots_.end() && slot->first < tile.end(); ++slot) {
      const Extent page{slot->first, slot->second.page.size};
      if (page.end() <= tile.end()) found.push_back(page);
    }
  }
  return found;
}

std::vector<Extent> Arena::evictable_pages() const {
  std::vector<Extent> found = pages(PageState::Resident);
  if (retired_bytes_ > 0)
    std::erase_if(found, [&](const Extent& page) { return bytes_of(TileKind::Retired, page) > 0; });
  return found;
}

std::vector<std::pair<Bytes, Page>> Arena::mapped_pages() const {
  std::vector<std::pair<Bytes, Page>> found;
  for (const auto& [offset, slot] : slots_) {
    if (holds_memory(slot.state)) found.emplace_back(offset, slot.page);
  }
  return found;
}

std::vector<Extent> Arena::live_runs(Bytes page_offset) const {
  const Extent page{page_offset, slots_.at(page_offset).page.size};
  std::vector<Extent> runs;
  auto tile = std::prev(tiles_.upper_bound(page.offset));
  for (; tile != tiles_.end() && tile->first < page.end(); ++tile) {
    if (tile->second.kind != TileKind::Allocated) continue;
    const Bytes begin = std::max(tile->first, page.offset);
    const Bytes end = std::min(tile->first + tile->second.size, page.end());
    if (!runs.empty() && runs.back().end() == begin) {
      runs.back().size += end - begin;
    } else {
      runs.push_back({begin, end - begin});
    }
  }
  return runs;
}

std::vector<Arena::Tile> Arena::tiles() const {
  std::vector<Tile> found;
  found.reserve(tiles_.size());
  for (const auto& [offset, value] : tiles_) found.push_back({offset, value.size, value.kind});
  return found;
}

void Arena::check() const {
  Bytes expected = 0, allocated = 0, retired = 0, evicted = 0, mapped = 0;
  std::size_t free_tiles = 0, vacant_tiles = 0;
  std::optional<TileKind> previous;
  for (const auto& [offset, tile] : tiles_) {
    if (offset != expected || tile.size == 0) fail("tiles do not cover the range");
    expected = offset + tile.size;
    const bool merges = tile.kind == TileKind::Free || tile.kind == TileKind::Vacant;
    if (merges && previous == tile.kind) fail("neighbours that were not merged");
    previous = tile.kind;
    if (tile.kind == TileKind::Free) {
      ++free_tiles;
      if (!free_.contains({tile.size, offset})) fail("a free tile without its index entry");
    }
    if (tile.kind == TileKind::Vacant) {
      ++vacant_tiles;
      if (!vacant_.contains(offset)) fail("a vacant tile without its index entry");
      const auto after = slots_.lower_bound(offset + tile.size);
      if (after != slots_.begin() && std::prev(after)->first + std::prev(after)->second.page.size > offset) {
        fail("a vacant tile on a page");
      }
      continue;
    }
    if (tile.kind == TileKind::Allocated) allocated += tile.size;
    if (tile.kind == TileKind::Retired) retired += tile.size;
    for (Bytes at = offset; at < offset + tile.size;) {
      const auto slot = slot_covering(at);
      const Bytes page_end = slot->first + slot->second.page.size;
      const bool resident = slot->second.state == PageState::Resident;
      if (tile.kind == TileKind::Free && !resident) fail("a free tile on a page that is not resident");
      if (tile.kind == TileKind::Retired && !resident) fail("a retired block on a page that is not resident");
      if (tile.kind == TileKind::Withheld && resident) fail("a withheld tile on a resident page");
      at = page_end;
    }
  }
  if (expected != capacity_) fail("tiles do not reach the end");
  if (free_tiles != free_.size() || vacant_tiles != vacant_.size()) fail("stale index entries");
  for (const auto& [offset, slot] : slots_) {
    const Extent page{offset, slot.page.size};
    if (holds_memory(slot.state)) mapped += page.size;
    if (!holds_memory(slot.state)) evicted += live_bytes(page);
    if (keeps_live(slot.state) && live_bytes(page) != slot.live) fail("the live bytes of a page are wrong");
    if (slot.state == PageState::Evicted && live_bytes(page) == 0) fail("an evicted page without live bytes");
  }
  if (allocated != allocated_bytes_) fail("allocated_bytes is wrong");
  if (retired != retired_bytes_) fail("retired_bytes is wrong");
  if (evicted != evicted_bytes_) fail("evicted_bytes is wrong");
  if (mapped != mapped_bytes_) fail("mapped_bytes is wrong");
}

}  // namespace lowtide
