// A range of offsets cut into tiles, each with a kind and 9 bits of its owner's. Every tile is found from its offset in constant
// time, and its neighbours from it; a tile costs nothing, a stretch of 2 MiB in which one starts 8.5 KiB (0.42 %).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/types.h"

namespace lowtide {

/// What a range of an arena is.
enum class TileKind : std::uint8_t {
  Allocated,  // one block, handed out
  Retired,    // one block, freed, but a stream may still use it
  Free,       // memory behind it, may be handed out
  Withheld,   // unused, on a page that is leaving, away or coming back: may not be handed out
  Vacant,     // address space only
};

/// Where a tile starts is one bit for each unit of the range, and its kind a word beside it; where it ends is where the next
/// one starts. So a cut is a bit set, and tiles that merge are a bit cleared.
/// Not synchronised.
class TileMap {
 public:
  struct Tile {
    Bytes offset = 0;
    Bytes size = 0;
    TileKind kind = TileKind::Vacant;
    std::uint32_t slack = 0;  // bytes at the end that nobody asked for, below kBlockUnit
    Bytes end() const noexcept { return offset + size; }
    Bytes requested() const noexcept { return size - slack; }
  };

  /// One tile of `kind` over [0, capacity). Tiles start and end at multiples of kBlockUnit.
  TileMap(Bytes capacity, TileKind kind);

  Bytes capacity() const noexcept { return capacity_; }

  /// Whether a tile starts at `offset`. False beyond the range.
  bool starts_at(Bytes offset) const noexcept;
  /// The tile that starts at `offset`. Pre: one does.
  Tile at(Bytes offset) const noexcept;
  /// The tile that contains `offset`. Pre: offset < capacity.
  Tile covering(Bytes offset) const noexcept;
  /// The tile before the one that starts at `offset`. Pre: offset > 0.
  Tile before(Bytes offset) const noexcept { return covering(offset - 1); }

  /// What start() at `offset` may have to allocate is there afterwards, and start() does not fail. Throws std::bad_alloc.
  void prepare(Bytes offset);
  /// A tile starts at `offset` from now on, or has this kind from now on. Pre: prepare(offset), or a tile started there.
  void start(Bytes offset, TileKind kind, std::uint32_t slack = 0) noexcept;
  /// The tile that starts at `offset` becomes the end of the one before it. Pre: offset > 0 and a tile starts there.
  void merge_with_previous(Bytes offset) noexcept;

  /// Calls `visit` with every tile that overlaps [begin, end), in order. The map may not change meanwhile.
  template <class Visit>
  void for_each(Bytes begin, Bytes end, Visit&& visit) const {
    if (begin >= end) return;
    for (Tile tile = covering(begin);; tile = at(tile.end())) {
      visit(tile);
      if (tile.end() >= end) return;
    }
  }

  /// Bytes of memory that this map occupies beside itself.
  Bytes metadata_bytes() const noexcept;

 private:
  static constexpr Bytes kStretch = 2_MiB;
  static constexpr std::size_t kStretchUnits = kStretch / kBlockUnit;
  static constexpr std::size_t kWordBits = 64;

  struct Stretch {
    std::uint64_t words_used = 0;  // one bit for each of `bits` that is not 0
    std::array<std::uint64_t, kStretchUnits / kWordBits> bits{};
    std::array<std::uint16_t, kStretchUnits> words;  // of units where a tile starts; the others mean nothing
  };

  static_assert(kStretchUnits / kWordBits == kWordBits, "one word has a bit for each of a stretch's");

  /// The first unit of the stretch at `unit` or after it where a tile starts; kStretchUnits: none.
  static std::size_t first_start(const Stretch& stretch, std::size_t unit) noexcept;
  /// The last one at `unit` or before it; kStretchUnits: none.
  static std::size_t last_start(const Stretch& stretch, std::size_t unit) noexcept;
  static std::size_t stretch_of(Bytes offset) noexcept { return offset / kStretch; }
  static std::size_t unit_of(Bytes offset) noexcept { return offset % kStretch / kBlockUnit; }
  /// Where the first tile beyond `offset` starts; the capacity if there is none.
  Bytes next_start(Bytes offset) const noexcept;
  /// Where the tile that contains `offset` starts.
  Bytes last_start(Bytes offset) const noexcept;

  const Bytes capacity_;
  std::vector<std::unique_ptr<Stretch>> stretches_;  // null where no tile starts
  std::vector<std::uint64_t> used_;                  // one bit for each stretch that is not null
  std::unique_ptr<Stretch> spare_;                   // so that a tile that comes and goes allocates nothing
  std::size_t stretches_in_use_ = 0;
};

}  // namespace lowtide
