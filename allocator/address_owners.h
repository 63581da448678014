// Which device's allocator an address belongs to, without a lock: torch asks at every free, for its own blocks too.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "allocator/types.h"

namespace lowtide {

/// Address ranges and their owners' numbers. Safe from any thread: owner() takes no lock, claim() and disown() may run beside each
/// other for ranges that do not overlap. 16 MiB of address space, of which the parts that are written to use memory.
class AddressOwners {
 public:
  /// Ranges are at least so large.
  static constexpr Bytes kLeastRange = 256_MiB;

  AddressOwners();
  ~AddressOwners();
  AddressOwners(const AddressOwners&) = delete;
  AddressOwners& operator=(const AddressOwners&) = delete;

  /// `owner`'s addresses from now on. Throws DriverError, and has claimed nothing then, for addresses of more than 48 bits,
  /// which no driver gives today. Pre: size >= kLeastRange; nobody else's addresses.
  void claim(DeviceAddress base, Bytes size, std::uint16_t owner);
  /// Undoes claim() of exactly this range.
  void disown(DeviceAddress base, Bytes size) noexcept;

  /// Nobody's: nothing. An address of a live block always has its owner; about others the answer may be older than a
  /// claim of another thread.
  std::optional<std::uint16_t> owner(DeviceAddress address) const noexcept;

 private:
  // Ranges as large as a slot meet at most once in each. A mark is 0 or the owner's number + 1 above, and the offset in the
  // slot below.
  struct Slot {
    std::atomic<std::uint64_t> until{0};  // the owner of the slot up to there
    std::atomic<std::uint64_t> from{0};   // the owner of the slot from there on
  };
  static constexpr int kAddressBits = 48;
  static constexpr std::size_t kSlots = (std::size_t{1} << kAddressBits) / kLeastRange;

  static std::uint64_t mark(std::uint16_t owner, Bytes offset) noexcept {
    return (std::uint64_t{owner} + 1) << 32 | offset;
  }
  template <class Visit>
  void for_each_mark(DeviceAddress base, Bytes size, Visit&& visit) noexcept;

  Slot* const slots_;
};

}  // namespace lowtide
