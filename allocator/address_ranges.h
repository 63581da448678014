// A set of address ranges that do not overlap. Bookkeeping of the host device; it touches no memory.
#pragma once

#include <cstdint>
#include <map>

#include "allocator/types.h"

namespace lowtide {

/// Invariants: every size > 0; ranges are disjoint (adjoining ones stay separate). Not thread-safe.
class AddressRanges {
 public:
  /// Pre: does not overlap a range of the set.
  void insert(std::uintptr_t begin, Bytes size);
  /// False, with nothing changed, unless the set has exactly this range.
  bool erase(std::uintptr_t begin, Bytes size) noexcept;

  bool has(std::uintptr_t begin, Bytes size) const noexcept;
  bool overlaps(std::uintptr_t begin, Bytes size) const noexcept;
  /// True if one range of the set holds all of [begin, begin + size).
  bool inside_one(std::uintptr_t begin, Bytes size) const noexcept;
  /// True if ranges of the set, side by side, hold all of [begin, begin + size).
  bool covers(std::uintptr_t begin, Bytes size) const noexcept;

  auto begin() const noexcept { return ranges_.begin(); }
  auto end() const noexcept { return ranges_.end(); }

 private:
  using Ranges = std::map<std::uintptr_t, Bytes>;
  /// The range that holds `address`, or end().
  Ranges::const_iterator holder(std::uintptr_t address) const noexcept;

  Ranges ranges_;
};

}  // namespace lowtide
