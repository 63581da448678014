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

Arena::Arena(Bytes capacity, Bytes granularity) : granularity_(granularity), tiles_(capacity, TileKind::Vacant) {
  prepare_indexes();
  enter(tiles_.at(0));
}

// Tiles: before any of them changes it leaves the indexes and sums, and what it became enters them.

void Arena::enter(const Tile& tile) noexcept {
  if (tile.kind == TileKind::Free) free_.insert({tile.offset, tile.size});
  if (tile.kind == TileKind::Vacant) vacant_.insert({tile.offset, tile.size});
  if (tile.kind == TileKind::Allocated) allocated_bytes_ += tile.size;
  if (tile.kind == TileKind::Retired) retired_bytes_ += tile.size;
}

void Arena::leave(const Tile& tile) noexcept {
  if (tile.kind == TileKind::Free) free_.erase({tile.offset, tile.size});
  if (tile.kind == TileKind::Vacant) vacant_.erase({tile.offset, tile.size});
  if (tile.kind == TileKind::Allocated) allocated_bytes_ -= tile.size;
  if (tile.kind == TileKind::Retired) retired_bytes_ -= tile.size;
}

void Arena::prepare_indexes() {
  free_.prepare(SizeIndex::kMostPrepared);
  vacant_.prepare(SizeIndex::kMostPrepared);
}

/// The Allocated or Retired tile that starts at `offset`.
std::optional<Arena::Tile> Arena::block_at(Bytes offset) const noexcept {
  if (!tiles_.starts_at(offset)) return std::nullopt;
  const Tile tile = tiles_.at(offset);
  return is_block(tile.kind) ? std::optional(tile) : std::nullopt;
}

/// Makes a tile start at `offset`, unless a block lies across it: blocks are never cut.
void Arena::split_at(Bytes offset) {
  if (offset == 0 || offset == capacity()) return;
  const Tile tile = tiles_.covering(offset);
  if (tile.offset == offset || is_block(tile.kind)) return;
  prepare_indexes();
  tiles_.prepare(offset);
  leave(tile);
  tiles_.start(offset, tile.kind);
  enter(tiles_.at(tile.offset));
  enter(tiles_.at(offset));
}

/// Replaces the tiles that fill [begin, end) exactly by one of `kind`, merged with neighbours where the kind merges.
void Arena::paint(Bytes begin, Bytes end, TileKind kind) {
  prepare_indexes();
  tiles_.for_each(begin, end, [this](const Tile& tile) { leave(tile); });
  while (tiles_.at(begin).end() < end) tiles_.merge_with_previous(tiles_.at(begin).end());
  if (kind == TileKind::Free || kind == TileKind::Vacant) {
    if (end < capacity()) {
      const Tile after = tiles_.at(end);
      if (after.kind == kind) {
        leave(after);
        tiles_.merge_with_previous(end);
      }
    }
    if (begin > 0) {
      const Tile before = tiles_.before(begin);
      if (before.kind == kind) {
        leave(before);
        tiles_.merge_with_previous(begin);
        begin = before.offset;
      }
    }
  }
  tiles_.start(begin, kind);
  enter(tiles_.at(begin));
}

void Arena::repaint_unallocated(Extent range, TileKind kind) {
  split_at(range.offset);
  split_at(range.end());
  for (Bytes offset = range.offset; offset < range.end();) {
    // What begins before the range is a block, or was merged with it just now.
    const Tile tile = tiles_.covering(offset);
    offset = tile.end();
    if (tile.offset >= range.offset && !is_block(tile.kind) && tile.kind != kind) paint(tile.offset, tile.end(), kind);
  }
}

// Blocks.

std::optional<Bytes> Arena::allocate(Bytes size, std::uint32_t slack) {
  const auto found = free_.best_fit(size);
  if (!found) return std::nullopt;
  const Bytes rest = found->offset + size;
  if (found->size > size) {
    free_.prepare(1);
    tiles_.prepare(rest);
  }
  free_.erase(*found);
  tiles_.start(found->offset, TileKind::Allocated, slack);
  allocated_bytes_ += size;
  if (found->size > size) {
    tiles_.start(rest, TileKind::Free);
    free_.insert({rest, found->size - size});
  }
  return found->offset;
}

