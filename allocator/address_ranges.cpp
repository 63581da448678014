#include "allocator/address_ranges.h"

#include <iterator>

namespace lowtide {

void AddressRanges::insert(std::uintptr_t begin, Bytes size) { ranges_.emplace(begin, size); }

bool AddressRanges::erase(std::uintptr_t begin, Bytes size) noexcept {
  if (!has(begin, size)) return false;
  ranges_.erase(begin);
  return true;
}

bool AddressRanges::has(std::uintptr_t begin, Bytes size) const noexcept {
  const auto found = ranges_.find(begin);
  return found != ranges_.end() && found->second == size;
}

bool AddressRanges::overlaps(std::uintptr_t begin, Bytes size) const noexcept {
  if (holder(begin) != ranges_.end()) return true;
  const auto next = ranges_.lower_bound(begin);
  return next != ranges_.end() && next->first - begin < size;
}

bool AddressRanges::inside_one(std::uintptr_t begin, Bytes size) const noexcept {
  const auto found = holder(begin);
  return found != ranges_.end() && size <= found->second - (begin - found->first);
}

bool AddressRanges::covers(std::uintptr_t begin, Bytes size) const noexcept {
  for (auto found = holder(begin); found != ranges_.end(); found = ranges_.find(begin)) {
    const Bytes rest = found->second - (begin - found->first);
    if (size <= rest) return true;
    begin += rest;
    size -= rest;
  }
  return false;
}

AddressRanges::Ranges::const_iterator AddressRanges::holder(std::uintptr_t address) const noexcept {
  auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return ranges_.end();
  const auto candidate = std::prev(after);
  return address - candidate->first < candidate->second ? candidate : ranges_.end();
}

}  // namespace lowtide
