// The arenas of one device: by what they are for, and by address.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "allocator/arena.h"
#include "allocator/device.h"
#include "allocator/stats.h"

namespace lowtide {

/// What an arena is for: blocks of one owner and one size class, in the order of one stream.
struct ArenaKey {
  OwnerId owner = kNoOwner;
  StreamHandle stream{};
  SizeClass size_class = SizeClass::Large;
  friend auto operator<=>(const ArenaKey&, const ArenaKey&) = default;
};

/// An arena with its place in the address space and the order its blocks follow.
struct PlacedArena {
  PlacedArena(DeviceAddress where, Bytes capacity, Bytes granularity, ArenaKey of)
      : arena(capacity, granularity), base(where), key(of) {}

  bool contains(DeviceAddress address) const noexcept { return address >= base && address < base + arena.capacity(); }

  /// Bytes of host memory that it occupies.
  Bytes metadata_bytes() const noexcept;

  Arena arena;
  /// Streams besides key.stream that use a live block, by its offset. Most blocks have none.
  std::unordered_map<Bytes, std::vector<StreamHandle>> other_streams{};
  std::vector<StreamHandle> recorded_streams{};   // every stream recorded for a block of this arena so far
  std::map<DeviceAddress, std::string> pinned{};  // live blocks that may not leave the device, and why
  EventHandle
      last_use{};  // recorded on key.stream when somebody asked whether it is past its unused pages; 0: nobody did
  bool freed_since = false;  // a block was freed after that
  const DeviceAddress base;
  const ArenaKey key;
};

/// Arenas stay where they are while they are here. Not synchronised: the heap's mutex guards it.
class ArenaDirectory {
 public:
  using ByKey = std::map<ArenaKey, std::unique_ptr<PlacedArena>>;

  PlacedArena* find(const ArenaKey& key) const noexcept;
  /// The arena whose address range contains `address`.
  PlacedArena* at(DeviceAddress address) const noexcept;
  /// Throws std::bad_alloc and has added nothing then. Pre: neither its key nor its addresses are here.
  PlacedArena& add(std::unique_ptr<PlacedArena> placed);
  void remove(const PlacedArena& placed) noexcept;

  /// All, in order of key: those of one owner are neighbours.
  ByKey::const_iterator begin() const noexcept { return by_key_.begin(); }
  ByKey::const_iterator end() const noexcept { return by_key_.end(); }
  /// The first one of `owner` or of a later one.
  ByKey::const_iterator first_of(OwnerId owner) const { return by_key_.lower_bound({owner, {}, SizeClass::Small}); }
  const std::map<DeviceAddress, PlacedArena*>& by_address() const noexcept { return by_address_; }

 private:
  static std::size_t slot_of(const ArenaKey& key) noexcept;

  ByKey by_key_;
  std::map<DeviceAddress, PlacedArena*> by_address_;
  // What was found last: a program asks for few arenas, again and again.
  mutable std::array<PlacedArena*, 16> recent_by_key_{};
  mutable PlacedArena* recent_by_address_ = nullptr;
};

}  // namespace lowtide