/// What paint() does with one block, in fewer steps. Pre: every page is Resident.
void Arena::become_free(const Tile& block) {
  free_.prepare(1);
  leave(block);
  Extent merged{block.offset, block.size};
  if (block.end() < capacity()) {
    const Tile after = tiles_.at(block.end());
    if (after.kind == TileKind::Free) {
      leave(after);
      tiles_.merge_with_previous(after.offset);
      merged.size += after.size;
    }
  }
  if (block.offset > 0) {
    const Tile before = tiles_.before(block.offset);
    if (before.kind == TileKind::Free) {
      leave(before);
      tiles_.merge_with_previous(block.offset);
      merged = {before.offset, merged.size + before.size};
    }
  }
  tiles_.start(merged.offset, TileKind::Free);
  free_.insert(merged);
}

void Arena::free(Bytes offset) {
  const auto block = block_at(offset);
  if (!block) fail("free of what is no block");
  if (away_ == 0) {
    become_free(*block);
    return;
  }
  paint(offset, block->end(), TileKind::Withheld);
  auto slot = slots_.find(slot_covering(offset)->first);
  while (slot != slots_.end() && slot->first < block->end()) {
    const Extent page{slot->first, slot->second.page.size};
    const Bytes begin = std::max(offset, page.offset);
    const Bytes end = std::min(block->end(), page.end());
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
  const auto block = find_block(offset);
  if (!block) fail("retirement of what is no block");
  if (!is_resident(offset)) fail("retirement of a block that is away");
  leave(*block);
  tiles_.start(offset, TileKind::Retired, block->slack);
  enter(tiles_.at(offset));
}

bool Arena::is_resident(Bytes offset) const {
  if (!tiles_.starts_at(offset)) fail("residence of what is no block");
  if (away_ == 0) return true;
  const Bytes end = tiles_.at(offset).end();
  for (auto slot = slot_covering(offset); slot != slots_.end() && slot->first < end; ++slot) {
    if (slot->second.state != PageState::Resident) return false;
  }
  return true;
}

std::optional<Arena::Tile> Arena::find_block(Bytes offset) const noexcept {
  const auto block = block_at(offset);
  return block && block->kind == TileKind::Allocated ? block : std::nullopt;
}

std::optional<Arena::Tile> Arena::block_containing(Bytes offset) const noexcept {
  const Tile tile = tiles_.covering(offset);
  return tile.kind == TileKind::Allocated ? std::optional(tile) : std::nullopt;
}

// Growth.

std::optional<Arena::Vacancy> Arena::find_vacancy(Bytes size) const {
  std::optional<Vacancy> best;
  const auto consider = [&](Vacancy candidate) {
    if (candidate.needed > candidate.room) return;
    const bool better = !best || candidate.needed < best->needed ||
                        (candidate.needed == best->needed && candidate.offset < best->offset);
    if (better) best = candidate;
  };
  const auto free_bytes = [](const Tile& tile) { return tile.kind == TileKind::Free ? tile.size : 0; };
  vacant_.for_each_from(0, [&](const Extent& vacant) {
    const Bytes room = vacant.size;
    const Bytes before = vacant.offset > 0 ? free_bytes(tiles_.before(vacant.offset)) : 0;
    const Bytes after = vacant.end() < capacity() ? free_bytes(tiles_.at(vacant.end())) : 0;
    const Extent kept{vacant.offset - before, before + room + after};
    // allocate() just failed, so neither neighbour holds the block alone.
    if (before < size) consider({vacant.offset, round_up(size - before, granularity_), room, kept});
    if (after > 0 && after < size) {
      const Bytes needed = round_up(size - after, granularity_);
      if (needed <= room) consider({vacant.end() - needed, needed, needed, kept});
    }
    if (kept.size >= size) consider({vacant.offset, room, room, kept});
  });
  return best;
}

void Arena::attach(Bytes offset, Page page) {
  const Tile tile = tiles_.covering(offset);
  if (tile.kind != TileKind::Vacant || offset + page.size > tile.end()) fail("attach where the address range is taken");
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
  tiles_.for_each(range.offset, range.end(), [&](const Tile& tile) {
    if (tile.kind == kind) bytes += std::min(tile.end(), range.end()) - std::max(tile.offset, range.offset);
  });
  return bytes;
}

/// Pre: the page is not Resident.
void Arena::forget(SlotMap::iterator slot) {
  const Extent page{slot->first, slot->second.page.size};
  slots_.erase(slot);
  --away_;
  repaint_unallocated(page, TileKind::Vacant);
}

void Arena::withdraw(Bytes offset) {
  const auto slot = slot_in_state(offset, PageState::Resident, "withdraw");
  const Extent page{offset, slot->second.page.size};
  if (bytes_of(TileKind::Free, page) != page.size) fail("withdraw of a page in use");
  slot->second.state = PageState::Draining;
  ++away_;
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
  free_.for_each_from(0, [&](const Extent& tile) {
    for (auto slot = slot_covering(tile.offset); slot != slots_.end() && slot->first < tile.end(); ++slot) {
      if (!leaves(slot->first)) continue;
      const Bytes from = std::max(tile.offset, slot->first);
      free_parts.push_back({from, std::min(tile.end(), slot->first + slot->second.page.size) - from});
    }
  });
  Bytes live = 0;
  for (const Bytes offset : pages) {
    Slot& slot = slots_.at(offset);
    slot.state = PageState::Evicting;
    slot.live = slot.page.size;
    live += slot.page.size;
  }
  away_ += pages.size();
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
  --away_;
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
      --away_;
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
  free_.for_each_from(granularity_, [&](const Extent& tile) {
    for (auto slot = slots_.lower_bound(tile.offset); slot != slots_.end() && slot->first < tile.end(); ++slot) {
      const Extent page{slot->first, slot->second.page.size};
      if (page.end() <= tile.end()) found.push_back(page);
    }
  });
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
  tiles_.for_each(page.offset, page.end(), [&](const Tile& tile) {
    if (tile.kind != TileKind::Allocated) return;
    const Bytes begin = std::max(tile.offset, page.offset);
    const Bytes end = std::min(tile.end(), page.end());
    if (!runs.empty() && runs.back().end() == begin) {
      runs.back().size += end - begin;
    } else {
      runs.push_back({begin, end - begin});
    }
  });
  return runs;
}

std::vector<Arena::Tile> Arena::tiles() const {
  std::vector<Tile> found;
  tiles_.for_each(0, capacity(), [&](const Tile& tile) { found.push_back(tile); });
  return found;
}

void Arena::check() const {
  Bytes expected = 0, allocated = 0, retired = 0, evicted = 0, mapped = 0;
  std::size_t free_tiles = 0, vacant_tiles = 0, away = 0;
  std::optional<TileKind> previous;
  tiles_.for_each(0, capacity(), [&](const Tile& tile) {
    if (tile.offset != expected || tile.size == 0) fail("tiles do not cover the range");
    expected = tile.end();
    const bool merges = tile.kind == TileKind::Free || tile.kind == TileKind::Vacant;
    if (merges && previous == tile.kind) fail("neighbours that were not merged");
    previous = tile.kind;
    if (tile.kind == TileKind::Free) {
      ++free_tiles;
      if (!free_.contains({tile.offset, tile.size})) fail("a free tile without its index entry");
    }
    if (tile.kind == TileKind::Vacant) {
      ++vacant_tiles;
      if (!vacant_.contains({tile.offset, tile.size})) fail("a vacant tile without its index entry");
      const auto after = slots_.lower_bound(tile.end());
      if (after != slots_.begin() && std::prev(after)->first + std::prev(after)->second.page.size > tile.offset) {
        fail("a vacant tile on a page");
      }
      return;
    }
    if (tile.kind == TileKind::Allocated) allocated += tile.size;
    if (tile.kind == TileKind::Retired) retired += tile.size;
    for (Bytes at = tile.offset; at < tile.end();) {
      const auto slot = slot_covering(at);
      const bool resident = slot->second.state == PageState::Resident;
      if (tile.kind == TileKind::Free && !resident) fail("a free tile on a page that is not resident");
      if (tile.kind == TileKind::Retired && !resident) fail("a retired block on a page that is not resident");
      if (tile.kind == TileKind::Withheld && resident) fail("a withheld tile on a resident page");
      at = slot->first + slot->second.page.size;
    }
  });
  if (expected != capacity()) fail("tiles do not reach the end");
  if (free_tiles != free_.size() || vacant_tiles != vacant_.size()) fail("stale index entries");
  for (const auto& [offset, slot] : slots_) {
    const Extent page{offset, slot.page.size};
    const Bytes live = live_bytes(page);
    if (slot.state != PageState::Resident) ++away;
    if (holds_memory(slot.state)) mapped += page.size;
    if (!holds_memory(slot.state)) evicted += live;
    if (keeps_live(slot.state) && live != slot.live) fail("the live bytes of a page are wrong");
    if (slot.state == PageState::Evicted && live == 0) fail("an evicted page without live bytes");
  }
  if (away != away_) fail("the number of pages away is wrong");
  if (allocated != allocated_bytes_) fail("allocated_bytes is wrong");
  if (retired != retired_bytes_) fail("retired_bytes is wrong");
  if (evicted != evicted_bytes_) fail("evicted_bytes is wrong");
  if (mapped != mapped_bytes_) fail("mapped_bytes is wrong");
}

}  // namespace lowtide
