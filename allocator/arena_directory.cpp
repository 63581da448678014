#include "allocator/arena_directory.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace lowtide {

Bytes PlacedArena::metadata_bytes() const noexcept {
  Bytes bytes = sizeof(*this) + arena.metadata_bytes();
  for (const auto& [offset, streams] : other_streams) {
    bytes += sizeof(std::pair<const Bytes, std::vector<StreamHandle>>) + 2 * sizeof(void*) +
             streams.capacity() * sizeof(StreamHandle);
  }
  return bytes;
}

std::size_t ArenaDirectory::slot_of(const ArenaKey& key) noexcept {
  // Streams are addresses of objects, whose low bits say nothing.
  const auto stream = static_cast<std::uintptr_t>(key.stream);
  return (stream / 16 + stream / 4096 + 3 * static_cast<std::size_t>(key.owner) +
          8 * static_cast<std::size_t>(key.size_class)) %
         std::tuple_size_v<decltype(recent_by_key_)>;
}

PlacedArena* ArenaDirectory::find(const ArenaKey& key) const noexcept {
  PlacedArena*& recent = recent_by_key_[slot_of(key)];
  if (recent != nullptr && recent->key == key) return recent;
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  return recent = found->second.get();
}

PlacedArena* ArenaDirectory::at(DeviceAddress address) const noexcept {
  if (recent_by_address_ != nullptr && recent_by_address_->contains(address)) return recent_by_address_;
  const auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  PlacedArena* const placed = std::prev(after)->second;
  if (!placed->contains(address)) return nullptr;
  return recent_by_address_ = placed;
}

PlacedArena& ArenaDirectory::add(std::unique_ptr<PlacedArena> placed) {
  PlacedArena& added = *placed;
  const auto by_address = by_address_.emplace(added.base, &added).first;
  try {
    by_key_.emplace(added.key, std::move(placed));
  } catch (...) {
    by_address_.erase(by_address);
    throw;
  }
  return added;
}

void ArenaDirectory::remove(const PlacedArena& placed) noexcept {
  std::ranges::replace(recent_by_key_, const_cast<PlacedArena*>(&placed), nullptr);
  if (recent_by_address_ == &placed) recent_by_address_ = nullptr;
  by_address_.erase(placed.base);
  by_key_.erase(ArenaKey(placed.key));  // a copy: the arena ends here
}

}  // namespace lowtide
