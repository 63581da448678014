// One growing address range cut into blocks: where to put them, and which pages lie behind. Offset arithmetic only:
// no driver, no lock, testable alone. Design: docs/design.md, "Arenas and pages".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/page_pool.h"
#include "allocator/size_index.h"
#include "allocator/tile_map.h"

namespace lowtide {

/// Where the memory of a page is. Legal moves: Resident -> Draining -> (gone); Resident -> Evicting -> Evicted (or gone)
/// -> Restoring -> Resident; and the way back of each unfinished move.
enum class PageState : std::uint8_t {
  Resident,   // mapped
  Draining,   // mapped, unused, waiting for its streams before it leaves
  Evicting,   // mapped, its live bytes are being copied out
  Evicted,    // no memory; the live bytes are on the host
  Restoring,  // memory is being mapped and filled
};
std::string_view to_string(PageState state) noexcept;

/// Invariants (check() verifies them):
///   tiles cover [0, capacity) in order, no two neighbours are both Free or both Vacant;
///   Free tiles lie on Resident pages, Withheld ones on pages in any other state, Vacant ones on no page;
///   every Allocated byte lies on a page, every Retired one on a Resident page; an Evicted page holds at least one
///   Allocated byte;
///   allocated_bytes == sum of Allocated tiles; evicted_bytes == their part on Evicted and Restoring pages.
class Arena {
 public:
  using Tile = TileMap::Tile;

  /// Pre: capacity is a multiple of granularity and below SizeIndex::kLimit, granularity a multiple of kBlockUnit.
  Arena(Bytes capacity, Bytes granularity);

  // Blocks. Sizes are multiples of kBlockUnit.

  /// Offset of a block in the smallest Free tile that holds it, the lowest of equals; nothing if no tile does. `slack`
  /// bytes at its end, fewer than kBlockUnit, were not asked for. Throws std::bad_alloc and has changed nothing then.
  std::optional<Bytes> allocate(Bytes size, std::uint32_t slack = 0);
  /// Ends the block at `offset`. Bytes on pages that are away become Withheld; an Evicted page that held only this
  /// block is forgotten. Pre: an Allocated or Retired block starts there.
  void free(Bytes offset);
  /// The Allocated tile that starts at `offset`.
  std::optional<Tile> find_block(Bytes offset) const noexcept;
  /// The Allocated tile that contains `offset`.
  std::optional<Tile> block_containing(Bytes offset) const noexcept;
  /// The block's content is no longer needed, but its memory may not be used or leave before free().
  /// Pre: an Allocated block starts there and is_resident(offset).
  void retire(Bytes offset);
  /// Whether every page behind the block at `offset` is Resident.
  bool is_resident(Bytes offset) const;

  // Growth.

  struct Vacancy {
    Bytes offset;  // pages go here, one after the other
    Bytes needed;  // so many bytes of pages let allocate() succeed
    Bytes room;    // no more than this fits
    Extent kept;   // the Vacant tile and its Free neighbours: the plan holds as long as they do
  };
  /// Where the fewest new bytes make room for a block of `size`; nothing if the address range is used up.
  std::optional<Vacancy> find_vacancy(Bytes size) const;
  /// Puts `page` behind [offset, offset + page.size). Pre: that range is Vacant.
  void attach(Bytes offset, Page page);

  // Moves of pages, by the page's offset. Each checks the state it starts from and aborts on a wrong one (a bug here).

  void withdraw(Bytes offset);  // Resident, unused -> Draining
  Page detach(Bytes offset);    // Draining -> gone
  /// Resident -> Evicting, for each of `pages` (offsets in ascending order): nothing is placed on them any more. Returns
  /// the live bytes on them. Looks at no block: the first copy does not wait for a walk over thousands.
  Bytes begin_evict(const std::vector<Bytes>& pages);
  Page finish_evict(Bytes offset);               // Evicting -> Evicted, or gone if no live byte is left
  void begin_restore(Bytes offset);              // Evicted -> Restoring
  void finish_restore(Bytes offset, Page page);  // Restoring -> Resident
  void cancel(Bytes offset);  // Draining, Evicting -> Resident; Restoring -> Evicted, or gone if no live byte is left

  // Looks.

  std::vector<Extent> pages(PageState state) const;
  /// Resident pages that are all Free.
  std::vector<Extent> unused_pages() const;
  /// Resident pages without a Retired block: they may leave.
  std::vector<Extent> evictable_pages() const;
  /// Pages that hold device memory, with their offsets.
  std::vector<std::pair<Bytes, Page>> mapped_pages() const;
  /// Allocated bytes on the page at `page_offset`, in order, neighbours as one.
  std::vector<Extent> live_runs(Bytes page_offset) const;

  /// Calls `visit` with each Allocated tile, in order.
  template <class Visit>
  void for_each_block(Visit&& visit) const {
    tiles_.for_each(0, capacity(), [&](const Tile& tile) {
      if (tile.kind == TileKind::Allocated) visit(tile);
    });
  }

  std::vector<Tile> tiles() const;

  Bytes capacity() const noexcept { return tiles_.capacity(); }
  Bytes allocated_bytes() const noexcept { return allocated_bytes_; }
  Bytes evicted_bytes() const noexcept { return evicted_bytes_; }
  Bytes retired_bytes() const noexcept { return retired_bytes_; }
  /// Bytes of pages that hold device memory for this arena (all states but Evicted and Restoring).
  Bytes mapped_bytes() const noexcept { return mapped_bytes_; }
  bool empty() const noexcept { return slots_.empty(); }
  /// Bytes of host memory that the bookkeeping occupies, beside the arena itself.
  Bytes metadata_bytes() const noexcept {
    constexpr Bytes kMapNode = 4 * sizeof(void*);
    return tiles_.metadata_bytes() + free_.metadata_bytes() + vacant_.metadata_bytes() +
           slots_.size() * (sizeof(SlotMap::value_type) + kMapNode);
  }

  /// Walks everything; throws std::logic_error that names the first broken invariant.
  void check() const;

 private:
  struct Slot {
    Page page;
    PageState state;
    Bytes live = 0;  // Allocated bytes on the page, kept while it is Evicting, Evicted or Restoring
  };
  using SlotMap = std::map<Bytes, Slot>;

  /// The indexes and sums take note of a tile, or forget it. Pre of enter: prepare() of the indexes.
  void enter(const Tile& tile) noexcept;
  void leave(const Tile& tile) noexcept;
  void prepare_indexes();
  std::optional<Tile> block_at(Bytes offset) const noexcept;
  void become_free(const Tile& block);
  void split_at(Bytes offset);
  void paint(Bytes begin, Bytes end, TileKind kind);
  void repaint_unallocated(Extent range, TileKind kind);
  SlotMap::const_iterator slot_covering(Bytes offset) const;
  SlotMap::iterator slot_in_state(Bytes offset, PageState expected, std::string_view move);
  /// Bytes of tiles of `kind` in `range`.
  Bytes bytes_of(TileKind kind, Extent range) const;
  Bytes live_bytes(Extent range) const { return bytes_of(TileKind::Allocated, range); }
  void forget(SlotMap::iterator slot);

  const Bytes granularity_;
  TileMap tiles_;
  SlotMap slots_;
  SizeIndex free_, vacant_;  // tiles of these kinds
  std::size_t away_ = 0;     // slots that are not Resident: while there are none, blocks need no look at their pages
  Bytes allocated_bytes_ = 0;
  Bytes evicted_bytes_ = 0;
  Bytes retired_bytes_ = 0;
  Bytes mapped_bytes_ = 0;
};

}  // namespace lowtide
