#include "allocator/address_owners.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "allocator/errors.h"

namespace lowtide {

// calloc, because pages that nobody wrote to then cost nothing; all bits 0 is what an atomic 0 is.
AddressOwners::AddressOwners() : slots_(static_cast<Slot*>(std::calloc(kSlots, sizeof(Slot)))) {
  if (slots_ == nullptr) throw std::bad_alloc();
}

AddressOwners::~AddressOwners() { std::free(slots_); }

/// Calls `visit(mark, offset)` for each mark that the range has.
template <class Visit>
void AddressOwners::for_each_mark(DeviceAddress base, Bytes size, Visit&& visit) noexcept {
  const auto begin = static_cast<std::uintptr_t>(base);
  const auto end = begin + size;
  for (std::uintptr_t slot = begin / kLeastRange; slot * kLeastRange < end; ++slot) {
    const std::uintptr_t start = slot * kLeastRange;
    if (begin > start) {
      visit(slots_[slot].from, begin - start);
    } else {
      visit(slots_[slot].until, std::min<Bytes>(end - start, kLeastRange));
    }
  }
}

void AddressOwners::claim(DeviceAddress base, Bytes size, std::uint16_t owner) {
  if (static_cast<std::uintptr_t>(base + (size - 1)) >> kAddressBits != 0) {
    throw DriverError("reserve", "an address has more than 48 bits");
  }
  for_each_mark(base, size, [&](std::atomic<std::uint64_t>& where, Bytes offset) {
    where.store(mark(owner, offset), std::memory_order_release);
  });
}

void AddressOwners::disown(DeviceAddress base, Bytes size) noexcept {
  for_each_mark(base, size,
                [](std::atomic<std::uint64_t>& where, Bytes) { where.store(0, std::memory_order_release); });
}

std::optional<std::uint16_t> AddressOwners::owner(DeviceAddress address) const noexcept {
  const auto at = static_cast<std::uintptr_t>(address);
  if (at >> kAddressBits != 0) return std::nullopt;
  const Slot& slot = slots_[at / kLeastRange];
  const Bytes offset = at % kLeastRange;
  const std::uint64_t until = slot.until.load(std::memory_order_acquire);
  if (until != 0 && offset < (until & 0xffffffff)) return static_cast<std::uint16_t>((until >> 32) - 1);
  const std::uint64_t from = slot.from.load(std::memory_order_acquire);
  if (from != 0 && offset >= (from & 0xffffffff)) return static_cast<std::uint16_t>((from >> 32) - 1);
  return std::nullopt;
}

}  // namespace lowtide
